"""One fault at one row and head among 8,192 positions: caught every time, and named exactly.

On a GPU at 200 random places a fault; without one at a few, of shorter contexts.
"""

import functools
import random
from dataclasses import replace

import pytest
import torch
from planted import HERE, Planted, judge_of

from conformance.cases.attention import AttentionCase
from conformance.checks.read_sets import check_read_set
from conformance.findings import Broken

ON_A_GPU = HERE.type == "cuda"
LONGEST = 8192 if ON_A_GPU else 1500
PLACES = 200 if ON_A_GPU else 4
FAULTS = ("dropped", "foreign")


def place(seed):
    """(case, row, head, random source): a long sequence, and a short one beside it."""
    draw = random.Random(seed)
    decode = draw.random() < 0.5
    case = AttentionCase(
        decode=decode,
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        block_size=draw.choice([1, 16, 64, 256]),
        num_kv_heads=draw.randint(1, 2),
        group_size=draw.randint(1, 4),
        head_dim=draw.choice([64, 80, 128]),
        query_lens=(1, 1) if decode else (draw.randint(1, 4), 2),
        context_lens=(LONGEST, draw.randint(2, 300)),
        filler=draw.choice(["minus_one", "impossible", "foreign"]),
        cache_layout=draw.choice(["plain", "layer", "interleaved"]),
        spare_columns=draw.choice([0, 2]),
        table_seed=seed,
        data_seed=seed,
    )
    return replace(case, scale=case.head_dim**-0.5), draw.randrange(case.query_lens[0]), draw.randrange(case.num_heads), draw


def plant(fault, case, row, head, draw):
    """The kernel with its fault, and the slot that it is about."""
    planted = Planted(case, HERE)
    sequence, visible = case.rows[row]
    own = case.slots[sequence][:visible]
    if fault == "dropped":
        slot = draw.choice(own)
        planted.reads[row, head, slot] = 0
    else:
        slot = draw.choice(sorted(set(range(case.num_slots)) - set(own)))
        planted.reads[row, head, slot] = 1
    return planted, slot


@pytest.mark.parametrize("seed", range(PLACES))
@pytest.mark.parametrize("fault", FAULTS)
def test_one_position_of_many_is_caught_and_named(fault, seed):
    case, row, head, draw = place(seed)
    planted, slot = plant(fault, case, row, head, draw)
    judge = judge_of(planted, "DEC-1" if case.decode else "PRE-1", case.function, HERE)
    with pytest.raises(Broken) as caught:
        judge.for_each([case], functools.partial(check_read_set, judge))
    facts = dict(caught.value.finding.facts)
    told = {label: facts[label] for label in ("not read", "read once too often", "foreign")}
    expected = "not read" if fault == "dropped" else "foreign"
    assert f"slot {slot} (" in told[expected] and len(told[expected].splitlines()) == 1, (told, slot)
    assert all(text == "nothing" for label, text in told.items() if label != expected), told
    where = caught.value.finding.facts[0][0]
    assert where.startswith(f"row {row}") and (f"query head {head} (" in where or case.num_heads == 1), where


def test_the_same_cases_pass_without_a_fault():
    for seed in range(PLACES // 10 + 1):
        case, *_ = place(seed)
        judge = judge_of(Planted(case, HERE), "DEC-1" if case.decode else "PRE-1", case.function, HERE)
        judge.for_each([case], functools.partial(check_read_set, judge))
