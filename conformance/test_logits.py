"""LOGIT: the logits that tokens are sampled from, whole and with the vocabulary split over ranks."""

import functools
from collections.abc import Callable

import pytest
import torch

from conformance.cases.logits import PAST_2048, RAGGED, LogitsCase, decodes, parallel_cases, poisoned, prefills, uneven_cases
from conformance.cases.logits_values import corners, values_cases
from conformance.checks.logits import last_rows, own_rows, parallel
from conformance.checks.logits_values import check_values
from conformance.checks.ranks import Ranks
from conformance.judge import Judge


@pytest.mark.clause("LOGIT-1", function="last_token_logits")
def test_logits_of_a_prefill(judge: Judge) -> None:
    dtypes = judge.capabilities.dtypes
    explicit = [LogitsCase(lens, 50, dtype=dtype) for lens in RAGGED for dtype in dtypes]
    explicit += [LogitsCase(PAST_2048, 50, dtype=dtypes[-1]), LogitsCase(RAGGED[0], 50, dtype=dtypes[0], sums_layout="strided")]
    judge.for_all(prefills(judge.capabilities), functools.partial(last_rows, judge), examples=40, explicit=explicit)


@pytest.mark.clause("LOGIT-2", function="last_token_logits")
def test_logits_of_a_decode_step(judge: Judge) -> None:
    rows = (1, 2, 3, 8, 17, 64, 65, 130, 0)
    explicit = [LogitsCase((1,) * n, 160, decode=True, dtype=dtype) for n in rows for dtype in judge.capabilities.dtypes]
    judge.for_all(decodes(judge.capabilities, rows), functools.partial(last_rows, judge), examples=25, explicit=explicit)


@pytest.mark.clause("LOGIT-3", function="last_token_logits")
def test_logits_rows_are_their_own(judge: Judge) -> None:
    judge.for_all(poisoned(judge.capabilities), functools.partial(own_rows, judge), examples=30)


@pytest.mark.clause("LOGIT-6", function="last_token_logits")
def test_logits_values(judge: Judge) -> None:
    cases = values_cases(judge.capabilities)
    judge.for_all(cases, functools.partial(check_values, judge), examples=40, explicit=corners(judge.capabilities))


def with_ranks(judge: Judge, cases: Callable[[int, torch.dtype], list[LogitsCase]], quick: int = 2) -> None:
    """The cases of each world size, in processes that are started once for it; of `quick` ranks alone at the quick effort."""
    dtype = torch.float32 if torch.float32 in judge.capabilities.dtypes else judge.capabilities.dtypes[0]
    takes_group = judge.implementation.takes("parallel_logits", "group")
    for world_size in (quick,) if judge.effort == "quick" else (2, 3, 4):
        with Ranks(judge.implementation, world_size) as ranks:
            for case in cases(world_size, dtype):
                if case.ranks is None or takes_group:
                    judge.for_each([case], functools.partial(parallel, judge, ranks))


@pytest.mark.clause("LOGIT-4", function="parallel_logits")
def test_logits_of_shards(judge: Judge) -> None:
    with_ranks(judge, parallel_cases)


@pytest.mark.clause("LOGIT-5", function="parallel_logits")
def test_logits_of_uneven_shards(judge: Judge) -> None:
    with_ranks(judge, uneven_cases, quick=3)  # that a shard lies beside two of another width takes three
