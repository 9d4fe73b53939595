"""Attention cases that every effort tries: empty and large batches, the widest groups, scales that nobody trains with."""

from __future__ import annotations

import random
from dataclasses import replace

from conformance.capabilities import Capabilities
from conformance.cases.attention import AttentionCase

WIDEST_GROUPS = (48, 33)  # query heads on one kv head
UNUSUAL_SCALES = (1e-5, -0.25, 0.0)  # a negative scale prefers the least similar key, 0 weighs all alike: arithmetic like any other
MANY_ROWS = (67, 131)  # of a decode step: past the 64 and the 128 that a grid may be cut in
MANY_SEQUENCES = (33, 37)  # of a prefill


def fixed_case(capabilities: Capabilities, decode: bool, query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> AttentionCase:
    """The smallest sizes that the implementation takes, for these lengths."""
    most = capabilities.max_context or max((1, *context_lens))
    head_dim = capabilities.allowed("head_dims", (16, 64, 128))[0]
    return AttentionCase(
        decode=decode,
        dtype=capabilities.dtypes[0],
        block_size=capabilities.allowed("block_sizes", (4, 16, 64, 256))[0],
        num_kv_heads=1,
        group_size=capabilities.allowed("group_sizes", (1, 2))[0],
        head_dim=head_dim,
        query_lens=query_lens,
        context_lens=tuple(min(n, most) for n in context_lens),
        scale=head_dim**-0.5,
    )


def empty_batches(capabilities: Capabilities, decode: bool) -> list[AttentionCase]:
    """Nobody is in the batch."""
    case = fixed_case(capabilities, decode, (), ())
    return [case] if decode else [case, replace(case, paged=False)]


def widest_groups(capabilities: Capabilities, decode: bool) -> list[AttentionCase]:
    stated = capabilities.group_sizes
    case = fixed_case(capabilities, decode, (1, 1) if decode else (3, 1), (5, 18))
    return [replace(case, group_size=group) for group in WIDEST_GROUPS if stated is None or group in stated]


def unusual_scales(capabilities: Capabilities, decode: bool) -> list[AttentionCase]:
    case = fixed_case(capabilities, decode, (1, 1) if decode else (3, 1), (5, 18))
    return [replace(case, scale=scale, dtype=dtype) for scale in UNUSUAL_SCALES for dtype in capabilities.dtypes]


def large_batches(capabilities: Capabilities, decode: bool, effort: str, seed: int) -> list[AttentionCase]:
    """More rows or sequences than a grid's usual cuts, with little of each."""
    cases = []
    numbers = MANY_ROWS if decode else MANY_SEQUENCES
    for number in {"quick": numbers[:1], "default": numbers[1:], "thorough": numbers}[effort]:
        draw = random.Random(f"{seed} {number}")
        contexts = tuple(draw.choice((1, 2, 3, 5)) for _ in range(number))
        queries = tuple(1 if decode else draw.randint(1, min(n, 2)) for n in contexts)
        case = fixed_case(capabilities, decode, queries, contexts)
        cases.append(replace(case, table_seed=draw.randrange(1000), data_seed=draw.randrange(1000)))
    return cases
