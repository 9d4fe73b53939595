"""A likely cause for a wrong read set, where its pattern is one that is known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from conformance.cases.attention import AttentionCase

BLOCK_IDS = 2**16  # that 16 bits hold
TILES = (256, 128, 64, 32, 16)


@dataclass(frozen=True)
class ReadSet:
    """What one row reads, held against what it must: its visible positions, each once."""

    case: AttentionCase
    row: int
    missing: list[int]  # slots, in the order of their positions
    doubled: list[int]
    foreign: list[int]

    @property
    def sequence(self) -> int:
        return self.case.rows[self.row][0]

    @property
    def visible(self) -> int:
        return self.case.rows[self.row][1]

    @property
    def context(self) -> int:
        return self.case.context_lens[self.sequence]

    @property
    def query(self) -> int:
        """Which of its sequence's queries the row is."""
        return self.row - sum(self.case.query_lens[: self.sequence])

    @cached_property
    def own(self) -> list[int]:
        return self.case.slots[self.sequence]

    @cached_property
    def read(self) -> set[int]:
        return (set(self.own[: self.visible]) - set(self.missing)) | set(self.foreign)

    @cached_property
    def missing_positions(self) -> list[int]:
        return [self.own.index(slot) for slot in self.missing]

    @cached_property
    def length_read(self) -> int | None:
        """If exactly the first so many positions of the sequence are read, how many."""
        count = len(self.read)
        return count if self.read == set(self.own[:count]) and not self.doubled else None

    @cached_property
    def tail(self) -> list[int]:
        """The slots of the sequence's last block after its last position."""
        if not self.case.paged or not self.context:
            return []
        size = self.case.block_size
        last = self.own[-1]
        return list(range(last + 1, (last // size + 1) * size))


def likely_cause(found: ReadSet) -> str:
    cause = of_order(found)
    if cause:
        other = of_other_sequences(found)
        return f"{cause}, or {other}" if other else cause
    for guess in (of_length, of_holes, of_tail, of_other_sequences, of_blocks, of_repeats):
        cause = guess(found)
        if cause:
            return cause
    return ""


def of_order(found: ReadSet) -> str:
    """The cache is read in order, without the table."""
    if not found.case.paged or not found.foreign:
        return ""
    before = sum(found.case.context_lens[: found.sequence])
    for first in {0, before}:
        if found.read == set(range(first, first + found.visible)):
            return "the block table is ignored: logical blocks are read as physical ones"
    return ""


def of_length(found: ReadSet) -> str:
    """The first positions of the sequence, too many or too few."""
    length, visible, case = found.length_read, found.visible, found.case
    if length is None or length == visible:
        return ""
    causes = []
    if not case.decode:
        queries = case.query_lens[found.sequence]
        if length == found.query + 1 and queries != found.context:
            causes.append("the causal mask is aligned top-left, it must be bottom-right")
        if length == visible + 1:
            causes.append("the causal mask is one off: a row sees the position after its own")
        if length == found.context and length > visible:
            causes.append("there is no causal mask: a row sees the whole context")
        if length == visible - 1:
            causes.append("the causal mask is one off: a row does not see its own position")
            opened = opens_in_words(case, length)
            if opened:
                causes.append(f"a last {opened} is skipped")
    elif length == visible - 1:
        opens = case.paged and (visible - 1) % case.block_size == 0 and visible > 1 and case.block_size > 1
        causes.append(f"the newest token is dropped{' when it opens a block' if opens else ''}")
        tile = next((tile for tile in TILES if length % tile == 0), None) if length else None
        if visible == 2:
            causes.append("its K is joined with the V of position 0")
        if tile:
            causes.append(f"the last tile or split is skipped (position {length} alone is in it, if a tile has {tile} positions)")
    for step, other in ((1, "next"), (-1, "previous")):
        i = (found.sequence + step) % len(case.context_lens)
        if i != found.sequence and length == case.context_lens[i] and case.decode:
            causes.append(f"the {other} sequence's length is used ({length})")
            break
    if not causes and length < visible:
        causes.append(ending(found, length))
    if not causes:
        causes.append(f"the length is taken as {length} in place of {visible}")
    return ", or ".join(causes)


def opens_in_words(case: AttentionCase, position: int) -> str:
    """Whether a position is the first of a block or of a tile, and not of the context."""
    opened = [
        *(["block"] if case.paged and case.block_size > 1 and position % case.block_size == 0 else []),
        *(["tile"] if any(position % tile == 0 for tile in TILES) else []),
    ]
    return " or ".join(opened) if position else ""


def ending(found: ReadSet, length: int) -> str:
    """The last positions are not read: what they are."""
    size, count = found.case.block_size, found.visible - length
    if found.case.paged and length % size == 0 and count <= size:
        return f"the last block is not read (its {count} positions)"
    for tile in TILES:
        if length % tile == 0:
            return f"the last {count} positions are not read: a tile or split of {tile} is skipped at the end"
    return f"the last {count} positions are not read"


def of_holes(found: ReadSet) -> str:
    """Nothing foreign, and one run of positions that is not read."""
    positions = found.missing_positions
    if found.foreign or found.doubled or not positions or positions != list(range(positions[0], positions[-1] + 1)):
        return ""
    count = len(positions)
    what = "tile, block or split" if count > 1 else "position"
    if positions[0] == 0:
        return f"the first {count} positions are not read: the first {what} is skipped" if count > 1 else "the first position is skipped"
    return f"positions {positions[0]} to {positions[-1]} are not read: a {what} inside the context is skipped" if count > 1 else ""


def of_tail(found: ReadSet) -> str:
    """Slots right after the last position."""
    if not found.foreign or found.missing or found.doubled or found.visible != found.context:
        return ""
    if found.foreign == found.tail[: len(found.foreign)]:
        if len(found.foreign) == 1:
            return "the length is one too long: the slot after the newest token is read"
        return "the tail of the last block is read: the length is rounded up, or the boundary tile is not masked"
    if found.tail and set(found.tail) <= set(found.foreign):
        return "the last block's tail and what lies beyond is read: the boundary tile is not masked, or the table is followed past the context"
    if not found.tail and len(found.foreign) == 1:
        return "the length is one too long, and a table cell past the sequence's blocks is followed"
    return ""


def of_other_sequences(found: ReadSet) -> str:
    case = found.case
    theirs = {i for i, slots in enumerate(case.slots) if i != found.sequence and set(found.foreign) & set(slots)}
    blocks = {i for i, table in enumerate(case.tables) if i != found.sequence and any(s // case.block_size in table for s in found.foreign)}
    everyones = {slot for slots in case.slots for slot in slots}
    if not found.foreign or not (theirs or blocks) or not (set(found.foreign) <= everyones or (len(blocks) == 1 and case.paged)):
        return ""
    if not found.missing:
        return "slots of another sequence are read besides its own: the length is too long, or a table cell past its blocks is followed"
    whose = theirs or blocks
    count = len(case.context_lens)
    for step, other in ((1, "next"), (-1, "previous")):
        if whose == {(found.sequence + step) % count}:
            what = f"the {other} sequence's table row is used" if case.paged else f"the {other} sequence's rows are read: its start is off"
            return what + stride_hint(found)
    return "another sequence's table row is used" + stride_hint(found)


def stride_hint(found: ReadSet) -> str:
    narrowed = found.case.paged and found.case.spare_columns > 0 and found.sequence > 0
    return ", or the row stride of block_tables is taken from its shape (it is a narrowed view)" if narrowed else ""


def of_blocks(found: ReadSet) -> str:
    """Some blocks are read in place of others."""
    case, size = found.case, found.case.block_size
    if not case.paged or not found.foreign or not found.missing:
        return ""
    wanted = {slot // size for slot in found.missing}
    taken = sorted({slot // size for slot in found.foreign})
    if {slot % size for slot in found.missing} == {slot % size for slot in found.foreign}:
        if all(block % BLOCK_IDS in {want % BLOCK_IDS for want in wanted} for block in taken) and max(wanted) >= BLOCK_IDS:
            return "block ids are kept in 16 bits"
        if taken == [0]:
            return "block 0 is read in place of the table's block" + stride_hint(found)
        shown = ", ".join(map(str, taken[:4]))
        return f"physical block {shown} is read in place of {', '.join(map(str, sorted(wanted)[:4]))}" + stride_hint(found)
    shifts = {other - slot for slot, other in zip(sorted(found.missing), found.foreign, strict=False)}
    if len(shifts) == 1 and len(found.missing) == len(found.foreign):
        return f"slots are read {abs(shifts.pop())} away from where they lie"
    return ""


def of_repeats(found: ReadSet) -> str:
    if found.foreign:
        return "slots outside the context are read: a mask, a length or a table cell is off" if not found.missing else ""
    if found.doubled and not found.missing:
        return "positions are read twice: tiles or splits overlap, or a split is counted twice"
    if found.doubled:
        return "some positions are read in place of others: a tile's or a block's address does not move on"
    return ""


def likely_of_scores(row: torch.Tensor) -> str:
    """The right slots with equal scores, and a wrong row (D,) with extreme ones."""
    if not bool(torch.isfinite(row).all()):
        return "exp overflows, or 0 is divided by 0: the largest score is not subtracted"
    if bool((row == 0).all()):
        return "every weight underflows: the running maximum does not start at -inf, or a hidden score is finite (-10,000 say) and the largest"
    return "the weights of extreme scores are off: another scale, the running maximum or its rescaling, or a finite score in place of -inf"
