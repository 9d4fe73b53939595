"""Once a read set is known to be wrong: exactly which slots a row reads, by giving every slot a dimension of its own in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import attend, loud_numbers
from conformance.checks.likely import ReadSet, likely_cause
from conformance.checks.places import names
from conformance.findings import Broken, Refused
from conformance.judge import Judge

MOST_PASSES = 3000
MOST_PAIRS = 256  # positions whose key is followed to its value
MOST_FOLLOWED = 32  # positions that are not read: do their keys go with other values?
MOST_NAMED = 3
PICKED_SCORE = 44.0  # what a picked key's score is over the others': exp(-44) weighs nothing
Told = tuple[list[tuple[str, str]], str]  # facts, likely cause
NOT_A_NUMBER: Told = (
    [("reads", "cannot be told: the row is NaN although every key and value is finite")],
    "the row is not written, or divides 0 by 0",
)


class NotANumber(Exception):
    """The row holds NaN although every number that it may read is finite."""


def localise(judge: Judge, case: AttentionCase, row: int, head: int) -> Told:
    """From the weights that each slot has in this row's output; ([], "") if the weights are as they should be, or cannot be told."""
    try:
        heads = head_weights(judge, case, row, head)
        weights = slot_weights(judge, case, row, head)
    except NotANumber:
        return NOT_A_NUMBER
    except (Broken, Refused):
        return [], ""
    if weights is None:
        return [], ""
    if not weights:
        return [("reads", "no slot at all: every weight is 0")], "the row is not computed, or its length is taken as 0"
    found, likely = wrong_head(case, head, heads)
    if found:
        return found, likely
    sequence, visible = case.rows[row]
    expected = case.slots[sequence][:visible]
    position = {slot: p for p, slot in enumerate(case.slots[sequence])}
    usual = sorted(weights.values())[len(weights) // 2]
    multiples = {slot: round(weight / usual) for slot, weight in weights.items()}
    read = {slot for slot, times in multiples.items() if times > 0}
    missing = sorted(set(expected) - read, key=position.__getitem__)
    doubled = sorted((slot for slot in set(expected) if multiples.get(slot, 0) > 1), key=position.__getitem__)
    foreign = sorted(read - set(expected))
    if not (missing or doubled or foreign):
        return wrong_denominator(usual, visible)
    if missing and len(missing) <= MOST_FOLLOWED:  # not read at all, or its key is, and its value is not
        apart = localise_pairs(judge, case, row, head, missing)
        if any(label == "K and V apart" for label, _ in apart[0]):
            return apart
    facts = [("not read", names(case, missing)), ("read once too often", names(case, doubled)), ("foreign", names(case, foreign))]
    return facts, likely_cause(ReadSet(case, row, missing, doubled, foreign))


# --- which slots, which kv heads -------------------------------------------------------------------------


def slot_weights(judge: Judge, case: AttentionCase, row: int, head: int) -> dict[int, float] | None:
    """The weight of every slot that this row and head read, with q = 0. None if there are too many.

    A dimension holds the sum of a range of slots; ranges that have weight are cut again, until each is one slot.
    """
    ranges = [(0, case.num_slots)]
    weights: dict[int, float] = {}
    passes = 0
    while ranges:
        parts = [part for whole in ranges for part in cut(*whole, case.head_dim)]
        ranges = []
        for first in range(0, len(parts), case.head_dim):
            probed = parts[first : first + case.head_dim]
            numbers = loud_numbers(case, loud=0.0)
            for dim, (start, stop) in enumerate(probed):
                numbers.values[start:stop, :, dim] = 1.0
            got = finite(attend(judge, case, numbers).out[row, head, : len(probed)])
            for (start, stop), weight in zip(probed, got.tolist(), strict=True):
                if weight != 0.0 and stop - start == 1:
                    weights[start] = weight
                elif weight != 0.0:
                    ranges.append((start, stop))
            passes += 1
            if passes > MOST_PASSES:
                return None
    return weights


def cut(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    step = -(-(stop - start) // parts)
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]


def finite(values: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        raise NotANumber
    return values


def head_weights(judge: Judge, case: AttentionCase, row: int, head: int) -> list[float]:
    """How much of this row and head comes from the values of each kv head, with q = 0."""
    numbers = loud_numbers(case, loud=0.0)
    for kv_head in range(case.num_kv_heads):
        numbers.values[:, kv_head, kv_head] = 1.0
    return finite(attend(judge, case, numbers).out[row, head, : case.num_kv_heads]).tolist()


def wrong_head(case: AttentionCase, head: int, heads: list[float]) -> Told:
    """A kv head that is not h // G."""
    must = head // case.group_size
    read = [kv_head for kv_head, weight in enumerate(heads) if weight > 0.01]
    if not read or read == [must]:
        return [], ""
    named = " and ".join(str(kv_head) for kv_head in read)
    facts = [("wrong kv head", f"query head {head} reads kv head {named}, it must read kv head {must} (= {head} // {case.group_size})")]
    if read == [head % case.num_kv_heads]:
        return facts, "the kv head is computed as h mod Hk, not as h // G"
    padded = 1 << (case.group_size - 1).bit_length()
    if padded != case.group_size and read == [min(head // padded, case.num_kv_heads - 1)]:
        return facts, f"the group of {case.group_size} is padded to {padded} lanes, and the padded number divides the head"
    for lanes in (8, 16):
        if case.group_size > lanes and read == [min(head // lanes, case.num_kv_heads - 1)]:
            return facts, f"a group of more than {lanes} query heads is split in tiles of {lanes}, and the tile's number taken for the kv head"
    if read == [(must + 1) % case.num_kv_heads]:
        return facts, "the values of the next kv head are read"
    return facts, "query heads are mapped to kv heads in another way than h // G"


def wrong_denominator(usual: float, visible: int) -> Told:
    """The right slots, each as often as any other: the weights may still be all too small, or too large."""
    lanes = round(1.0 / usual) - visible
    if lanes == 0 or abs(usual * visible - 1.0) < 0.01:
        return [], ""
    facts = [("weights", f"each of the {visible} visible positions weighs {usual:.4g} in place of 1 / {visible} = {1.0 / visible:.4g}")]
    if lanes > 0:
        return facts, f"padding lanes are not masked: they score 0 in place of -inf, and the denominator counts {lanes} too many"
    return facts, "the denominator is too small: a tile's or a split's sum is missing from it"


# --- which key goes with which value ---------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A key, and the value that its weight falls on."""

    slot: int
    value_slot: int
    value_head: int


def localise_pairs(judge: Judge, case: AttentionCase, row: int, head: int, slots: list[int] | None = None) -> Told:
    """The key of one slot (of each visible position, or of `slots`) takes all weight; values hold the digits of their slot and kv head."""
    sequence, visible = case.rows[row]
    try:
        key_head, pairs, mixed = follow_keys(judge, case, row, head, slots or case.slots[sequence][:visible][-MOST_PAIRS:])
    except NotANumber:
        return NOT_A_NUMBER
    except (Broken, Refused):
        return [], ""
    must = head // case.group_size
    facts = []
    if key_head != must and key_head >= 0:
        facts.append(("wrong kv head", f"query head {head} meets the keys of kv head {key_head}, it must meet those of kv head {must}"))
        return facts, "K and V apart: K of another kv head is joined with V"
    elsewhere = [pair for pair in pairs if (pair.value_slot, pair.value_head) != (pair.slot, must)]
    for pair in elsewhere[:MOST_NAMED]:
        in_head = f", kv head {pair.value_head}" if pair.value_head != must else ""
        label = "K and V apart" if not facts else ""
        facts.append((label, f"K of {names(case, [pair.slot])}\nis joined with V of {names(case, [pair.value_slot])}{in_head}"))
    if len(elsewhere) > MOST_NAMED:
        facts.append(("", f"… {len(elsewhere)} positions in all"))
    if mixed:
        which = f"where K of {names(case, mixed[:1])} takes all weight"
        facts.append(("mixed", f"{which}, several values are returned ({len(mixed)} positions)"))
    if not elsewhere:
        return facts, "a key counts at more than one position, or at none" if mixed else ""
    return facts, likely_of_pairs(case, elsewhere, must)


def follow_keys(judge: Judge, case: AttentionCase, row: int, head: int, slots: list[int]) -> tuple[int, list[Pair], list[int]]:
    """(the kv head whose keys this head meets or -1, the pairs, slots whose key did not pick one value)."""
    digits = (case.num_slots * case.num_kv_heads - 1).bit_length()
    if digits > case.head_dim or not slots:
        return head // case.group_size, [], []
    numbers = loud_numbers(case, loud=0.0)
    code = torch.arange(case.num_slots * case.num_kv_heads).view(case.num_slots, case.num_kv_heads)
    for digit in range(digits):
        numbers.values[:, :, digit] = ((code >> digit) & 1).float()
    numbers.q[:, :, 0] = min(2.0 ** math.ceil(math.log2(PICKED_SCORE / case.scale)), 2.0**15)

    def value_of(slot: int, kv_heads: list[int]) -> int | None:
        numbers.keys[:] = 0.0
        numbers.keys[slot, kv_heads, 0] = 1.0
        got = finite(attend(judge, case, numbers).out[row, head, :digits])
        near = got.round()
        if float((got - near).abs().max()) > 0.02:
            return None
        told = sum(int(bit) << digit for digit, bit in enumerate(near.tolist()))
        return told if 0 <= told < code.numel() else None

    without_keys = value_of(slots[0], [])  # one value alone is read: that a key goes with it cannot be told
    if without_keys is not None:
        return head // case.group_size, [], []
    key_head, everyone = head // case.group_size, list(range(case.num_kv_heads))
    if value_of(slots[-1], [key_head]) is None and value_of(slots[-1], everyone) is not None:
        key_head = next((other for other in everyone if value_of(slots[-1], [other]) is not None), -1)
    pairs, mixed = [], []
    for slot in slots:
        told = value_of(slot, everyone)
        if told is None:
            mixed.append(slot)
        else:
            pairs.append(Pair(slot, *divmod(told, case.num_kv_heads)))
    return key_head, pairs, mixed


def likely_of_pairs(case: AttentionCase, pairs: list[Pair], must: int) -> str:
    heads = {pair.value_head for pair in pairs}
    if all(pair.slot == pair.value_slot for pair in pairs):
        return f"V of kv head {', '.join(map(str, sorted(heads)))} is joined with K of kv head {must}"
    if case.paged and case.block_size > 1 and all(pair.value_slot % case.block_size == pair.slot % case.block_size for pair in pairs):
        return "V is taken from another block than K: the two walk the block table apart"
    apart = {pair.value_slot - pair.slot for pair in pairs}
    if len(apart) == 1:
        steps = apart.pop()
        return f"V is read {abs(steps)} slot{'s' if abs(steps) > 1 else ''} {'before' if steps < 0 else 'after'} K"
    return "K of one slot is joined with V of another"
