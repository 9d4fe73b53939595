"""Attention cases that every effort tries: empty and large batches, the widest groups, scales that nobody trains with, and what takes other
code than the small cases do: splits, second query tiles, wide heads, and those beside short neighbours."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from conformance.capabilities import Capabilities
from conformance.cases.attention import AttentionCase, WithScores

WIDEST_GROUPS = (48, 33)  # query heads on one kv head
UNUSUAL_SCALES = (1e-5, -0.25, 0.0)  # a negative scale prefers the least similar key, 0 weighs all alike: arithmetic like any other
MANY_ROWS = (67, 257)  # of a decode step: past the 64, the 128 and the 256 that a grid may be cut in
MANY_SEQUENCES = (33, 131)  # of a prefill
MANY_PROGRAMS = 1031  # of a grid
SPLIT = 1025  # positions: past the 512 from which a context may be split, and one more than whole splits
WHOLE_SPLITS = 1024  # positions that leave nothing to a last split
LONGEST = (8_193, 32_769)  # positions: past the largest window that models leave on, and past 15 bits, which is for a GPU


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
    two_heads = [replace(case, num_kv_heads=2, group_size=group) for group in (12, 16) if stated is None or group in stated]
    return two_heads + [replace(case, group_size=group) for group in WIDEST_GROUPS if stated is None or group in stated]


def unusual_scales(capabilities: Capabilities, decode: bool) -> list[AttentionCase]:
    case = fixed_case(capabilities, decode, (1, 1) if decode else (3, 1), (5, 18))
    return [replace(case, scale=scale, dtype=dtype) for scale in UNUSUAL_SCALES for dtype in capabilities.dtypes]


def rows_past_a_grid(capabilities: Capabilities, decode: bool) -> list[AttentionCase]:
    """Rows at both ends of grids of 512 and of 1,024 programs; all others are empty, which costs an interpreter little."""
    contexts = [0] * MANY_PROGRAMS
    for row in (0, 511, 512, 1023, 1024, MANY_PROGRAMS - 1):
        contexts[row] = 2 + row % 3
    queries = [1 if decode or n else 0 for n in contexts]
    return cases_of(capabilities, decode, tuple(queries), tuple(contexts))


def large_batches(capabilities: Capabilities, decode: bool, effort: str, seed: int) -> list[AttentionCase]:
    """More rows or sequences than a grid's usual cuts, with little of each; none sees a single position, which would take a second pass."""
    cases = []
    numbers = MANY_ROWS if decode else MANY_SEQUENCES
    for number in {"quick": numbers[:1], "default": numbers[1:], "thorough": numbers}[effort]:
        draw = random.Random(f"{seed} {number}")
        contexts = tuple(draw.choice((2, 3, 5)) for _ in range(number))
        queries = tuple(1 if decode else draw.randint(1, min(n - 1, 2)) for n in contexts)
        case = replace(
            fixed_case(capabilities, decode, queries, contexts), group_size=capabilities.allowed("group_sizes", (2, 3, 4))[0],
            block_size=capabilities.allowed("block_sizes", (16, 32, 4))[0], dtype=draw.choice(capabilities.dtypes),
        )  # fmt: skip
        cases.append(replace(case, table_seed=draw.randrange(1000), data_seed=draw.randrange(1000)))
    return cases


def cases_of(
    capabilities: Capabilities, decode: bool, query_lens: tuple[int, ...], context_lens: tuple[int, ...], *, num_kv_heads: int = 1,
    group_size: int | None = None, head_dim: int | None = None, dtype: torch.dtype | None = None, paged: bool = True,
) -> list[AttentionCase]:  # fmt: skip
    """The case of these lengths and sizes, the smallest for those left out; none where the implementation does not take one of them."""
    case = fixed_case(capabilities, decode, query_lens, context_lens)
    asked = (
        (group_size, capabilities.group_sizes),
        (head_dim, capabilities.head_dims),
        (dtype, capabilities.dtypes),
    )
    if case.context_lens != context_lens or any(size is not None and stated is not None and size not in stated for size, stated in asked):
        return []
    head_dim = head_dim or case.head_dim
    return [
        replace(
            case, num_kv_heads=num_kv_heads, group_size=group_size or case.group_size, head_dim=head_dim, scale=head_dim**-0.5,
            dtype=dtype or case.dtype, paged=paged,
        )
    ]  # fmt: skip


def other_decodes(capabilities: Capabilities) -> list[AttentionCase]:
    """Decode rows that a kernel may take on other paths: splits with several heads and wide groups, wide heads, short rows beside long ones."""
    return [
        *cases_of(capabilities, True, (1,), (SPLIT,), num_kv_heads=3, group_size=2),
        *cases_of(capabilities, True, (1,), (SPLIT,), group_size=8),
        *cases_of(capabilities, True, (1,), (600,), group_size=12),
        *cases_of(capabilities, True, (1,), (600,), num_kv_heads=8, head_dim=128),
        *cases_of(capabilities, True, (1,), (600,), head_dim=256),
        *cases_of(capabilities, True, (1,), (WHOLE_SPLITS,), dtype=torch.float32),
        *cases_of(capabilities, True, (1,), (4097,)),  # past a window that many models leave on
        *cases_of(capabilities, True, (1, 1), (SPLIT, 3)),
        *cases_of(capabilities, True, (1, 1, 1), (600, SPLIT, 700)),
    ]


