"""STEP: store, then attend, step after step over one cache; and batches of real requests."""

import functools

import pytest

from conformance.cases.growing import growing
from conformance.checks.growing import check_growing
from conformance.judge import Judge


@pytest.mark.clause("STEP-1", function=("store_kvcache", "decode_attention"))
def test_step_store_then_decode(judge: Judge) -> None:
    judge.for_all(growing(judge.capabilities), functools.partial(check_growing, judge), examples=25)
