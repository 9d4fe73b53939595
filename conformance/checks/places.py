"""Slots in words: whose they are and where they lie, runs of them in one line."""

from __future__ import annotations

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import place_of_slot

MOST_LINES = 4


def names(case: AttentionCase, slots: list[int]) -> str:
    """One line a run: positions that follow each other in a sequence, or slots of nobody that do."""
    if not slots:
        return "nothing"
    runs = runs_of(case, slots)
    lines = [place_of_slot(case, run[0]) if len(run) == 1 else place_of_run(case, run) for run in runs[:MOST_LINES]]
    if len(runs) > MOST_LINES:
        lines.append(f"… {len(slots)} slots in all")
    return "\n".join(lines)


def owners(case: AttentionCase) -> dict[int, tuple[int, int]]:
    """slot -> (sequence, position)."""
    return {slot: (i, p) for i, slots in enumerate(case.slots) for p, slot in enumerate(slots)}


def runs_of(case: AttentionCase, slots: list[int]) -> list[list[int]]:
    owned = owners(case)
    known = sorted((slot for slot in slots if slot in owned), key=owned.__getitem__)
    unknown = sorted(slot for slot in slots if slot not in owned)
    runs: list[list[int]] = []
    for slot in [*known, *unknown]:
        if runs and follows(case, owned, runs[-1][-1], slot):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def follows(case: AttentionCase, owned: dict[int, tuple[int, int]], one: int, other: int) -> bool:
    if one in owned and other in owned:
        (sequence, position), (same, following) = owned[one], owned[other]
        return sequence == same and following == position + 1
    same_block = not case.paged or one // case.block_size == other // case.block_size
    return one not in owned and other not in owned and other == one + 1 and same_block


def place_of_run(case: AttentionCase, run: list[int]) -> str:
    owned = owners(case)
    first, last = run[0], run[-1]
    size = case.block_size
    if first in owned:
        (sequence, start), (_, end) = owned[first], owned[last]
        told = f"positions {start} to {end} of sequence {sequence}"
        if not case.paged:
            return f"{told} = rows {first} to {last} of k and v"
        if start // size == end // size:
            where = f"logical block {start // size}, offsets {start % size} to {end % size} = slots {first} to {last}"
            return f"{told} = {where} (physical block {first // size})"
        blocks = case.tables[sequence][start // size : end // size + 1]
        shown = ", ".join(map(str, blocks[:6])) + (", …" if len(blocks) > 6 else "")
        parts = "" if start % size == 0 and (end + 1) % size == 0 else f", offset {start % size} of the first to {end % size} of the last"
        return f"{told} = logical blocks {start // size} to {end // size}{parts} (physical blocks {shown})"
    if not case.paged:
        return f"rows {first} to {last} of k and v"
    block = first // size
    whole = " (the whole of" if len(run) == size else " (in"
    holder = next(((i, table.index(block)) for i, table in enumerate(case.tables) if block in table), None)
    if holder is None:
        return f"nobody's: slots {first} to {last}{whole} physical block {block})"
    sequence, logical = holder
    past = f"past the {case.context_lens[sequence]} tokens of sequence {sequence} in its logical block {logical}"
    return f"never written: slots {first} to {last}{whole} physical block {block}), {past}"
