"""A decode kernel with one planted fault, to see what a failure looks like.

    make conformance IMPL=examples/wrong_kernel.py

The fault: a block count rounded the wrong way. Where the newest token opens a block, that block is not read, and the token is dropped.
With random inputs and a tolerance this passes most of the time, since one token of n weighs about 1/n.
"""

import torch


def decode_attention(q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """(B, Hq, D): one query per sequence over its context, but for the newest token where it opens a block."""
    out = torch.zeros_like(q)
    block_size = k_cache.shape[1]
    group_size = q.shape[1] // k_cache.shape[2]
    for i, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        num_blocks = max(1, (length + block_size - 2) // block_size)  # the fault: + block_size - 1 rounds up
        blocks = block_tables[i, :num_blocks].long()
        keys = k_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(group_size, dim=1)
        values = v_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(group_size, dim=1)
        scores = scale * torch.einsum("hd,nhd->hn", q[i].float(), keys)
        out[i] = torch.einsum("hn,nhd->hd", scores.softmax(dim=1), values).to(q.dtype)
    return out
