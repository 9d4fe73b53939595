"""CLAIM: what is judged only where it is claimed, and is about bits: CUDA graphs, repeats, batches."""

import functools

import pytest
import torch
from hypothesis import strategies as st

from conformance.cases.attention import AttentionCase, Limits, attention_cases, long_contexts
from conformance.cases.attention_fixed import long_among_many
from conformance.cases.graphs import graphs
from conformance.cases.laws import widest
from conformance.cases.races import races
from conformance.checks.graphs import check_graph
from conformance.checks.repeats import (
    ROWS_OF_LOGITS,
    check_attention_alone,
    check_attention_repeats,
    check_logits_alone,
    check_logits_repeat,
    check_sample_alone,
    check_sample_repeats,
)
from conformance.judge import Judge


def cases(judge: Judge, *, decode: bool, min_sequences: int = 1) -> st.SearchStrategy[AttentionCase]:
    limits = Limits(context=4096, sequences=6, elements=1_000_000) if judge.is_cuda else Limits(sequences=3)
    drawn = attention_cases(
        judge.capabilities, decode=decode, limits=limits, min_sequences=min_sequences, group_sizes=(1, 2, 4), kv_heads=(1, 2), strided=False
    )
    return st.one_of(drawn, long_contexts(judge.capabilities, decode=decode))


def logits_cases(judge: Judge) -> st.SearchStrategy[tuple[int, torch.dtype]]:
    return st.tuples(st.sampled_from(ROWS_OF_LOGITS), st.sampled_from(judge.capabilities.dtypes))


@pytest.mark.clause("CLAIM-5", function=("store_kvcache", "decode_attention"), any_of=True)
def test_decode_steps_of_a_captured_bucket(judge: Judge) -> None:
    drawn = graphs(judge.capabilities, longest=4096 if judge.is_cuda else 400)
    judge.for_all(drawn, functools.partial(check_graph, judge), examples=30, at_least=6)


@pytest.mark.clause("CLAIM-6", function="prefill_attention")
def test_prefill_attention_repeats(judge: Judge) -> None:
    judge.for_all(cases(judge, decode=False), functools.partial(check_attention_repeats, judge), examples=12, at_least=3)


@pytest.mark.clause("CLAIM-6", function="decode_attention")
def test_decode_attention_repeats(judge: Judge) -> None:
    judge.for_all(cases(judge, decode=True), functools.partial(check_attention_repeats, judge), examples=12, at_least=3)


@pytest.mark.clause("CLAIM-6", function="last_token_logits")
def test_logits_repeat(judge: Judge) -> None:
    judge.for_all(logits_cases(judge), functools.partial(check_logits_repeat, judge), examples=10)


@pytest.mark.clause("CLAIM-6", function="sample")
def test_sample_repeats(judge: Judge) -> None:
    judge.for_all(races(widest(judge.capabilities.dtypes)), functools.partial(check_sample_repeats, judge), examples=5)


@pytest.mark.clause("CLAIM-7", function="prefill_attention")
def test_prefill_attention_is_the_same_in_any_batch(judge: Judge) -> None:
    judge.for_all(cases(judge, decode=False, min_sequences=2), functools.partial(check_attention_alone, judge), examples=20, at_least=4)
    judge.for_each(long_among_many(judge.capabilities, False), functools.partial(check_attention_alone, judge))


@pytest.mark.clause("CLAIM-7", function="decode_attention")
def test_decode_attention_is_the_same_in_any_batch(judge: Judge) -> None:
    judge.for_all(cases(judge, decode=True, min_sequences=2), functools.partial(check_attention_alone, judge), examples=20, at_least=4)
    judge.for_each(long_among_many(judge.capabilities, True), functools.partial(check_attention_alone, judge))


@pytest.mark.clause("CLAIM-7", function="last_token_logits")
def test_logits_are_the_same_in_any_batch(judge: Judge) -> None:
    judge.for_all(logits_cases(judge), functools.partial(check_logits_alone, judge), examples=10)


@pytest.mark.clause("CLAIM-7", function="sample")
def test_sample_is_the_same_in_any_batch(judge: Judge) -> None:
    judge.for_all(races(widest(judge.capabilities.dtypes)), functools.partial(check_sample_alone, judge), examples=20)
