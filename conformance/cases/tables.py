"""Block tables: physical blocks in shuffled order, never the identity, with live neighbours in the first and the last block."""

from __future__ import annotations

import random
from collections.abc import Sequence


def shuffled_tables(num_blocks_each: Sequence[int], pool: int, seed: int) -> list[list[int]]:
    """A table for each sequence out of blocks 0 ... pool - 1, no block twice, in no order.

    >>> shuffled_tables([2, 1], 5, seed=0)
    [[2, 1], [0]]
    """
    order = list(range(pool))
    shuffle = random.Random(seed)
    shuffle.shuffle(order)
    tables, taken = [], 0
    for count in num_blocks_each:
        tables.append(order[taken : taken + count])
        taken += count
    if taken and all(table == list(range(start, start + len(table))) for table, start in zip(tables, starts(tables), strict=True)):
        return shuffled_tables(num_blocks_each, pool, seed + 1) if pool > 1 else tables
    return tables


def starts(tables: Sequence[Sequence[int]]) -> list[int]:
    """Where each table would begin if blocks were handed out in order."""
    sums = [0]
    for table in tables:
        sums.append(sums[-1] + len(table))
    return sums[:-1]


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
