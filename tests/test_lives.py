"""The judge of lives: honest implementations live long under the state machine, a planted fault ends in a few readable lines."""

import pytest
import torch

import reference
from conformance.capabilities import Capabilities, read_capabilities
from conformance.cases.lives import Admit, Decode, Finish, Fork, LifeCase, Pool, Preempt, Prefill, Resume
from conformance.cases.requests import read_requests
from conformance.checks.budget import exact_and_limit, exact_and_limit_of_row
from conformance.checks.contents import KEY, QUERY, VALUE, names_of, next_name, rows_of
from conformance.checks.lives import EVERY_CLAUSE, Life, check_life
from conformance.checks.request_engine import Engine
from conformance.checks.requests import RequestReplay
from conformance.clauses import CLAUSES
from conformance.findings import Broken
from conformance.implementation import Implementation
from conformance.judge import Judge
from conformance.lives import broken_life
from conformance.mutants import all_mutants
from conformance.mutants.sound_kernels import SoundKernels

CPU = torch.device("cpu")
WHOLE = Prefill((100_000,))
POOL = Pool(torch.float32, block_size=4, num_blocks=6)
MUTANTS = all_mutants()


def judge_of(target, clause="LIFE-3"):
    return Judge(Implementation("planted", target, CPU), CLAUSES[clause], "prefill_attention")


def broken_by(target, clause, program, pool=POOL):
    """The finding of a program that must break."""
    with pytest.raises(Broken) as told:
        check_life(judge_of(target, clause), LifeCase(pool, program))
    return told.value.finding


# --- contents ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_are_exact_in_every_dtype_and_unlike_each_other(dtype):
    names = torch.arange(200) * 7
    key, value, query = (rows_of(names, 2, 16, dtype, kind) for kind in (KEY, VALUE, QUERY))
    assert key.dtype == dtype and key.shape == (200, 2, 16)
    assert torch.equal(key.double() * 64, (key.double() * 64).round()) and key.abs().max() <= 2
    assert torch.equal(key.float(), rows_of(names, 2, 16, torch.float32, KEY))
    flat = torch.cat([key, value, query]).flatten(1).float()
    assert len(torch.unique(flat, dim=0)) == 600
    assert abs(float(flat.mean())) < 0.05 and 1.0 < float(flat.std()) < 1.3


def test_rows_do_not_depend_on_who_else_is_asked_for():
    names = torch.arange(50) + 2**50
    assert torch.equal(rows_of(names, 3, 8, torch.float32, KEY)[20:30], rows_of(names[20:30], 3, 8, torch.float32, KEY))


