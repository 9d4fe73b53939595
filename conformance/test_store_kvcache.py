"""KV: the write of a step's keys and values into their slots."""

import functools
from dataclasses import replace

import pytest
import torch

from conformance.cases.stores import SKIPS, STRIDED_LAYOUTS, StoreCase, fixed_stores, stores, strided_stores, whole_pools
from conformance.checks.claims import check_bad_slots
from conformance.checks.large_offsets import check_huge_cache, huge_case
from conformance.checks.store import check_store
from conformance.judge import Judge


@pytest.mark.clause("KV-1", function="store_kvcache")
def test_store_kvcache_mapped_slots(judge: Judge) -> None:
    judge.for_all(stores(judge.capabilities), functools.partial(check_store, judge), examples=60)


@pytest.mark.clause("KV-1", function="store_kvcache")
def test_store_kvcache_many_rows(judge: Judge) -> None:
    many = stores(judge.capabilities, rows=(127, 129, 257, 511, 1030), head_shapes=((1, 16), (2, 64), (1, 40)))
    fixed = fixed_stores(judge.capabilities, (40, 128, 3), (1, 16, 4100))  # a row of more than 4,096 elements, more than 4,096 rows
    judge.for_all(many, functools.partial(check_store, judge), examples=8, explicit=[*fixed, *whole_pools(judge.capabilities)])


@pytest.mark.clause("KV-2", function="store_kvcache")
def test_store_kvcache_everything_else(judge: Judge) -> None:
    layouts = (("layer", "plain"), ("plain", "plain"))
    judge.for_all(stores(judge.capabilities, layouts=layouts), functools.partial(check_store, judge), examples=60)


@pytest.mark.clause("KV-2", function="store_kvcache")
def test_store_kvcache_leaves_a_large_cache_alone(judge: Judge) -> None:
    large = stores(judge.capabilities, head_shapes=((1, 16), (2, 16), (1, 40)), layouts=(("layer", "plain"), ("interleaved", "plain")))
    judge.for_all(large.map(in_a_large_cache), functools.partial(check_store, judge), examples=8)


def in_a_large_cache(case: StoreCase) -> StoreCase:
    """The same rows in a cache of 5,000 slots or more."""
    return replace(case, num_blocks=max(case.num_blocks, 5000 // case.block_size + 1))


@pytest.mark.clause("KV-3", function="store_kvcache")
def test_store_kvcache_skips(judge: Judge) -> None:
    # rows without a ragged end still need the guard of -1, and so do many, of wide integers
    whole_tile, many = fixed_stores(judge.capabilities, (1, 16, 128), (1, 16, 300), skip="some")
    fixed = [whole_tile, replace(many, index_dtype=torch.int64)]
    judge.for_all(stores(judge.capabilities, skips=SKIPS[1:]), functools.partial(check_store, judge), examples=60, explicit=fixed)


@pytest.mark.clause("KV-4", function="store_kvcache")
def test_store_kvcache_strides(judge: Judge) -> None:
    drawn = stores(judge.capabilities, layouts=STRIDED_LAYOUTS, skips=("none", "some"))
    judge.for_all(drawn, functools.partial(check_store, judge), examples=60, explicit=strided_stores(judge.capabilities))


@pytest.mark.clause("KV-5", function="store_kvcache")
def test_store_kvcache_index_dtypes_and_odd_rows(judge: Judge) -> None:
    odd = ((3, 40), (5, 7), (1, 80), (3, 96), (1, 1), (7, 24))
    judge.for_all(
        stores(judge.capabilities, head_shapes=odd, index_dtypes=(torch.int64, torch.int32), rows=(1, 0, 2, 5, 33), skips=("none", "some")),
        functools.partial(check_store, judge),
        examples=60,
    )


@pytest.mark.clause("KV-6", function="store_kvcache")
def test_store_kvcache_beyond_32_bits(judge: Judge) -> None:
    cases = [huge_case(judge, index_dtype) for index_dtype in (torch.int32, torch.int64)]
    judge.for_each(cases, functools.partial(check_huge_cache, judge))


@pytest.mark.clause("CLAIM-4", function="store_kvcache")
def test_store_kvcache_checks_its_slots(judge: Judge) -> None:
    judge.for_all(stores(judge.capabilities), functools.partial(check_bad_slots, judge), examples=8)
