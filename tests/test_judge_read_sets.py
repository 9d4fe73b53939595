"""One fault at one row and one head, at 200 random places: caught every time, and named (conformance/checks/read_sets.py, localise.py)."""

import functools
import itertools
from dataclasses import replace

import pytest
from planted import DTYPES, Planted, judge_of, random_case

from conformance.checks.read_sets import check_pairing, check_read_set
from conformance.findings import Broken

CASES = [
    pytest.param(decode, dtype, id=f"{'decode' if decode else 'prefill'}-{str(dtype).removeprefix('torch.')}")
    for decode, dtype in itertools.product((True, False), DTYPES)
]
EACH = 34  # 6 * 34 = 204 places a fault
pytestmark = pytest.mark.parametrize(("decode", "dtype"), CASES)


def places(decode, dtype):
    """(seed, case, row, head, random source)"""
    for seed in range(EACH):
        yield seed, *random_case(seed, decode=decode, dtype=dtype)


def found(judge, check, case):
    """The finding's facts as a mapping, or None if the case passes."""
    try:
        judge.for_each([case], functools.partial(check, judge))
    except Broken as broken:
        return dict(broken.finding.facts)
    return None


def judge_for(case, target):
    return judge_of(target, "DEC-1" if case.decode else "PRE-1", case.function)


def visible_slots(case, row):
    sequence, visible = case.rows[row]
    return case.slots[sequence][:visible]


def slot_in_words(case, slot):
    """As a finding names it, up to what follows: `slot 3 ` is no part of `slot 30 (...)`."""
    return f"slot {slot} (" if case.paged else f"= row {slot} of k and v"


def names(case, text):
    """How many slots a fact names."""
    return 0 if text == "nothing" else len(text.splitlines())


def test_an_undisturbed_attention_passes(decode, dtype):
    for seed, case, *_ in places(decode, dtype):
        judge = judge_for(case, Planted(case))
        assert found(judge, check_read_set, case) is None, (seed, case)
        assert found(judge, check_pairing, case) is None, (seed, case)
        assert judge.record.side_findings == {}
        assert all(share <= 1 for share in judge.record.worst_budget.values())


def test_one_dropped_position_is_caught_and_named(decode, dtype):
    for seed, case, row, head, draw in places(decode, dtype):
        planted, slot = Planted(case), draw.choice(visible_slots(case, row))
        planted.reads[row, head, slot] = 0
        facts = found(judge_for(case, planted), check_read_set, case)
        assert facts is not None, (seed, row, head, slot, case)
        assert slot_in_words(case, slot) in facts["not read"] and names(case, facts["not read"]) == 1, (seed, slot, facts)
        assert facts["read once too often"] == facts["foreign"] == "nothing", (seed, facts)


def test_one_position_read_twice_is_caught_and_named(decode, dtype):
    for seed, case, row, head, draw in places(decode, dtype):
        if len(visible_slots(case, row)) == 2:
            continue  # weights of 1 and 2 may as well be 1/2 and 1: which is usual cannot be told
        planted, slot = Planted(case), draw.choice(visible_slots(case, row))
        planted.reads[row, head, slot] = 2
        facts = found(judge_for(case, planted), check_read_set, case)
        assert facts is not None, (seed, row, head, slot, case)
        assert slot_in_words(case, slot) in facts["read once too often"] and names(case, facts["read once too often"]) == 1, (seed, slot, facts)
        assert facts["not read"] == facts["foreign"] == "nothing", (seed, facts)


def test_one_foreign_slot_is_caught_and_named(decode, dtype):
    """A later position, another sequence's, one past the end of a block, or nobody's."""
    for seed, case, row, head, draw in places(decode, dtype):
        foreign = sorted(set(range(case.num_slots)) - set(visible_slots(case, row)))
        if not foreign:
            continue  # without a cache, the last row of the only sequence sees all there is
        planted, slot = Planted(case), draw.choice(foreign)
        planted.reads[row, head, slot] = 1
        facts = found(judge_for(case, planted), check_read_set, case)
        assert facts is not None, (seed, row, head, slot, case)
        assert slot_in_words(case, slot) in facts["foreign"] and names(case, facts["foreign"]) == 1, (seed, slot, facts)
        assert facts["not read"] == facts["read once too often"] == "nothing", (seed, facts)


def test_one_foreign_slot_beside_a_single_position_is_caught_and_named(decode, dtype):
    """The mean of two equal values is that value: here the values differ."""
    for seed in range(EACH):
        case, _, head, draw = random_case(seed, decode=decode, dtype=dtype, longest=3)
        lens = (1, *case.context_lens[1:])
        case = replace(case, context_lens=lens, query_lens=tuple(min(t, n) for t, n in zip(case.query_lens, lens, strict=True)))
        foreign = sorted(set(range(case.num_slots)) - set(visible_slots(case, 0)))
        if not foreign:
            continue
        planted, slot = Planted(case), draw.choice(foreign)
        planted.reads[0, head, slot] = 1
        facts = found(judge_for(case, planted), check_read_set, case)
        assert facts is not None, (seed, head, slot, case)
        assert slot_in_words(case, slot) in facts["foreign"] and names(case, facts["foreign"]) == 1, (seed, slot, facts)


def test_the_value_of_another_slot_is_caught(decode, dtype):
    """K of a visible position is joined with V of a slot that is read by no one else in this row."""
    for seed, case, row, head, draw in places(decode, dtype):
        foreign = sorted(set(range(case.num_slots)) - set(visible_slots(case, row)))
        if not foreign:
            continue
        planted, slot, other = Planted(case), draw.choice(visible_slots(case, row)), draw.choice(foreign)
        planted.exchanged = [(row, head, slot, other)]
        judge = judge_for(case, planted)
        facts = found(judge, check_read_set, case)
        assert facts is not None, (seed, row, head, slot, other, case)
        told = facts["K and V apart"]
        assert slot_in_words(case, slot) in told and slot_in_words(case, other) in told, (seed, slot, other, facts)


def test_two_values_exchanged_are_caught(decode, dtype):
    """K of each of two visible positions is joined with V of the other: the sum of both is what it was, only the pairs are not."""
    missed = []
    for seed, case, row, head, draw in places(decode, dtype):
        planted = Planted(case)
        planted.exchanged = [(row, head, *draw.sample(visible_slots(case, row), 2))]
        judge = judge_for(case, planted)
        if found(judge, check_read_set, case) is None and found(judge, check_pairing, case) is None:
            missed.append((seed, row, head, planted.exchanged))
    assert missed == []


def test_one_dropped_position_of_many_is_caught_and_named(decode, dtype):
    """Contexts of more than one window of positions: 15 buckets of at most 32 or 96 positions each."""
    for seed in range(3):
        case, row, head, draw = random_case(seed, decode=decode, dtype=dtype)
        length = draw.randint(1500, 3000)
        queries = min(3, *case.query_lens)
        case = replace(case, paged=True, head_dim=16, num_kv_heads=1, group_size=2, query_lens=(queries,), context_lens=(length,))
        row, head = queries - 1, draw.randrange(2)
        planted, slot = Planted(case), draw.choice(visible_slots(case, row))
        assert found(judge_for(case, planted), check_read_set, case) is None
        planted.reads[row, head, slot] = 0
        facts = found(judge_for(case, planted), check_read_set, case)
        assert facts is not None, (seed, head, slot, case)
        assert slot_in_words(case, slot) in facts["not read"] and names(case, facts["not read"]) == 1, (seed, slot, facts)
