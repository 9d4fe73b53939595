"""KV: the write of a step's keys and values into their slots."""

import functools

import pytest
import torch

from conformance.cases.stores import SKIPS, STRIDED_LAYOUTS, stores
from conformance.checks.claims import check_bad_slots
from conformance.checks.store import check_store
from conformance.judge import Judge


@pytest.mark.clause("KV-1", function="store_kvcache")
def test_store_kvcache_mapped_slots(judge: Judge) -> None:
    judge.for_all(stores(judge.capabilities), functools.partial(check_store, judge), examples=60)


@pytest.mark.clause("KV-2", function="store_kvcache")
def test_store_kvcache_everything_else(judge: Judge) -> None:
    layouts = (("layer", "plain"), ("plain", "plain"))
    judge.for_all(stores(judge.capabilities, layouts=layouts), functools.partial(check_store, judge), examples=60)


@pytest.mark.clause("KV-3", function="store_kvcache")
def test_store_kvcache_skips(judge: Judge) -> None:
    judge.for_all(stores(judge.capabilities, skips=SKIPS[1:]), functools.partial(check_store, judge), examples=60)


@pytest.mark.clause("KV-4", function="store_kvcache")
def test_store_kvcache_strides(judge: Judge) -> None:
    judge.for_all(
        stores(judge.capabilities, layouts=STRIDED_LAYOUTS, skips=("none", "some")), functools.partial(check_store, judge), examples=60
    )


@pytest.mark.clause("KV-5", function="store_kvcache")
def test_store_kvcache_index_dtypes_and_odd_rows(judge: Judge) -> None:
    odd = ((3, 40), (5, 7), (1, 80), (3, 96), (1, 1), (7, 24))
    judge.for_all(
        stores(judge.capabilities, head_shapes=odd, index_dtypes=(torch.int64, torch.int32), rows=(1, 0, 2, 5, 33), skips=("none", "some")),
        functools.partial(check_store, judge),
        examples=60,
    )


@pytest.mark.clause("CLAIM-4", function="store_kvcache")
def test_store_kvcache_checks_its_slots(judge: Judge) -> None:
    judge.for_all(stores(judge.capabilities), functools.partial(check_bad_slots, judge), examples=8)
