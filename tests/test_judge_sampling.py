"""Are the judge's statistics calibrated, and how strong are they? `pytest tests/test_judge_sampling.py -s` prints what is measured.

The perfect sampler draws by inversion in float64, straight from the law. It stands in for the call of an implementation; all that comes
after it (pooling, statistics, both stages) is the judge's own.
"""

import time

import numpy as np
import pytest
import torch
from planted import CPU, judge_of
from scipy import stats

from conformance import test_sampling as suite
from conformance.cases.equal_rows import EqualRows
from conformance.cases.laws import Law, RowTemperatures, Tail
from conformance.cases.races import RaceCase
from conformance.checks import distribution
from conformance.checks import sampling as sampling_checks
from conformance.checks.distribution import FALSE_ALARM, STAGE_ONE, STAGE_TWO
from conformance.checks.sampling_corners import CornerChecks
from conformance.checks.sampling_independence import IndependenceChecks
from conformance.checks.tail import TailChecks
from conformance.clauses import CLAUSES
from conformance.findings import Broken
from conformance.implementation import Implementation
from conformance.judge import Judge
from conformance.mutants import all_mutants
from conformance.mutants.sound_sampling import SoundSampling

VERDICTS, EACH = 2_000, 400
KS_ALPHA = 1e-4  # seeds are fixed: what passes once passes always
MOST_FALSE_ALARM = 1e-6  # of a run
POWER_SEEDS = (1, 2, 3)
STATED_POWER = 0.95


class PerfectSampler:
    """Draws by inversion; `faults` change its logits, temperatures or tokens on the way."""

    def __init__(self, seed, scale_temperature=1.0, tokens=lambda tokens, vocab_size: tokens, missing_share=0.0, uniforms=None):
        self.random = np.random.default_rng(seed)
        self.scale_temperature, self.tokens, self.missing_share = scale_temperature, tokens, missing_share
        self.uniforms = uniforms or (lambda random, rows: random.random(rows))
        self.cumulative = {}

    def draw(self, logits, temperatures, **keywords):
        rows, vocab_size = logits.shape
        temperature = temperatures if isinstance(temperatures, float) else temperatures[:, None].double()
        uniform = self.uniforms(self.random, rows)
        if logits.stride(0) == 0:  # equal rows
            drawn = np.searchsorted(self.cumulative_of(logits[:1], temperature)[0], uniform, side="right")
        else:
            drawn = (self.cumulative_of(logits, temperature) <= uniform[:, None]).sum(axis=1)
        return torch.from_numpy(self.tokens(np.minimum(drawn, vocab_size - 1), vocab_size))

    def cumulative_of(self, logits, temperature):
        key = logits.data_ptr(), tuple(logits.shape), float(torch.as_tensor(temperature).sum())
        if key not in self.cumulative:
            scaled = logits.double() / (temperature * self.scale_temperature)
            missing = int(logits.shape[1] * self.missing_share)
            scaled[:, logits.shape[1] - missing :] = -torch.inf
            held = torch.softmax(scaled, dim=1).cumsum(dim=1).numpy()
            self.cumulative[key] = held / held[:, -1:], logits  # the logits are kept, so that their address stays theirs
        return self.cumulative[key][0]


def judged_by(checks_class, sampler, clause="SAMPLE-1", seed=0):
    """The checks of a clause, drawing from `sampler`."""
    target = type("Perfect", (), {"sample": lambda self, logits, temperatures: None})()
    checks = checks_class(judge_of(target, clause, "sample", seed=seed))
    checks.draw = sampler.draw
    return checks


def statistics_of(sampler):
    """Every statistic in use, by name: a call makes one verdict. Cases are made once, their laws are the suite's."""
    law_checks, independence, tails = (judged_by(kind, sampler) for kind in (sampling_checks.SamplingChecks, IndependenceChecks, TailChecks))
    for checks in (law_checks, independence, tails):
        checks.takes_seed = False
    laws = [law for law in suite.laws(law_checks.judge) if law.vocab_size != 1000 or law.shape == "peaked"]
    named = {f"law {law.shape}, V {law.vocab_size}{', by rank' if law.by_rank else ''}": lambda law=law: law_checks.law(law) for law in laws}
    temperatures = RowTemperatures(200)
    rows = {count: temperatures.rows(count) for times in (1, 4) for count in temperatures.batches(times)}
    frozen = type("Frozen", (RowTemperatures,), {"rows": lambda self, count: rows[count], "law": temperatures.law})(200)
    return named | {
        "temperatures of rows (Sidak)": lambda: law_checks.row_temperatures(frozen),
        "rows of a call (Sidak)": lambda: independence.rows_of_a_call(EqualRows(4, 512)),
        "consecutive calls (Sidak)": lambda: independence.consecutive_calls(EqualRows(24, 512)),
        "tail, 11 nats": lambda: tails.tail(Tail(11.0, 4_096, 600)),
    }


