"""What the judge makes of a failing case, of refusals and of errors (conformance/judge.py)."""

import functools
import time

import pytest
import torch
from hypothesis import strategies as st
from planted import judge_of

from conformance.capabilities import Capabilities
from conformance.cases.attention import Limits, attention_cases
from conformance.checks.read_sets import check_read_set
from conformance.findings import Broken, Refused
from conformance.judge import EFFORTS, SHRINKING_SECONDS
from conformance.mutants.sound_attention import SoundAttention

SEEDS = range(4)


class Faulty(SoundAttention):
    """Sound up to `longest` positions; the newest one is dropped beyond, each call after `seconds`."""

    def __init__(self, longest, seconds=0.0):
        self.longest, self.seconds = longest, seconds

    def context_length(self, lengths, i):
        time.sleep(self.seconds)
        return lengths[i] - 1 if lengths[i] > self.longest else lengths[i]


class Refusing(SoundAttention):
    def __init__(self, error, block_sizes=()):
        self.error, self.block_sizes = error, block_sizes

    def decode_attention(self, q, k_cache, v_cache, **how):
        if not self.block_sizes or k_cache.shape[1] in self.block_sizes:
            raise self.error
        return super().decode_attention(q, k_cache, v_cache, **how)


def decodes(limits=None):
    return attention_cases(Capabilities(), decode=True, limits=limits or Limits())


def broken_of(judge, cases, check, examples=60):
    with pytest.raises(Broken) as caught:
        judge.for_all(cases, check, examples=examples)
    return caught.value


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("longest", [2, 16])
def test_a_fault_shrinks_to_the_smallest_case_that_shows_it(longest, seed, monkeypatch):
    monkeypatch.setattr("conformance.judge.SHRINKING_SECONDS", 60.0)  # on a busy machine too
    judge = judge_of(Faulty(longest), "DEC-1", seed=seed)
    started = time.monotonic()
    broken = broken_of(judge, decodes(), functools.partial(check_read_set, judge))
    case = broken.finding.case
    assert case.context_lens == (longest + 1,)
    assert judge.record.case_size == case.size() == longest + 1
    assert (case.num_kv_heads, case.group_size, case.spare_columns, case.cache_layout, case.row_layout) == (1, 1, 0, "plain", "plain")
    assert broken.finding.likely.startswith("the newest token is dropped")
    assert 0 < judge.record.examples_to_failure <= judge.record.examples
    assert 0 < judge.record.seconds_to_failure <= time.monotonic() - started


@pytest.mark.parametrize("seed", SEEDS)
def test_shrinking_ends_in_time(seed, monkeypatch):
    """A slow implementation: no smaller case is taken up once the time is over, and what is told is a case that failed."""
    monkeypatch.setattr("conformance.judge.SHRINKING_SECONDS", 0.5)
    judge = judge_of(Faulty(16, seconds=0.02), "DEC-1", seed=seed)
    broken = broken_of(judge, decodes(), functools.partial(check_read_set, judge))
    failed_at = judge.record.seconds_to_failure
    assert time.monotonic() - judge._started - failed_at < 8.0
    assert max(broken.finding.case.context_lens) > 16
    assert dict(broken.finding.facts)["not read"] != "nothing"


def test_the_time_for_shrinking_is_bounded():
    assert SHRINKING_SECONDS <= 10


@pytest.mark.parametrize("seed", SEEDS)
def test_the_finding_is_the_one_of_the_case_that_is_told(seed):
    """Two faults, of long contexts and of block size 3: the facts and the case belong together."""
    def check(case):
        if sum(case.context_lens) > 20:
            raise Broken(("long", str(case.context_lens)))
        if case.block_size == 3:
            raise Broken(("three", str(case.context_lens)))

    broken = broken_of(judge_of(Faulty(10**9), "DEC-1", seed=seed), decodes(), check)
    assert broken.finding.facts[0][1] == str(broken.finding.case.context_lens)
    assert (broken.finding.facts[0][0] == "long") == (sum(broken.finding.case.context_lens) > 20)


@pytest.mark.parametrize(
    "error", [NotImplementedError("no page of this size"), ValueError("no page of this size"), AssertionError("no page of this size")], ids=repr
)
def test_refusals_are_counted_and_their_message_is_kept(error):
    judge = judge_of(Refusing(error, block_sizes=(3, 5, 16, 100)), "DEC-1")
    judge.for_all(decodes(), functools.partial(check_read_set, judge), examples=60)
    ((message, count),) = judge.record.refusals.items()
    assert message == f"{type(error).__name__}: no page of this size"
    assert 0 < count < judge.record.examples == 60


