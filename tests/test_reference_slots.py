"""slot_mapping of the reference: hand-worked numbers, and three formulations held against each other (clauses SLOT-1, SLOT-2)."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reference.slots as slots_module
from reference import compute_slot_mapping
from reference.slots import slot_of_position, slots_block_by_block


def slots_by_picture(block_table, start, end, block_size):
    """A third formulation: number the cache's slots block by block, lay the table's blocks end to end, cut the positions out."""
    slot_numbers = np.arange((max(block_table, default=0) + 1) * block_size).reshape(-1, block_size)
    return slot_numbers[np.array(block_table, dtype=np.int64)].reshape(-1)[start:end].tolist()


@st.composite
def tables_and_ranges(draw):
    """(block_table, start, end, block_size) with 0 <= start <= end <= tokens that the table holds, often next to a block's end."""
    block_size = draw(st.integers(1, 256), label="block_size")
    block_table = draw(st.lists(st.integers(0, 300), unique=True, max_size=6), label="block_table")
    capacity = len(block_table) * block_size
    near_an_edge = st.builds(lambda blocks, off: blocks * block_size + off, st.integers(0, len(block_table)), st.integers(-1, 1))
    position = st.one_of(near_an_edge, st.integers(0, capacity)).map(lambda p: min(max(p, 0), capacity))
    start, end = sorted(draw(st.tuples(position, position), label="range"))
    return block_table, start, end, block_size


def test_hand_worked_slots():
    assert slots_block_by_block([7, 9], 0, 6, 4) == [28, 29, 30, 31, 36, 37]
    assert [slot_of_position([7, 9], p, 4) for p in range(6)] == [28, 29, 30, 31, 36, 37]


def test_hand_worked_second_chunk():
    assert slots_block_by_block([7, 9], 4, 6, 4) == [36, 37]
    assert slots_block_by_block([7, 9], 3, 5, 4) == [31, 36]
    assert slots_block_by_block([7, 9], 5, 6, 4) == [37]


@pytest.mark.parametrize(
    ("block_table", "start", "end", "block_size", "slots"),
    [
        ([9, 0, 4], 0, 3, 1, [9, 0, 4]),
        ([2], 0, 3, 3, [6, 7, 8]),
        ([5, 0], 255, 257, 256, [5 * 256 + 255, 0]),
        ([3, 1, 2], 3, 3, 4, []),
        ([], 0, 0, 4, []),
        ([7, 9, 1000], 0, 2, 4, [28, 29]),
    ],
    ids=["block size 1", "exactly one block", "over the edge at 256", "empty range", "empty table", "spare blocks"],
)
def test_hand_worked_corners(block_table, start, end, block_size, slots):
    assert slots_block_by_block(block_table, start, end, block_size) == slots
    assert [slot_of_position(block_table, p, block_size) for p in range(start, end)] == slots


@pytest.mark.parametrize("block_sizes", [range(1, 65), range(65, 129), range(129, 193), range(193, 257)], ids=lambda r: f"{r[0]}-{r[-1]}")
def test_every_block_size_from_1_to_256(block_sizes):
    block_table = [11, 3, 8]
    for block_size in block_sizes:
        for start, end in [(0, 3 * block_size), (block_size - 1, 2 * block_size + 1), (block_size, 2 * block_size), (1, block_size)]:
            by_picture = slots_by_picture(block_table, start, end, block_size)
            assert slots_block_by_block(block_table, start, end, block_size) == by_picture, (block_size, start, end)
            for position in (start, end - 1)[: end - start]:
                assert slot_of_position(block_table, position, block_size) == by_picture[position - start], (block_size, position)


@settings(max_examples=150, deadline=None)
@given(tables_and_ranges())
@example(([7, 9], 4, 4, 4))
def test_block_by_block_is_the_formula_elementwise(case):
    block_table, start, end, block_size = case
    by_formula = [slot_of_position(block_table, p, block_size) for p in range(start, end)]
    assert slots_block_by_block(block_table, start, end, block_size) == by_formula
    assert by_formula == slots_by_picture(block_table, start, end, block_size)


@settings(max_examples=100, deadline=None)
@given(tables_and_ranges())
def test_distinct_blocks_give_distinct_slots_inside_their_blocks(case):
    block_table, start, end, block_size = case
    slots = slots_block_by_block(block_table, start, end, block_size)
    assert len(slots) == len(set(slots)) == end - start
    assert {slot // block_size for slot in slots} <= set(block_table)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_compute_slot_mapping_agrees_with_both(data):
    """Several sequences of one block size, as padded tensors of either integer type, with spare columns."""
    cases = [data.draw(tables_and_ranges(), label=f"sequence {i}") for i in range(data.draw(st.integers(1, 4), label="B"))]
    block_size = cases[0][3]
    ranges = [(table, min(start, len(table) * block_size), min(end, len(table) * block_size)) for table, start, end, _ in cases]
    spare = data.draw(st.integers(0, 3), label="spare columns")
    filler = data.draw(st.sampled_from([-1, 0, 12345]), label="value of spare cells")
    width = max(len(table) for table, _, _ in ranges) + spare
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype")
    rows = [table + [filler] * (width - len(table)) for table, _, _ in ranges]
    block_tables = torch.tensor(rows, dtype=dtype).reshape(len(ranges), width)
    cu_seqlens_q = torch.tensor(np.cumsum([0] + [end - start for _, start, end in ranges]), dtype=dtype)
    positions = torch.tensor([p for _, start, end in ranges for p in range(start, end)], dtype=torch.int64)

    slot_mapping = compute_slot_mapping(positions, cu_seqlens_q, block_tables, block_size)

    assert slot_mapping.dtype == torch.int32 and slot_mapping.shape == positions.shape
    assert slot_mapping.tolist() == [slot for table, start, end in ranges for slot in slots_block_by_block(table, start, end, block_size)]
    assert slot_mapping.tolist() == [slot for table, start, end in ranges for slot in slots_by_picture(table, start, end, block_size)]


def test_compute_slot_mapping_takes_positions_in_any_order():
    positions = torch.tensor([5, 0, 4, 3])
    assert compute_slot_mapping(positions, torch.tensor([0, 4]), torch.tensor([[7, 9, -1]]), 4).tolist() == [37, 28, 36, 31]


def test_compute_slot_mapping_of_repeated_cu_seqlens():
    """The middle sequence has no token: its row, however bad, is not looked at."""
    slots = compute_slot_mapping(torch.tensor([0, 1]), torch.tensor([0, 1, 1, 2]), torch.tensor([[7], [-1], [9]]), 4)
    assert slots.tolist() == [28, 37]


def test_the_formulations_are_independent(monkeypatch):
    """Negative control: a fault in one formulation does not reach the other two."""
    monkeypatch.setattr(slots_module, "slot_of_position", lambda table, p, s, who: table[p // s] * s + (p + 1) % s)
    positions, cu_seqlens_q = torch.arange(6), torch.tensor([0, 6])
    assert compute_slot_mapping(positions, cu_seqlens_q, torch.tensor([[7, 9]]), 4).tolist() == [29, 30, 31, 28, 37, 38]
    assert slots_block_by_block([7, 9], 0, 6, 4) == slots_by_picture([7, 9], 0, 6, 4) == [28, 29, 30, 31, 36, 37]