@pytest.fixture
def stage_one(monkeypatch):
    """The p-values of every first stage, in the order of the verdicts."""
    seen = []

    def noting(p_value):
        def noted(times):
            p = p_value(times)
            if times == 1:
                seen.append(p)
            return p

        return distribution.rejected(noted)

    monkeypatch.setattr(sampling_checks, "rejected", noting)
    return seen


def test_a_perfect_sampler_is_never_rejected_and_its_p_values_are_uniform(stage_one):
    """Several hundred verdicts of each statistic in use, more than 2,000 together."""
    statistics = statistics_of(PerfectSampler(seed=1))
    print(f"\n{'statistic':<32} {'verdicts':>8} {'rejected':>8} {'stage two':>9} {'KS p':>8}")
    verdicts = 0
    for name, judge_once in statistics.items():
        stage_one.clear()
        for _ in range(EACH):
            judge_once()  # raises Broken on a rejection
        p_values = np.array(stage_one)
        verdicts += len(p_values)
        # a count of some fifty: its p-values may be too large, and never too small
        discrete = name.startswith(("tail", "law rare", "law flat, V 65536"))
        uniform = stats.kstest(p_values, "uniform", alternative="greater" if discrete else "two-sided").pvalue
        print(f"{name:<32} {len(p_values):>8} {0:>8} {(p_values < STAGE_ONE).sum():>9} {uniform:>8.3f}")
        assert uniform > KS_ALPHA, f"stage one of {name} is not uniform on a perfect sampler: KS p = {uniform:.1e}"
    assert verdicts >= VERDICTS
    print(f"{verdicts} verdicts, none rejected")


def test_the_false_alarm_of_a_run_is_stated_and_small():
    """From the number of two-stage tests that each test of the suite notes on an implementation that draws perfectly."""
    assert pytest.approx(STAGE_ONE * STAGE_TWO) == FALSE_ALARM
    total = 0
    for clause, tests in judges_of_sampling().items():
        for test in tests:
            judge = Judge(Implementation("sound", all_sound(), CPU), CLAUSES[clause], "sample", effort="quick")
            test(judge)
            told = [int(note.split()[0]) for note in judge.record.notes if "two-stage" in note]
            assert len(told) <= 1
            total += sum(told)
    print(f"\na run holds {total} two-stage tests: a sound sampler fails it with probability {total * FALSE_ALARM:.1e}")
    assert total >= 15 and total * FALSE_ALARM <= MOST_FALSE_ALARM


def judges_of_sampling():
    """{clause: its tests in the suite}"""
    found = {}
    for name, test in vars(suite).items():
        if name.startswith("test_"):
            found.setdefault(test.pytestmark[0].args[0], []).append(test)
    return found


def all_sound():
    from conformance.mutants.sound_sampling import SoundSampling

    return SoundSampling()


# --- power ------------------------------------------------------------------------------------------------------------------------------

LAWS = (Law("peaked", 17, 0.8, 16_000), Law("two-level", 1000, 1.3, 2_400), Law("peaked", 1000, 0.7, 2_400))
FAULTS = {  # name -> (sampler with the fault, whether the CPU's draws must tell it)
    "T x 1.02": (lambda seed: PerfectSampler(seed, scale_temperature=1.02), False),
    "T x 1.05": (lambda seed: PerfectSampler(seed, scale_temperature=1.05), True),
    "last 1/16 missing": (lambda seed: PerfectSampler(seed, missing_share=1 / 16), True),
    "ids off by one": (lambda seed: PerfectSampler(seed, tokens=lambda tokens, v: (tokens + 1) % v), True),
    "noise shared between rows": (lambda seed: PerfectSampler(seed, uniforms=lambda random, rows: np.full(rows, random.random())), True),
    "noise frozen between calls": (lambda seed: PerfectSampler(seed, uniforms=lambda _, rows: np.random.default_rng(0).random(rows)), True),
}