def other_prefills(capabilities: Capabilities) -> list[AttentionCase]:
    """Query rows of a second tile: of several heads, without a cache, after a long prefix, of a second sequence; and of a fifth tile.

    And a prefix of one large block.
    """
    size = capabilities.allowed("block_sizes", (256, 128, 64, 16))[0]
    return [
        *cases_of(capabilities, False, (65,), (65,), num_kv_heads=3, group_size=3),
        *cases_of(capabilities, False, (300,), (300,), paged=False),  # past windows of 128 and 256 too
        *cases_of(capabilities, False, (65,), (665,), num_kv_heads=2),
        *cases_of(capabilities, False, (3, 70), (3, 90), head_dim=128),
        *cases_of(capabilities, False, (270,), (270,)),
        *(replace(case, block_size=size) for case in cases_of(capabilities, False, (3,), (size + 3,))),
    ]


def many_without_a_cache(capabilities: Capabilities) -> list[AttentionCase]:
    return cases_of(capabilities, False, (2,) * 17, (2,) * 17, num_kv_heads=2, paged=False)


def longest(capabilities: Capabilities, decode: bool, on_gpu: bool) -> list[AttentionCase]:
    """One sequence of so many positions that only a few are tried."""
    dim = capabilities.allowed("head_dims", (64, 128))[0]
    lengths = LONGEST if on_gpu else LONGEST[:1]
    return [case for n in lengths for case in cases_of(capabilities, decode, (1 if decode else 3,), (n,), head_dim=dim)]


def strided_long_decodes(capabilities: Capabilities) -> list[AttentionCase]:
    """Contexts past a split, in caches and rows that are views: what small cases vary, where other code may run."""
    cases = [
        *cases_of(capabilities, True, (1,), (1100,)),
        *cases_of(capabilities, True, (1, 1), (3, 700), head_dim=80, group_size=3),
        *cases_of(capabilities, True, (1,), (600,), head_dim=64, group_size=4),
    ]
    return [replace(case, row_layout="fused", cache_layout=layout) for case, layout in zip(cases, ("interleaved", "unlike", "packed"), strict=False)]


def long_in_views(capabilities: Capabilities) -> list[AttentionCase]:
    """A context past a split among more than 16 rows, in caches that are views."""
    cases = cases_of(capabilities, True, (1,) * 18, (3, *[2] * 12, 600, *[2] * 4))
    return [replace(case, row_layout="fused", cache_layout="interleaved") for case in cases]


def large_pages(capabilities: Capabilities) -> list[AttentionCase]:
    """A whole page of 1,024 slots or more and one position after it, each of them queried."""
    sizes = (1024,) if capabilities.block_sizes is None else [size for size in capabilities.block_sizes if size >= 1024]
    dtype = torch.float32 if torch.float32 in capabilities.dtypes else None
    return [
        replace(case, block_size=size)
        for size in sorted(sizes)[:1]
        for case in cases_of(capabilities, False, (size + 1,), (size + 1,), dtype=dtype)
    ]


def strided_prefills(capabilities: Capabilities) -> list[AttentionCase]:
    """Second query tiles of rows that are views; and without a cache k and v that do not lie as q does, nor as each other."""
    second_tiles = [*cases_of(capabilities, False, (70,), (90,), head_dim=64), *cases_of(capabilities, False, (70,), (70,), num_kv_heads=2)]
    unpaged = cases_of(capabilities, False, (3, 20), (3, 20), paged=False, num_kv_heads=2)
    layouts = (("plain", "fused"), ("fused", "head_major"), ("fused", "plain"))
    return [
        *(replace(case, row_layout="fused", cache_layout="interleaved") for case in second_tiles),
        *(replace(case, kv_layouts=kv) for case in unpaged for kv in layouts),
    ]


def level_whole_splits(capabilities: Capabilities) -> list[WithScores]:
    """Level scores far below 0, and nothing in a last split: its maximum must not be 0."""
    return [WithScores(case, "level", -1e4) for case in cases_of(capabilities, True, (1,), (WHOLE_SPLITS,))]


def empty_beside_long(capabilities: Capabilities) -> list[AttentionCase]:
    return cases_of(capabilities, True, (1, 1), (0, SPLIT))


def long_among_many(capabilities: Capabilities, decode: bool) -> list[AttentionCase]:
    """A row of many tiles in a batch so large that another way of summing may be taken, in the dtype that shows it."""
    short = 66 if decode else 20
    queries, contexts = (1 if decode else 5, *[1] * short), (700 if decode else 200, *[2] * short)
    dtype = torch.float32 if torch.float32 in capabilities.dtypes else None
    dim = capabilities.allowed("head_dims", (64,))[0]
    return cases_of(capabilities, decode, queries, contexts, dtype=dtype, head_dim=dim, num_kv_heads=2)
