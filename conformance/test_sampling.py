"""SAMPLE: one token a row, distributed as softmax(logits / T)."""

from dataclasses import replace

import pytest
import torch

from conformance.cases.equal_rows import EqualRows, FlatRows
from conformance.cases.laws import TEMPERATURES, Law, RowTemperatures, Tail, widest
from conformance.cases.races import RaceCase, notable_races, races
from conformance.cases.sampling_corners import CORNERS, DEAD_ROWS, ClearMaximum, corners_of, half_corners
from conformance.checks.sampling import SamplingChecks
from conformance.checks.sampling_corners import CornerChecks
from conformance.checks.sampling_independence import IndependenceChecks
from conformance.checks.tail import TailChecks
from conformance.judge import Judge

LARGEST_CALL = 250_000_000  # logits, on a GPU


def laws(judge: Judge) -> list[Law]:
    """All rows of a law have one temperature: SAMPLE-2 is about the others."""
    dtype = full_dtype(judge)
    count = judge.count
    bulk = [
        Law("two-level", 2, 0.5, count(4_000), dtype, offset=3.0),
        Law("flat", 17, 1.5, count(8_000), dtype, offset=-2.0),
        Law("peaked", 17, 0.8, count(16_000), dtype),
        Law("two-level", 17, 2.5, count(8_000), dtype, offset=10.0),
        Law("peaked", 1000, 0.7, count(2_400), dtype),
        Law("peaked", 1000, 0.7, count(2_400), dtype, by_rank=True),
        Law("two-level", 1000, 1.3, count(2_400), dtype),
        # what no effort draws less of: a small T over a small vocabulary, one rare token, ids past 2^15
        Law("steps", 4, 0.01, 2_000, dtype),
        Law("rare", 2, 1.0, 40_000, dtype),
        Law("flat", 65_536, 1.0, 52, dtype),
        Law("peaked", 17, 100.0, 4_000, dtype, rows_per_call=24),
    ]
    if judge.effort != "quick":
        bulk.append(Law("peaked", 17, 10.0, 2_000, dtype, rows_per_call=1))
    if judge.implementation.takes("sample", "seed"):
        bulk.append(Law("peaked", 17, 0.7, count(4_000), dtype, seeded=True))
    if judge.is_cuda:
        bulk += [
            Law(shape, v, 0.9, count(n), dtype, largest_call=LARGEST_CALL)
            for v, n in ((1000, 200_000), (32_000, 100_000), (151_936, 50_000))
            for shape in ("peaked", "two-level", "flat")
        ]
        bulk.append(Law("peaked", 151_936, 0.9, count(50_000), dtype, largest_call=LARGEST_CALL, by_rank=True))
    elif judge.effort == "thorough":
        bulk.append(Law("peaked", 32_000, 0.9, 4_000, dtype, largest_call=4_000_000))
    return in_calls(judge, bulk)


def in_calls(judge: Judge, laws: list[Law]) -> list[Law]:
    """The quick effort makes two calls of four: one row, and a quarter of the rows, say little that 32 and the rest do not."""
    return [replace(law, few_calls=True) for law in laws] if judge.effort == "quick" else laws


def full_dtype(judge: Judge) -> torch.dtype:
    return widest(judge.capabilities.dtypes)


def halves(judge: Judge) -> list[torch.dtype]:
    """The other dtypes that are taken."""
    return [dtype for dtype in judge.capabilities.dtypes if dtype != full_dtype(judge)]


@pytest.mark.clause("SAMPLE-1", function="sample")
def test_sample_distribution(judge: Judge) -> None:
    checks = SamplingChecks(judge)
    checks.for_each(laws(judge), checks.law)


@pytest.mark.clause("SAMPLE-2", function="sample")
def test_sample_temperature_of_each_row(judge: Judge) -> None:
    checks = CornerChecks(judge)
    few, dtype = max(100, judge.count(100)), full_dtype(judge)
    cases = [RowTemperatures(judge.count(800), dtype=dtype), RowTemperatures(few, layout="fused", dtype=dtype)]
    cases += [RowTemperatures(few, dtype=half) for half in halves(judge)]
    checks.for_each(cases, checks.row_temperatures)
    if checks.takes_noise:
        checks.for_each([RaceCase(120, v, temperatures=TEMPERATURES, dtype=dtype) for v in (17, 100)], checks.race)
    checks.for_each([ClearMaximum(1e-6, between=True, dtype=dtype)], checks.clear_maximum)


