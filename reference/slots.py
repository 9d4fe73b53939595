"""slot_mapping: which row of the flat cache each token's KV goes to.

A *position* is a token's index in its sequence, a *slot* is a row of the flat cache: slot = physical block * block size + offset.

Worked example: block size 4, table [7, 9], 6 tokens. Positions 0..3 lie in physical block 7, positions 4 and 5 open physical block 9:

>>> slots_block_by_block([7, 9], 0, 6, block_size=4)
[28, 29, 30, 31, 36, 37]

Prefilled in two chunks, the second one from position 4, the second chunk's slots are the last two of the same list:

>>> slots_block_by_block([7, 9], 4, 6, block_size=4)
[36, 37]
>>> [slot_of_position([7, 9], p, block_size=4) for p in range(4, 6)]
[36, 37]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference.preconditions import (
    require,
    require_block_size,
    require_block_tables,
    require_cu_seqlens,
    require_int32_slots,
    require_integers,
    require_table,
)


def slot_of_position(block_table: Sequence[int], position: int, block_size: int, who: str = "the sequence") -> int:
    """slot(p) = table[p // S] * S + p % S  (clause SLOT-1).

    Raises ValueError if the table has no block for `position`; the sentence begins with `who`.
    """
    require_block_size(block_size)
    require(position >= 0, f"{who} has position {position}, it must be at least 0")
    require_table(block_table, position + 1, block_size, who)
    return block_table[position // block_size] * block_size + position % block_size


def slots_block_by_block(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """The slots of positions [start, end), one physical block after the other, as engines build them (nano-vllm `prepare_prefill`).

    Raises ValueError if the table is too short for `end` tokens or holds a negative id before it.
    """
    require_block_size(block_size)
    require(0 <= start <= end, f"positions [{start}, {end}) are no range from 0 on")
    require_table(block_table, end, block_size, "the sequence")
    slots: list[int] = []
    first_block = start // block_size
    end_block = -(-end // block_size)
    for logical_block in range(first_block, end_block):
        first_slot = block_table[logical_block] * block_size
        first_offset = start - logical_block * block_size if logical_block == first_block else 0
        end_offset = min(block_size, end - logical_block * block_size)
        slots.extend(range(first_slot + first_offset, first_slot + end_offset))
    return slots


def compute_slot_mapping(
    positions: torch.Tensor, cu_seqlens_q: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> torch.Tensor:
    """slot_mapping (T,) int32 from the batch's tensors.

    positions: (T,) int64, cu_seqlens_q: (B+1,) int32, block_tables: (B, M) int32, any number of spare columns.
    Raises ValueError for cu_seqlens that decrease or do not end at T, for block_tables that are not (B, M), and for a position that is
    negative, has no block, or whose slot does not fit int32.

    >>> compute_slot_mapping(torch.tensor([4, 5, 0]), torch.tensor([0, 2, 3]), torch.tensor([[7, 9], [3, -1]]), 4).tolist()
    [36, 37, 12]
    """
    require_block_size(block_size)
    require_integers(positions, "positions", "(T,)")
    sums = require_cu_seqlens(cu_seqlens_q, len(positions), "cu_seqlens_q")
    require_block_tables(block_tables, len(sums) - 1)
    slots: list[int] = []
    for i, table in enumerate(block_tables.tolist()):
        for position in positions[sums[i] : sums[i + 1]].tolist():
            slot = slot_of_position(table, position, block_size, f"sequence {i}")
            require_int32_slots([slot], [position], f"sequence {i}")
            slots.append(slot)
    return torch.tensor(slots, dtype=torch.int32, device=positions.device)