def test_a_name_stands_for_everything_before_it():
    assert names_of([0, 0, 1])[:2] == names_of([0, 0])
    assert len({*names_of([0, 0, 0, 0]), *names_of([1, 0, 0, 0]), *names_of([0, 1, 0, 0])}) == 4 + 4 + 3
    assert 0 <= next_name(2**62 - 1, 5) < 2**62


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_budget_of_a_row_is_the_same_in_chunks(dtype):
    names = torch.arange(77)
    q = rows_of(names[-1:], 4, 16, dtype, QUERY)
    keys, values = rows_of(names, 2, 16, dtype, KEY), rows_of(names, 2, 16, dtype, VALUE)
    want, limit = exact_and_limit(q, keys, values, torch.tensor([77]), 0.25, dtype)
    for chunk in (1, 10, 77, 1000):
        exact, bound = exact_and_limit_of_row(q[0], lambda a, b: (keys[a:b], values[a:b]), 77, 0.25, dtype, chunk=chunk)
        torch.testing.assert_close(exact, want[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(bound, limit[0], rtol=1e-9, atol=0)


# --- lives ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [reference, SoundKernels()], ids=["reference", "sound"])
def test_honest_implementations_live(target):
    """200 lives of 50 steps are `python -m conformance.lives`; here are some of them."""
    report, counted = broken_life(Implementation("honest", target, CPU), runs=30, steps=50, first_seed=3)
    assert report == "" and int(counted.split()[0]) >= 30


@pytest.mark.parametrize("name", ["stale_hash_after_reuse", "freed_while_shared", "row_that_was_written_before_is_skipped"])
def test_the_state_machine_finds_planted_faults(name):
    report, _ = broken_life(Implementation(name, MUTANTS[name].implementation(), CPU), runs=100, steps=50, first_seed=0)
    assert report.startswith(f"FAIL  {MUTANTS[name].clause}")
    assert "life" in report and len(report.splitlines()) < 60


def test_what_happens_is_told():
    life = Life(judge_of(reference), POOL, clauses=EVERY_CLAUSE)
    for operation in (Admit(5), WHOLE, Admit(9, (8,)), Prefill((2,)), Decode(), Fork(0), Decode(), Preempt(1), Finish(0), Resume(0), Decode()):
        life.do(operation)
    told = "\n".join(life.told)
    for words in (
        "admit sequence 0: 5 tokens, all 0; 0 cached",
        "admit sequence 1: 9 tokens, all 0, but for 1 at [8]; 4 cached in blocks",
        "fork sequence 0 into sequence 2",
        "copy block",
        "preempt sequence 1",
        "finish sequence 0",
        "resume sequence 1: 9 tokens",
    ):
        assert words in told, told


def test_a_pool_that_is_too_small_preempts():
    life = Life(judge_of(reference), Pool(torch.float32, block_size=2, num_blocks=2), clauses=EVERY_CLAUSE)
    for operation in (Admit(4), WHOLE, Decode(), Admit(1), WHOLE):
        life.do(operation)
    assert "preempt sequence 0: the pool is full" in life.told


@pytest.mark.parametrize(
    ("name", "program", "words"),
    [
        ("full_hit_leaves_no_query", (Admit(4), WHOLE, Admit(4)), "leaves no token to run"),
        ("hash_without_parent", (Admit(9), WHOLE, Admit(9, (0,)), WHOLE, Admit(9, (0,))), "leaves out its parent"),
        ("hash_without_last_token", (Admit(5), WHOLE, Admit(5, (3,))), "leaves out a token"),
        ("partial_block_published", (Admit(5), Prefill((2,)), Admit(5)), "before it is full"),
        ("count_taken_before_the_table_grew", (Admit(9), WHOLE), "before the table grew"),
        ("shared_block_written_in_place", (Admit(2), WHOLE, Fork(0), Decode()), "written in place"),
        ("published_blocks_leak", (Admit(24), WHOLE, Finish(0), Admit(24, (0,)), WHOLE), "do not come back"),
    ],
)
def test_engines_faults_are_told_by_their_cause(name, program, words):
    finding = broken_by(MUTANTS[name].implementation(), MUTANTS[name].clause, program)
    assert words in finding.likely, finding
    assert finding.facts[-1][0] == "life" and finding.facts[-1][1].startswith("admit sequence 0")
    assert finding.clause == MUTANTS[name].clause and "BlockManager(6, 4)" in finding.script


def test_a_stage_is_blamed_for_its_own_fault():
    """A wrong batch is LIFE-1's: while attention is judged it is noted, and attention gets the right one."""
    judge = judge_of(type("Both", (type(MUTANTS["table_of_before_the_copy"].implementation()), type(MUTANTS["tiles_race"].implementation())), {})())
    check_life(judge, LifeCase(POOL, (Admit(5), WHOLE, Decode(), Fork(0), Decode(), Decode())))
    assert list(judge.record.side_findings) == ["LIFE-1"] and "block_tables" in judge.record.side_findings["LIFE-1"]


# --- claims, and requests ---------------------------------------------------------------------------------------------------------------


def test_claims_may_be_made_of_some_functions():
    everywhere = read_capabilities({"claims": ("deterministic",)})
    some = read_capabilities({"claims": {"deterministic": ("sample",), "cuda_graph": ["store_kvcache"]}})
    assert everywhere.claims_for("deterministic", "sample") and everywhere.claims_for("deterministic", "decode_attention")
    assert some.claims_for("deterministic", "sample") and not some.claims_for("deterministic", "decode_attention")
    assert some.claims == ("deterministic", "cuda_graph") and not some.claims_for("nan_tail", "decode_attention")
    assert not Capabilities().claims_for("deterministic", "sample")
    with pytest.raises(ValueError, match="claims 'cuda_graph' of 'sample', it is judged of store_kvcache, decode_attention"):
        read_capabilities({"claims": {"cuda_graph": ("sample",)}})


def test_reserved_blocks_are_a_number_of_blocks():
    assert read_capabilities({"reserved_blocks": 2}).reserved_blocks == 2 and Capabilities().reserved_blocks == 0
    for bad in (-1, 1.5, "one", True, 65):
        with pytest.raises(ValueError, match=f"says reserved_blocks {bad!r}, it must be a whole number of blocks from 0 to 64"):
            read_capabilities({"reserved_blocks": bad})


def test_the_trace_is_whole():
    requests = read_requests(512)
    assert len(requests) == 1000 and max(request.num_tokens for request in requests) > 100_000
    assert all(len(request.hash_ids) == -(-request.num_tokens // 512) for request in requests)


def engine(**changes):
    sizes = dict(dtype=torch.float32, block_size=4, num_blocks=300, num_kv_heads=1, group_size=2, head_dim=16, max_batch=8, chunk=103)
    return Engine(**{**sizes, **changes})


def test_requests_finish_in_a_pool_that_is_too_small_for_them():
    requests = read_requests(4, limit=30)
    judge = judge_of(SoundKernels(), "STEP-2")
    tally = RequestReplay(judge, engine(num_blocks=max(r.num_tokens + r.num_generated for r in requests) // 4 + 2), 4).run(requests)
    assert tally.requests == 30 and tally.preemptions > 0 and tally.rows_judged > 50 and tally.images >= 1
    assert tally.prompt_tokens == sum(request.num_tokens for request in requests)
    assert tally.decoded_tokens >= sum(request.num_generated for request in requests) - tally.preemptions


@pytest.mark.parametrize("name", ["freed_while_shared", "newest_token_dropped", "next_slot_is_previous_plus_one"])
def test_planted_faults_are_found_in_the_trace(name):
    requests = read_requests(4, limit=60)
    largest = max(request.num_tokens + request.num_generated for request in requests)
    replay = RequestReplay(judge_of(MUTANTS[name].implementation(), "STEP-2"), engine(num_blocks=largest // 4 + 2, rows_judged=8), 4)
    with pytest.raises(Broken) as told:
        replay.run(requests)
    assert "request " in str(told.value) and "physical block" in str(told.value)


@pytest.mark.parametrize("name", ["newest_token_dropped", "second_query_tile_of_a_later_sequence_is_off"])
def test_a_wrong_row_of_the_trace_is_told_with_its_call(name):
    """The function, the cache's sizes and the step's lengths; and the call of that row, which a sound implementation gets right."""
    requests = read_requests(4, limit=60)
    largest = max(request.num_tokens + request.num_generated for request in requests)
    mutant = MUTANTS[name].implementation()
    replay = RequestReplay(judge_of(mutant, "STEP-2"), engine(num_blocks=largest // 4 + 40, chunk=387, max_batch=32, rows_judged=8), 4)
    with pytest.raises(Broken) as told:
        replay.run(requests)
    finding = told.value.finding
    function = "decode_attention" if MUTANTS[name].clause == "DEC-1" else "prefill_attention"
    assert finding.case.headline("it", "cpu").startswith(f"it.{function}   float32 · S 4 · Hk 1 · G 2 · D 16")
    facts, call = dict(finding.facts), finding.call
    assert facts["row"].split()[1] == "of" and facts["context_lens"].startswith("[")
    assert ("query_lens" in facts) == (function == "prefill_attention")
    for implementation, holds in ((mutant, False), (SoundKernels(), True)):
        out = getattr(implementation, call.function)(*call.args, **call.kwargs)
        assert bool(((out - call.want).abs() <= call.limit).all()) is holds