@pytest.mark.clause("SAMPLE-3", function="sample")
def test_sample_half_precision_logits(judge: Judge) -> None:
    checks = CornerChecks(judge)
    more = 30 if judge.is_cuda else 1  # without given noise, p that are rounded to this dtype show only in many draws
    dtypes = [dtype for dtype in judge.capabilities.dtypes if dtype != torch.float32]
    if not dtypes:
        pytest.skip("not offered: logits of any dtype but float32")
    for dtype in dtypes:
        cases = [
            # multiples of 1/2 near 80: x / T, rounded to this dtype, is off by up to a quarter of a nat
            Law("peaked", 17, 0.7, more * judge.count(6_000), dtype, offset=80.0, grid=0.5),
            # 60,160 / 0.5 is beyond the largest half, 65,504; the upper tokens are all alike
            Law("top-only", 17, 0.5, judge.count(1_500), dtype, offset=60_160.0, grid=256.0),
        ]
        if checks.takes_seed:
            cases.append(Law("peaked", 17, 0.7, judge.count(1_500), dtype, seeded=True))
        checks.for_each(in_calls(judge, cases), checks.law)
        if checks.takes_noise:  # p that are rounded to this dtype change the winner of a row in some hundred
            many = [RaceCase(2_000, 17, temperature=t, offset=offset, dtype=dtype, seed=1) for t, offset in ((0.7, 0.0), (0.7, 80.0), (1.0, 0.0))]
            few = [RaceCase(64, 33, noise=noise, dtype=dtype) for noise in ("tiny", "one -0.0")]
            checks.for_each([*many, *few, RaceCase(64, 33, layout="fused", dtype=dtype)], checks.race)


@pytest.mark.clause("SAMPLE-4", function="sample")
def test_sample_with_given_noise(judge: Judge) -> None:
    checks = CornerChecks(judge)
    if not checks.takes_noise:
        pytest.skip("not offered: the keyword noise")
    dtype = full_dtype(judge)
    judge.for_all(races(dtype), checks.race, examples=40, explicit=notable_races(dtype))


@pytest.mark.clause("SAMPLE-5", function="sample")
def test_sample_rows_are_independent(judge: Judge) -> None:
    checks = IndependenceChecks(judge)
    checks.for_each([EqualRows(judge.count(16), 512, full_dtype(judge))], checks.rows_of_a_call)


@pytest.mark.clause("SAMPLE-6", function="sample")
def test_sample_calls_are_independent(judge: Judge) -> None:
    checks = IndependenceChecks(judge)
    dtype = full_dtype(judge)
    checks.for_each([FlatRows(64, dtype=dtype), FlatRows(1, dtype=dtype)], checks.fresh_every_call)
    checks.for_each([EqualRows(judge.count(24), 512, dtype)], checks.consecutive_calls)


@pytest.mark.clause("SAMPLE-6", function="sample")
def test_sample_seeds(judge: Judge) -> None:
    checks = IndependenceChecks(judge)
    dtype = full_dtype(judge)
    checks.for_each([FlatRows(64, dtype=dtype)], checks.seeds)
    if checks.takes_seed:
        checks.for_each([EqualRows(judge.count(24), 512, dtype)], checks.neighbouring_seeds)
        few = [] if judge.effort == "quick" else halves(judge)[:1]
        checks.for_each([FlatRows(16, 17, dtype=half) for half in few], checks.seeds)


@pytest.mark.clause("SAMPLE-7", function="sample")
def test_sample_forbidden_tokens(judge: Judge) -> None:
    checks = CornerChecks(judge)
    checks.for_each(corners_of(CORNERS, full_dtype(judge)), checks.corner)
    for dtype in halves(judge):
        checks.for_each(half_corners(dtype), checks.corner)


@pytest.mark.clause("SAMPLE-7", function="sample")
def test_sample_rows_without_a_distribution(judge: Judge) -> None:
    checks = CornerChecks(judge)
    checks.for_each(corners_of(DEAD_ROWS, full_dtype(judge)), checks.corner)


@pytest.mark.clause("SAMPLE-8", function="sample")
def test_sample_tail(judge: Judge) -> None:
    checks = TailChecks(judge)
    dtype = full_dtype(judge)
    if judge.is_cuda:
        tails = [Tail(nats, 262_144, judge.count(100_000), dtype, LARGEST_CALL) for nats in (14.0, 16.0, 18.0, 20.0)]
    else:  # a draw of the deeper ones takes too many random numbers here; 11 nats tell a partial loss, 14 one of nearly everything
        tails = [Tail(11.0, 4_096, judge.count(600), dtype), Tail(14.0, 16_384, judge.count(640), dtype)]
    if judge.effort != "quick":
        tails += [Tail(13.0, 8_192, judge.count(800), half) for half in halves(judge)[:1]]
    checks.for_each(tails, checks.tail)


@pytest.mark.clause("SAMPLE-9", function="sample")
def test_sample_small_temperatures(judge: Judge) -> None:
    checks = CornerChecks(judge)
    every = [FlatRows(5, 33, 0.7, dtype, layout) for dtype in judge.capabilities.dtypes for layout in ("plain", "fused")]
    few = [case for case in every if case.layout == "plain" or case.dtype == full_dtype(judge)]
    checks.for_each(few if judge.effort == "quick" else every, checks.unchanged)
    powers = (2, 6, 12) if judge.effort == "quick" else (2, 3, 4, 6, 8, 10, 12)
    checks.for_each([ClearMaximum(10.0**-power, dtype=full_dtype(judge)) for power in powers], checks.clear_maximum)
    checks.for_each([ClearMaximum(1e-4, dtype=dtype) for dtype in halves(judge)], checks.clear_maximum)
