"""An attention that is exact but for one fault at one row and head: a position dropped, a foreign slot read, K joined with another V.

It knows the case that it is called with, and weighs every slot of the pool by how often the row is to read it.
"""

import random

import torch

from conformance.cases.attention import AttentionCase
from conformance.clauses import CLAUSES
from conformance.implementation import Implementation
from conformance.judge import Judge

CPU = torch.device("cpu")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Planted:
    def __init__(self, case, device=CPU):
        self.case = case
        self.reads = torch.zeros(len(case.rows), case.num_heads, case.num_slots, device=device)  # how often each row and head reads each slot
        for row, (sequence, visible) in enumerate(case.rows):
            self.reads[row, :, case.slots[sequence][:visible]] = 1
        self.exchanged = []  # (row, head, slot, slot): K of the first is joined with V of the second, and the other way round

    def attend(self, q, keys, values, scale):
        group = self.case.group_size
        keys = keys.reshape(-1, *keys.shape[-2:]).float().repeat_interleave(group, dim=1)
        values = values.reshape(-1, *values.shape[-2:]).float().repeat_interleave(group, dim=1)
        scores = (scale * torch.einsum("thd,nhd->thn", q.float(), keys)).masked_fill(self.reads == 0, -torch.inf)
        largest = scores.amax(dim=2, keepdim=True)
        weights = self.reads * torch.exp(scores - torch.where(largest == -torch.inf, 0.0, largest))
        weights = weights / weights.sum(dim=2, keepdim=True).clamp(min=1e-38)
        for row, head, one, other in self.exchanged:
            weights[row, head, [one, other]] = weights[row, head, [other, one]]
        return torch.einsum("thn,nhd->thd", weights, values).to(q.dtype)

    def decode_attention(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
        return self.attend(q, k_cache, v_cache, scale)

    def prefill_attention(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables=None):
        return self.attend(q, k, v, scale)


def judge_of(target, clause, function="decode_attention", device=CPU, **how):
    return Judge(Implementation("planted", target, device), CLAUSES[clause], function, **how)


def random_case(seed, *, decode, dtype, longest=150):
    """A case whose place for a fault is drawn too: (case, row, head), the row seeing at least two positions."""
    draw = random.Random(seed)
    contexts = [draw.choice([2, 3, 16, 17, draw.randint(2, longest)]) for _ in range(draw.randint(1, 3))]
    queries = [1 if decode else draw.randint(1, min(n, 20)) for n in contexts]
    paged = decode or draw.random() < 0.7
    case = AttentionCase(
        decode=decode,
        dtype=dtype,
        block_size=draw.choice([1, 3, 4, 16, 32]),
        num_kv_heads=draw.randint(1, 3),
        group_size=draw.randint(1, 4),
        head_dim=draw.choice([16, 32, 40, 64, 128]),
        query_lens=tuple(queries),
        context_lens=tuple(contexts if paged else queries),
        paged=paged,
        filler=draw.choice(["minus_one", "impossible", "foreign"]),
        cache_layout=draw.choice(["plain", "layer", "interleaved", "packed", "head_major"]),
        table_seed=draw.randint(0, 999),
        data_seed=draw.randint(0, 999),
    )
    rows = [row for row, (_, visible) in enumerate(case.rows) if visible >= 2]
    if not rows:
        return random_case(seed + 1_000_000, decode=decode, dtype=dtype, longest=longest)
    return case, draw.choice(rows), draw.randrange(case.num_heads), draw
