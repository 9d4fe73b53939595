"""PRE: the scheduled tokens of each sequence, causal, through the block table or without one."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from conformance.cases.attention import (
    WIDE_GROUP_SIZES,
    AttentionCase,
    Limits,
    WithLater,
    WithQueries,
    WithScores,
    WithSplit,
    attention_cases,
    long_contexts,
    many_queries,
)
from conformance.cases.attention_fixed import (
    empty_batches,
    large_batches,
    large_pages,
    longest,
    many_without_a_cache,
    other_prefills,
    rows_past_a_grid,
    strided_prefills,
    unusual_scales,
    widest_groups,
)
from conformance.checks.claims import check_empty_rows, check_nan_tail
from conformance.checks.empties import check_empties, check_empty_batch, check_unchanged
from conformance.checks.extremes import ORDERS, SCALES, check_extremes, check_scale
from conformance.checks.influence import (
    check_chunks,
    check_large_pool,
    check_metadata,
    check_neighbours,
    check_surroundings,
    in_large_pool,
)
from conformance.checks.large_offsets import check_huge_pool, huge_case
from conformance.checks.read_sets import check_counts, check_pairing, check_read_set
from conformance.checks.values import QUERY_SCALES, check_values
from conformance.judge import Judge

PREFILL = "prefill_attention"


def limits(judge: Judge) -> Limits:
    return Limits(context=2048, sequences=6, queries=300, elements=1_000_000) if judge.is_cuda else Limits()


def cases(judge: Judge, **more: object) -> st.SearchStrategy[AttentionCase]:
    return attention_cases(judge.capabilities, decode=False, limits=limits(judge), **more)  # type: ignore[arg-type]


@pytest.mark.clause("PRE-1", function=PREFILL)
def test_prefill_attention_reads(judge: Judge) -> None:
    judge.for_all(cases(judge), functools.partial(check_read_set, judge), examples=60)


@pytest.mark.clause("PRE-1", function=PREFILL)
def test_prefill_attention_reads_long_contexts(judge: Judge) -> None:
    judge.for_all(long_contexts(judge.capabilities, decode=False), functools.partial(check_read_set, judge), examples=10)


@pytest.mark.clause("PRE-1", function=PREFILL)
def test_prefill_attention_reads_many_queries(judge: Judge) -> None:
    judge.for_all(many_queries(judge.capabilities), functools.partial(check_read_set, judge), examples=8)


@pytest.mark.clause("PRE-1", function=PREFILL)
def test_prefill_attention_reads_on_other_paths(judge: Judge) -> None:
    long = [] if judge.effort == "quick" else longest(judge.capabilities, False, judge.is_cuda)
    judge.for_each([*other_prefills(judge.capabilities), *long], functools.partial(check_read_set, judge))
    many = [] if judge.effort == "quick" else many_without_a_cache(judge.capabilities)
    judge.for_each([*large_pages(judge.capabilities), *many], lambda case: check_counts(judge, case, 0, case.size()))


@pytest.mark.clause("PRE-1", function=PREFILL)
def test_prefill_attention_pairs_keys_with_values(judge: Judge) -> None:
    judge.for_all(cases(judge), functools.partial(check_pairing, judge), examples=16)


@pytest.mark.clause("PRE-2", function=PREFILL)
def test_prefill_attention_values(judge: Judge) -> None:
    drawn = st.builds(WithQueries, cases(judge), st.sampled_from(QUERY_SCALES))
    fixed = [WithQueries(case, 1.0) for case in strided_prefills(judge.capabilities)]
    judge.for_all(drawn, lambda case: check_values(judge, *case), examples=50, explicit=fixed)


@pytest.mark.clause("PRE-3", function=PREFILL)
def test_prefill_attention_surroundings(judge: Judge) -> None:
    judge.for_all(cases(judge, paged=True), functools.partial(check_surroundings, judge), examples=12)


@pytest.mark.clause("PRE-3", function=PREFILL)
def test_prefill_attention_metadata_layouts(judge: Judge) -> None:
    small = Limits(context=40, sequences=4, queries=5, elements=10_000)
    drawn = attention_cases(judge.capabilities, decode=False, limits=small, kv_heads=(1,), group_sizes=(1, 2), strided=False, min_sequences=2)
    judge.for_all(drawn, functools.partial(check_metadata, judge), examples=6)


@pytest.mark.clause("PRE-3", function=PREFILL)
def test_prefill_attention_in_a_large_pool(judge: Judge) -> None:
    small = cases(judge, kv_heads=(1,), strided=False, paged=True).map(functools.partial(in_large_pool, effort=judge.effort))
    judge.for_all(small, functools.partial(check_large_pool, judge), examples=6)


@pytest.mark.clause("PRE-3", function=PREFILL)
def test_prefill_attention_at_the_top_of_a_huge_pool(judge: Judge) -> None:
    judge.for_each([huge_case(judge, torch.int32)], functools.partial(check_huge_pool, judge))


@pytest.mark.clause("PRE-4", function=PREFILL)
def test_prefill_attention_chunks(judge: Judge) -> None:
    drawn = st.builds(WithSplit, cases(judge, paged=True), st.integers(0, 300))
    judge.for_all(drawn, lambda pair: check_chunks(judge, *pair), examples=25)


@pytest.mark.clause("PRE-5", function=PREFILL)
def test_prefill_attention_neighbours(judge: Judge) -> None:
    sequences = 40 if judge.is_cuda else 9 if judge.effort == "quick" else 14
    wide = Limits(context=limits(judge).context, sequences=sequences, queries=9, elements=limits(judge).elements // 4)
    drawn = attention_cases(judge.capabilities, decode=False, limits=wide, min_sequences=2, group_sizes=(1, 2), kv_heads=(1, 2))
    judge.for_all(drawn, functools.partial(check_neighbours, judge), examples=8)


@pytest.mark.clause("PRE-5", function=PREFILL)
def test_prefill_attention_large_batches(judge: Judge) -> None:
    drawn = large_batches(judge.capabilities, False, judge.effort, judge.seed)
    judge.for_each(drawn, functools.partial(check_read_set, judge))


@pytest.mark.clause("PRE-6", function=PREFILL)
def test_prefill_attention_groups(judge: Judge) -> None:
    judge.for_each(widest_groups(judge.capabilities, False), functools.partial(check_read_set, judge))
    judge.for_each(widest_groups(judge.capabilities, False)[:: 2 if judge.effort == "quick" else 1], functools.partial(check_pairing, judge))
    judge.for_all(cases(judge, group_sizes=WIDE_GROUP_SIZES), functools.partial(check_read_set, judge), examples=15)
    judge.for_all(cases(judge, group_sizes=WIDE_GROUP_SIZES), functools.partial(check_pairing, judge), examples=6)


@pytest.mark.clause("PRE-7", function=PREFILL)
def test_prefill_attention_extreme_scores(judge: Judge) -> None:
    drawn = st.builds(WithScores, cases(judge), st.sampled_from(ORDERS), st.sampled_from([0.0, 1e4, -1e4, 1e6, -1e6]))
    judge.for_all(drawn, lambda case: check_extremes(judge, *case), examples=40)


@pytest.mark.clause("PRE-7", function=PREFILL)
def test_prefill_attention_scales(judge: Judge) -> None:
    drawn = st.tuples(cases(judge), st.sampled_from(SCALES)).map(lambda pair: replace(pair[0], scale=pair[1]))
    judge.for_all(drawn, functools.partial(check_scale, judge), examples=16, explicit=unusual_scales(judge.capabilities, False))


@pytest.mark.clause("PRE-8", function=PREFILL)
def test_prefill_attention_with_empty_rows(judge: Judge) -> None:
    judge.for_all(cases(judge, empties=True), functools.partial(check_empties, judge), examples=40)
    judge.for_each(empty_batches(judge.capabilities, False), functools.partial(check_empty_batch, judge))
    if judge.effort != "quick":
        judge.for_each(rows_past_a_grid(judge.capabilities, False), functools.partial(check_empties, judge))


@pytest.mark.clause("PRE-9", function=PREFILL)
def test_prefill_attention_leaves_everything_alone(judge: Judge) -> None:
    judge.for_all(st.builds(WithLater, cases(judge), cases(judge)), lambda pair: check_unchanged(judge, *pair), examples=20)


@pytest.mark.clause("CLAIM-1", function=PREFILL)
def test_prefill_attention_nan_tail(judge: Judge) -> None:
    judge.for_all(cases(judge, paged=True), functools.partial(check_nan_tail, judge), examples=30)


@pytest.mark.clause("CLAIM-2", function=PREFILL)
def test_prefill_attention_empty_rows_are_zero(judge: Judge) -> None:
    judge.for_all(cases(judge, empties=True), functools.partial(check_empty_rows, judge), examples=15)
