"""A likely cause for wrong slots and wrong tensors of a batch: the first known formula that gives exactly what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from reference import SequenceState

Rows = list[tuple[int, int]]  # (sequence, position) of each row
MOST_FORMULAS = 4  # that are told where a small case fits several
SIZES = (1, 16, 32, 64, 128, 256)
Formula = Callable[[int, int], int]  # sequence, position -> slot


def likely_of_slots(states: list[SequenceState], block_size: int, rows: Rows, got: list[int]) -> str:
    """What formula gives these slots, at every row or at least at every wrong one."""
    want = [at(states[i].block_table, p // block_size) * block_size + p % block_size for i, p in rows]
    wrong = [t for t, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    formulas = list(slot_formulas(states, block_size, rows))
    for asked in (range(len(rows)), wrong):
        fitting = [told for told, formula in formulas if all(got[t] == formula(*rows[t]) for t in asked)]
        if len(wrong) > 0 and {got[t] for t in wrong} <= {0, -1}:
            fitting.append(f"rows from {wrong[0]} on are not computed: they hold {got[wrong[0]]}")
        if fitting:
            return ", or ".join(fitting[:MOST_FORMULAS])
    return ""


def at(table: object, column: int) -> int:
    """The block in a column, clipped to the table: a formula that leaves it reads its last cell, or the padding beside it."""
    blocks = list(table)  # type: ignore[call-overload]  # a sequence of ints
    return int(blocks[min(column, len(blocks) - 1)]) if blocks else -1


def slot_formulas(states: list[SequenceState], size: int, rows: Rows) -> Iterator[tuple[str, Formula]]:
    first_of = dict(reversed(rows))  # the first position of each sequence's rows

    def slot_in(sequence: int, block: int, offset: int) -> int:
        return at(states[sequence].block_table, block) * size + offset

    def with_size(other: int) -> Formula:
        return lambda i, p: at(states[i].block_table, p // other) * other + p % other

    def of_neighbour(step: int) -> Formula:
        return lambda i, p: slot_in((i + step) % len(states), p // size, p % size)

    yield "num_cached_tokens is ignored: slots are those of the sequence's first positions", lambda i, p: slot_in(
        i, (p - states[i].num_cached_tokens) // size, (p - states[i].num_cached_tokens) % size
    )
    yield "slot = previous slot + 1: slots run on past the end of a block", lambda i, p: slot_in(
        i, max(0, first_of[i] - 1) // size, max(0, first_of[i] - 1) % size
    ) + p - max(0, first_of[i] - 1)
    if [p for _, p in rows] == [len(state.token_ids) - 1 for state in states]:  # a decode step, or what looks like one
        yield "the offset is len % S, it must be (len - 1) % S", lambda i, p: slot_in(i, p // size, (p + 1) % size)
        yield "the block is that of position len, not of len - 1", lambda i, p: slot_in(i, (p + 1) // size, p % size)
    yield "the table's first block is used for every position", lambda i, p: slot_in(i, 0, p % size)
    yield "the table's last block is used for every position", lambda i, p: slot_in(i, len(states[i].block_table), p % size)
    yield "the table is ignored: slot = position", lambda i, p: p
    if len(states) > 1:
        yield "the table row of sequence i + 1 is used", of_neighbour(1)
        yield "the table row of sequence i - 1 is used", of_neighbour(-1)
    yield "slots are kept in 16 bits", lambda i, p: slot_in(i, p // size, p % size) % 65536
    for other in dict.fromkeys((2 * size, max(1, size // 2), *SIZES)):
        if other != size:
            yield f"slots are computed with a block size of {other}, the cache has {size}", with_size(other)
    yield "offset and block are exchanged: p % S picks the block", lambda i, p: slot_in(i, p % size, p // size)


def first_fitting(got: list[int], guesses: dict[str, list[int]]) -> str:
    """The first guess that is exactly what came out."""
    return next((told for told, values in guesses.items() if values == got), "")


def likely_of_table(states: list[SequenceState], row: int, cells: list[int]) -> str:
    """What row `row` of block_tables holds in place of its own table."""
    own = list(states[row].block_table)
    if cells[: len(own)] == own:
        return "padding is 0, which is a block" if set(cells[len(own) :]) <= {0, -1} else "the row holds more than its sequence's own table"
    if all(cell == -1 for cell in cells):
        return "the row is left blank" + (": its sequence has no cached tokens" if states[row].num_cached_tokens == 0 else "")
    if cells[: len(own)] == sorted(own):
        return "block ids are sorted"
    for other, state in enumerate(states):
        table = list(state.block_table)
        if other != row and table and cells[: len(table)] == table:
            return f"the row holds the table of sequence {other}"
    return ""