def test_a_wrong_case_is_found_among_refused_ones(monkeypatch):
    monkeypatch.setattr("conformance.judge.SHRINKING_SECONDS", 1.0)

    class Both(Refusing, Faulty):
        def __init__(self):
            Refusing.__init__(self, ValueError("no"), block_sizes=(16,))
            Faulty.__init__(self, 16)

    judge = judge_of(Both(), "DEC-1")
    broken = broken_of(judge, decodes(), functools.partial(check_read_set, judge))
    assert broken.finding.case.block_size != 16
    assert judge.record.refusals["ValueError: no"] > 0


@pytest.mark.parametrize("error", [RuntimeError("pages"), IndexError("pages"), KeyError("pages"), ZeroDivisionError("pages")], ids=repr)
def test_any_other_error_breaks_the_clause(error):
    judge = judge_of(Refusing(error), "DEC-1")
    broken = broken_of(judge, decodes(), functools.partial(check_read_set, judge))
    facts = dict(broken.finding.facts)
    assert "pages" in facts["raised"] and type(error).__name__ in facts["raised"]
    assert facts["at"].startswith("test_judge_shrinking.py:")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("none left")], ids=repr)
def test_running_out_of_memory_is_neither_a_finding_nor_a_refusal(error):
    judge = judge_of(Refusing(error), "DEC-1")
    with pytest.raises(type(error)):
        judge.for_all(decodes(), functools.partial(check_read_set, judge), examples=60)
    assert judge.record.refusals == {}


def test_all_refused_is_counted_as_such():
    judge = judge_of(Refusing(NotImplementedError()), "DEC-1")
    judge.for_all(decodes(), functools.partial(check_read_set, judge), examples=20)
    assert judge.record.refusals == {"NotImplementedError": 20} and judge.record.examples == 20


@pytest.mark.parametrize("effort", EFFORTS)
def test_effort_scales_the_number_of_cases(effort):
    judge = judge_of(Faulty(10**9), "DEC-1", effort=effort)
    judge.for_all(st.integers(0, 10**9), lambda case: None, examples=100)
    assert judge.record.examples == 100 * EFFORTS[effort]


def test_explicit_cases_come_first_and_are_not_scaled():
    seen = []
    judge = judge_of(Faulty(10**9), "DEC-1", effort="quick")
    judge.for_all(st.integers(100, 10**9), seen.append, examples=10, explicit=range(30))
    assert seen[:30] == list(range(30)) and len(seen) == judge.record.examples == 33


def test_cases_differ_between_seeds_and_clauses_and_repeat_with_them():
    def drawn(clause, seed):
        seen = []
        judge_of(Faulty(10**9), clause, seed=seed).for_all(st.integers(0, 10**9), seen.append, examples=20)
        return seen

    assert drawn("DEC-1", 0) == drawn("DEC-1", 0)
    assert drawn("DEC-1", 0) != drawn("DEC-1", 1)
    assert drawn("DEC-1", 0) != drawn("DEC-2", 0)


def test_a_later_call_may_not_overwrite_an_earlier_result():
    """Seen beside whatever clause is being judged."""
    class Kept(SoundAttention):
        def __init__(self):
            self.kept = {}

        def returned(self, out):
            held = self.kept.setdefault((out.shape, out.dtype), torch.empty_like(out))
            return held.copy_(out).view_as(out)

    judge = judge_of(Kept(), "DEC-1")
    judge.for_all(decodes(), functools.partial(check_read_set, judge), examples=40)
    for numbers in (1, 2):
        q = torch.full((1, 1, 16), float(numbers))
        cache = torch.full((1, 16, 1, 16), float(numbers))
        lengths, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
        judge.call("decode_attention", q, cache, cache, context_lens=lengths, block_tables=table, scale=1.0)
    assert "DEC-9" in judge.record.side_findings


def test_refused_is_an_outcome_and_not_an_error():
    judge = judge_of(Refusing(ValueError("no")), "DEC-1")
    with pytest.raises(Refused, match="ValueError: no"):
        judge.call("decode_attention", torch.zeros(1, 1, 16), torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16),
                   context_lens=torch.ones(1), block_tables=torch.zeros(1, 1), scale=1.0)  # fmt: skip
