"""Once a read set is known to be wrong: exactly which slots a row reads, by giving every slot a dimension of its own in turn."""

from __future__ import annotations

import torch

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import attend, loud_numbers, place_of_slot
from conformance.findings import Broken, Refused
from conformance.judge import Judge

MOST_PASSES = 3000
MOST_NAMED = 4


def localise(judge: Judge, case: AttentionCase, row: int, head: int) -> tuple[list[tuple[str, str]], str]:
    """(facts, likely cause) from the weights that each slot has in this row's output; empty if the weights are as they should be."""
    weights = slot_weights(judge, case, row, head)
    if weights is None:
        return [], ""
    sequence, visible = case.rows[row]
    expected = case.slots[sequence][:visible]
    is_expected = torch.zeros(case.num_slots, dtype=torch.bool)
    is_expected[expected] = True
    usual = float(weights[weights > 0].median()) if (weights > 0).any() else 0.0
    if usual == 0.0:
        return [("reads", "no slot at all: every weight is 0")], likely_of_nothing(case)
    multiples = (weights / usual).round()
    not_read = (is_expected & (multiples == 0)).nonzero().flatten().tolist()
    doubled = (is_expected & (multiples > 1)).nonzero().flatten().tolist()
    foreign = (~is_expected & (multiples > 0)).nonzero().flatten().tolist()
    if not (not_read or doubled or foreign):
        return [], ""
    by_position = {slot: position for position, slot in enumerate(case.slots[sequence])}
    not_read.sort(key=lambda slot: by_position[slot])
    facts = [
        ("not read", names(case, not_read)),
        ("read once too often", names(case, doubled)),
        ("foreign", names(case, foreign)),
    ]
    return facts, likely_cause(case, sequence, visible, [by_position[s] for s in not_read], foreign, doubled)


def names(case: AttentionCase, slots: list[int]) -> str:
    if not slots:
        return "nothing"
    shown = [place_of_slot(case, slot) for slot in slots[:MOST_NAMED]]
    if len(slots) > MOST_NAMED:
        shown.append(f"… {len(slots)} slots in all")
    return "\n".join(shown)


def slot_weights(judge: Judge, case: AttentionCase, row: int, head: int) -> torch.Tensor | None:
    """(slots,) the weight of every slot in this row and head, with q = 0. None if that cannot be told."""
    per_pass = case.head_dim
    if -(-case.num_slots // per_pass) > MOST_PASSES:
        return None
    weights = torch.zeros(case.num_slots, dtype=torch.float64)
    for first in range(0, case.num_slots, per_pass):
        last = min(first + per_pass, case.num_slots)
        numbers = loud_numbers(case, loud=0.0)
        numbers.values[torch.arange(first, last), :, torch.arange(last - first)] = 1.0
        try:
            out = attend(judge, case, numbers).out
        except (Broken, Refused):
            return None
        weights[first:last] = out[row, head, : last - first]
    return weights.nan_to_num(0.0) if torch.isfinite(weights).any() else None


def likely_of_nothing(case: AttentionCase) -> str:
    return "the row is not computed, or its length is taken as 0"


def likely_cause(case: AttentionCase, sequence: int, visible: int, missing: list[int], foreign: list[int], doubled: list[int]) -> str:
    """A cause where the pattern fits one that is known."""
    size, context = case.block_size, case.context_lens[sequence]
    tail = case.slots[sequence][visible:context]
    others = {slot for i, slots in enumerate(case.slots) if i != sequence for slot in slots}
    if case.paged:
        identity = list(range(visible))
        if foreign and missing and set(foreign) <= set(identity) and set(case.slots[sequence][p] for p in missing).isdisjoint(identity):
            return "the block table is ignored: logical blocks are read as physical ones"
        past_end = [slot for table in [case.tables[sequence]] if table for slot in range(table[-1] * size + (context - 1) % size + 1, (table[-1] + 1) * size)]
        if foreign and not missing and set(foreign) <= set(past_end) and visible == context:
            return "the tail of the last block is read: the length is rounded up, or one too long"
    if not foreign and missing == [visible - 1]:
        opens = case.paged and (visible - 1) % size == 0
        return f"the newest token is dropped{' when it opens a block' if opens else ''}"
    if not foreign and missing and missing == list(range(missing[0], visible)):
        return "the end of the context is dropped: the last block or tile, or a causal mask that is off"
    if not foreign and missing and missing == list(range(missing[-1] + 1)):
        return "the beginning of the context is dropped: its first tile or block"
    if foreign and not missing and not doubled and set(foreign) <= set(tail):
        return "the causal mask lets a row see later positions"
    if foreign and set(foreign) <= others:
        owners = {i for i, slots in enumerate(case.slots) if set(foreign) & set(slots)}
        if owners == {sequence + 1}:
            return "the next sequence's table or length is used"
        return "blocks of another sequence are read"
    if foreign and not missing:
        return "slots outside the context are read: a mask or a length is off"
    if doubled and not foreign:
        return "positions are read twice: a tile or a split overlaps another"
    return ""
