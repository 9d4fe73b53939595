"""Head-parallel attention: each rank holds some of the kv heads, and the outputs laid side by side are the whole call's, bit for bit.

A kernel works on one kv head at a time, so that the heads beside it must not matter. How many parts a decode row is cut into may depend on
the number of heads, and the bits on it: decode is judged where `num_splits` can be given, or `batch_invariant` is claimed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import Numbers, attend, head_name, row_name
from conformance.clauses import CLAUSES
from conformance.implementation import Implementation
from conformance.judge import Judge

NUM_SPLITS = 4


def head_cases(num_ranks: int, dtype: torch.dtype) -> list[AttentionCase]:
    """Two kv heads a rank: lengths around the end of a block, one far past a tile, and a prefill that follows a cached prefix."""
    shape: dict[str, Any] = dict(dtype=dtype, block_size=16, num_kv_heads=2 * num_ranks, group_size=3, head_dim=64, scale=0.125, table_seed=1)
    return [
        AttentionCase(decode=True, query_lens=(1,) * 5, context_lens=(1, 16, 17, 300, 40), data_seed=1, **shape),
        AttentionCase(decode=True, query_lens=(1,), context_lens=(700,), data_seed=2, **shape),
        AttentionCase(decode=False, query_lens=(19, 1, 33), context_lens=(19, 40, 70), data_seed=3, **shape),
    ]


def random_numbers(case: AttentionCase) -> Numbers:
    generator = torch.Generator().manual_seed(case.data_seed)
    in_slots = (case.num_slots, case.num_kv_heads, case.head_dim)
    return Numbers(
        q=torch.randn((len(case.rows), case.num_heads, case.head_dim), generator=generator),
        keys=torch.randn(in_slots, generator=generator),
        values=torch.randn(in_slots, generator=generator),
    )


def of_heads(case: AttentionCase, numbers: Numbers, first: int, count: int) -> tuple[AttentionCase, Numbers]:
    """The case of kv heads first ... first + count - 1 alone."""
    kv, group = slice(first, first + count), case.group_size
    some = Numbers(numbers.q[:, first * group : (first + count) * group], numbers.keys[:, kv], numbers.values[:, kv])
    return replace(case, num_kv_heads=count), some


def judged_cases(implementation: Implementation, num_ranks: int) -> Iterator[AttentionCase]:
    for dtype in implementation.capabilities.dtypes:
        for case in head_cases(num_ranks, dtype):
            if case.function not in implementation.offered:
                continue
            if not case.decode or takes_num_splits(implementation, case) or "batch_invariant" in implementation.capabilities.claims:
                yield case


def takes_num_splits(implementation: Implementation, case: AttentionCase) -> bool:
    """By name: **keywords may be handed on to what knows nothing of it."""
    return "num_splits" in inspect.signature(implementation.offered[case.function]).parameters


def head_parallel(implementation: Implementation, case: AttentionCase) -> str:
    """"" or what is wrong, the same on every rank: each calls this, computes its heads, and compares all of them with the whole."""
    rank, size = dist.get_rank(), dist.get_world_size()
    judge = Judge(implementation, CLAUSES["DEC-5" if case.decode else "PRE-5"], case.function)
    options: dict[str, Any] = {"num_splits": NUM_SPLITS} if takes_num_splits(implementation, case) else {}
    numbers, heads = random_numbers(case), case.num_kv_heads // size
    own_case, own_numbers = of_heads(case, numbers, rank * heads, heads)
    own = attend(judge, own_case, own_numbers, **options).out.to(implementation.device)
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own)
    together = torch.cat(every, dim=1).cpu()
    whole = attend(judge, case, numbers, **options).out
    wrong = (together != whole).nonzero()
    told = ""
    if len(wrong):
        row, head, dim = (int(x) for x in wrong[0])
        told = (
            f"{case.headline(implementation.name, str(implementation.device))}: {row_name(case, row)}, {head_name(case, head)}, dimension {dim} "
            f"is {float(together[row, head, dim])!r} on rank {head // (heads * case.group_size)}, which holds {heads} kv heads, and "
            f"{float(whole[row, head, dim])!r} where one device holds all {case.num_kv_heads}; {len(wrong)} of {whole.numel()} elements differ"
        )
    findings: list[str] = [""] * size
    dist.all_gather_object(findings, told)
    return next((text for text in findings if text), "")
