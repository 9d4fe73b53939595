"""LIFE: sequences that are admitted, hit, chunked, forked, preempted, resumed and freed in one small pool, step after step."""

import functools

import pytest

from conformance.cases.lives import fixed_lives, lives
from conformance.checks.lives import check_life
from conformance.judge import Judge


def judge_lives(judge: Judge) -> None:
    check = functools.partial(check_life, judge)
    fixed = fixed_lives(judge.capabilities) if judge.function == "BlockManager" else []
    judge.for_all(lives(judge.capabilities), check, examples=120, patience=2.0, at_least=10, explicit=fixed)


@pytest.mark.clause("LIFE-1", function=("prepare_prefill", "prepare_decode"), any_of=True)
def test_life_prepare(judge: Judge) -> None:
    judge_lives(judge)


@pytest.mark.clause("LIFE-2", function="store_kvcache")
def test_life_store_kvcache(judge: Judge) -> None:
    judge_lives(judge)


@pytest.mark.clause("LIFE-3", function="prefill_attention")
def test_life_prefill_attention(judge: Judge) -> None:
    judge_lives(judge)


@pytest.mark.clause("LIFE-4", function="decode_attention")
def test_life_decode_attention(judge: Judge) -> None:
    judge_lives(judge)


@pytest.mark.clause("LIFE-5", function="BlockManager")
def test_life_prefix_hits(judge: Judge) -> None:
    judge_lives(judge)


@pytest.mark.clause("LIFE-6", function="BlockManager")
def test_life_tables(judge: Judge) -> None:
    judge_lives(judge)


@pytest.mark.clause("LIFE-7", function="BlockManager")
def test_life_shared_blocks(judge: Judge) -> None:
    judge_lives(judge)


@pytest.mark.clause("LIFE-8", function="BlockManager")
def test_life_of_the_pool(judge: Judge) -> None:
    judge_lives(judge)
