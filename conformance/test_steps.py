"""STEP: store, then attend, step after step over one cache; and batches of real requests."""

import functools

import pytest

from conformance.cases.growing import growing
from conformance.cases.requests import read_requests
from conformance.checks.growing import check_growing
from conformance.checks.request_engine import Engine
from conformance.checks.requests import RequestReplay
from conformance.findings import Refused
from conformance.judge import Judge

REQUESTS = {"quick": 24, "default": 200, "thorough": 200}
REQUESTS_ON_A_CPU = {**REQUESTS, "default": 120}


@pytest.mark.clause("STEP-1", function=("store_kvcache", "decode_attention"))
def test_step_store_then_decode(judge: Judge) -> None:
    judge.for_all(growing(judge.capabilities), functools.partial(check_growing, judge), examples=25)


@pytest.mark.clause("STEP-2", function=("prefill_attention", "decode_attention"), any_of=True)
def test_step_batches_of_real_requests(judge: Judge) -> None:
    """The 512-token prompt blocks of the trace are scaled down: to a small block of the cache, or to a part of a large one."""
    block_size = judge.capabilities.allowed("block_sizes", (16, 64, 256) if judge.is_cuda else (4, 16, 8))[0]
    tokens_per_hash = max(min(block_size, 64), 64 // block_size * block_size) if judge.is_cuda else min(block_size, 16)
    requests = read_requests(tokens_per_hash, (REQUESTS if judge.is_cuda else REQUESTS_ON_A_CPU)[judge.effort])
    largest = max(request.num_tokens + request.num_generated for request in requests)
    largest = min(largest, judge.capabilities.max_context or largest)  # a longer one is cut
    engine = Engine(
        dtype=judge.capabilities.dtypes[0],
        block_size=block_size,
        num_blocks=(largest + 40 * tokens_per_hash) // block_size + 1 + judge.capabilities.reserved_blocks,  # too few for all that run at a time
        num_kv_heads=2 if judge.is_cuda else 1,
        group_size=judge.capabilities.allowed("group_sizes", (2,))[0],
        head_dim=judge.capabilities.allowed("head_dims", (64, 128) if judge.is_cuda else (16, 64))[0],
        max_batch=32,
        chunk=1027 if judge.is_cuda else 96 * tokens_per_hash + 3,  # ends inside a block
        rows_judged=8,
    )
    replay = RequestReplay(judge, engine, tokens_per_hash)
    try:
        replay.run(requests)
    except Refused as refusal:
        judge.record.examples += 1
        judge.record.refusals[str(refusal)] = 1
    tally = replay.tally
    judge.record.notes.append(
        f"{tally.requests} of {len(requests)} requests, {tally.hit_rate:.0%} of their prompt tokens were prefix hits, {tally.preemptions} preemptions"
    )
