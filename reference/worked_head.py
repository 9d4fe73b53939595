"""One head worked out end to end with small numbers: Q, K^T, scores, causal softmax, V, output.

One sequence of n = 3 positions, all of them queried, head dimension D = 2, scale 1 (in practice 1 / sqrt(D)).

>>> Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)   # (n, D): one row per query token
>>> K = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 2.0]], dtype=torch.float64)   # (n, D): one row per key token
>>> V = torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 4.0]], dtype=torch.float64)   # (n, D): one row per value token

Scores (n, n) = Q K^T. The product sums over the head dimension D; row = query token, column = key token:

>>> scores = Q @ K.T
>>> scores.tolist()
[[2.0, 0.0, 2.0], [0.0, 2.0, 2.0], [2.0, 2.0, 4.0]]

Causal: query token r sees key tokens 0 ... r. Hidden scores are -inf:

>>> causal = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])   # True = hidden
>>> scores = scores.masked_fill(causal, float("-inf"))
>>> scores.tolist()
[[2.0, -inf, -inf], [0.0, 2.0, -inf], [2.0, 2.0, 4.0]]

Softmax over the key axis (each row sums to 1). Row 1 is exp(-2) : 1, row 2 is exp(-2) : exp(-2) : 1:

>>> weights = torch.softmax(scores, dim=1)
>>> [[round(w, 4) for w in row] for row in weights.tolist()]
[[1.0, 0.0, 0.0], [0.1192, 0.8808, 0.0], [0.1065, 0.1065, 0.787]]

Output (n, D) = weights V. This product sums over the key tokens; row = query token, column = dimension of V:

>>> out = weights @ V
>>> [[round(x, 4) for x in row] for row in out.tolist()]
[[1.0, 0.0], [0.1192, 0.8808], [3.2545, 3.2545]]

The reference, which walks position after position, gives the same; its head axis is 1 here:

>>> walked, lse = attend_token_by_token(Q[:, None], K[:, None], V[:, None], scale=1.0)
>>> torch.allclose(walked[:, 0], out, rtol=0, atol=1e-15)
True

The log-sum-exp of row 1 is log(exp(0) + exp(2)), of row 0 that of its one score:

>>> [round(x, 4) for x in lse[:, 0].tolist()]
[2.0, 2.1269, 4.2395]

In a paged cache the rows of K and V lie in slots. At block size 2 with table [3, 1] positions 0, 1, 2 lie in slots 6, 7, 2, and the decode
step at position 2 is the last row of the prefill:

>>> k_cache, v_cache = torch.zeros(4, 2, 1, 2, dtype=torch.float64), torch.zeros(4, 2, 1, 2, dtype=torch.float64)
>>> store_kvcache(K[:, None], V[:, None], k_cache, v_cache, torch.tensor([6, 7, 2]))
>>> decoded = decode_attention(Q[2:, None], k_cache, v_cache, context_lens=torch.tensor([3]), block_tables=torch.tensor([[3, 1]]), scale=1.0)
>>> torch.equal(decoded[0], walked[2])
True
"""

import torch

from reference.attention import attend_token_by_token, decode_attention
from reference.cache import store_kvcache

__all__ = ["attend_token_by_token", "decode_attention", "store_kvcache", "torch"]