def caught(sampler):
    """By the laws, or by the independence of rows or calls."""
    laws, independence = judged_by(sampling_checks.SamplingChecks, sampler), judged_by(IndependenceChecks, sampler, "SAMPLE-5")
    try:
        laws.for_each(LAWS, laws.law)
        independence.for_each([EqualRows(16, 512)], independence.rows_of_a_call)
        independence.for_each([EqualRows(24, 512)], independence.consecutive_calls)
    except Broken:
        return True
    return False


def power(fault, repeats):
    return np.mean([caught(FAULTS[fault][0](seed)) for seed in range(repeats)])


def test_the_power_on_named_faults():
    print(f"\n{'fault':<28} {'caught of 40':>12}")
    for fault, (_, must) in FAULTS.items():
        share = power(fault, 40)
        print(f"{fault:<28} {share:>12.0%}")
        assert share >= STATED_POWER or not must, f"{fault} is caught in {share:.0%} of 40 verdicts"


def test_a_statistic_with_its_sign_flipped_is_caught(monkeypatch):
    """Negative control: 1 - p is as uniform on a perfect sampler, and only the power tells."""
    pearson = distribution.pearson
    monkeypatch.setattr(sampling_checks, "pearson", lambda counts, probabilities, by_rank=False: 1 - pearson(counts, probabilities))
    assert power("ids off by one", 10) < STATED_POWER and power("T x 1.05", 10) < STATED_POWER


SAMPLING = [m for m in all_mutants().values() if m.clause.startswith("SAMPLE") and not m.gpu_only]


@pytest.mark.parametrize("mutant", SAMPLING, ids=lambda mutant: mutant.name)
def test_the_power_on_each_mutant(mutant):
    """Under several seeds, by the tests of its own clause alone."""
    told = []
    for seed in POWER_SEEDS:
        started = time.monotonic()
        judge = Judge(Implementation(mutant.name, mutant.implementation(), CPU), CLAUSES[mutant.clause], "sample", seed=seed)
        told.append(any(breaks(test, judge) for test in judges_of_sampling()[mutant.clause]))
        seconds = time.monotonic() - started
    print(f"\n{mutant.name:<48} {mutant.clause:<9} caught under {sum(told)} of {len(told)} seeds, the last in {seconds:.2f} s")
    assert all(told)
    assert seconds < 20


def breaks(test, judge):
    try:
        test(judge)
    except Broken:
        return True
    return False


# --- likely causes ----------------------------------------------------------------------------------------------------------------------


class Greedy(SoundSampling):
    def sample(self, logits, temperatures, *, noise=None, seed=None):
        return logits.argmax(dim=1)


class FirstRowOnly(SoundSampling):
    """Row 0 is greedy, all others are drawn."""

    def sample(self, logits, temperatures, *, noise=None, seed=None):
        tokens = super().sample(logits, temperatures, noise=noise, seed=seed)
        tokens[0] = logits[0].argmax()
        return tokens


class TopFifty(SoundSampling):
    def probabilities(self, scaled, logits_dtype):
        p = super().probabilities(scaled, logits_dtype)
        ids = p.argsort(dim=1, descending=True, stable=True)[:, :50]
        return torch.zeros_like(p).scatter(1, ids, p.gather(1, ids))


def likely_of(checks_class, target, clause, check, case):
    with pytest.raises(Broken) as raised:
        getattr(checks_class(judge_of(target, clause, "sample")), check)(case)
    return raised.value.finding.likely


def test_only_what_is_not_flat_has_a_greedy_draw():
    likely = [likely_of(sampling_checks.SamplingChecks, Greedy(), "SAMPLE-1", "law", Law(shape, 17, 1.0, 2_000)) for shape in ("flat", "peaked")]
    assert "greedy" not in likely[0] and "greedy" in likely[1]


def test_unused_noise_is_told_of_most_rows_and_not_of_one():
    case = RaceCase(64, 33)
    assert likely_of(CornerChecks, Greedy(), "SAMPLE-4", "race", case) == "the noise is not used"
    assert likely_of(CornerChecks, FirstRowOnly(), "SAMPLE-4", "race", case) == ""


def test_a_cut_tail_is_told_from_a_floor_of_the_noise():
    floor = all_mutants()["drawn_noise_is_clamped_to_1e_5"].implementation()
    likely = [likely_of(TailChecks, target, "SAMPLE-8", "tail", Tail(14.0, 16_384, 640)) for target in (TopFifty(), floor)]
    assert likely[0].startswith("only 50 of the tail's ids are drawn") and likely[1].startswith("the noise has a floor")
