"""A replay script, run by itself in another process, names the wrong element that the report names, and finds a sound kernel right."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from planted import judge_of

from conformance.cases.attention import Limits, attention_cases
from conformance.cases.growing import growing
from conformance.cases.lives import Admit, Finish, LifeCase, Pool, Prefill
from conformance.cases.logits import poisoned
from conformance.cases.logits_values import values_cases
from conformance.cases.races import RaceCase
from conformance.cases.sequences import decodes, prefills
from conformance.cases.stores import SKIPS, STRIDED_LAYOUTS, stores
from conformance.checks.batches import BatchChecks
from conformance.checks.empties import check_empties, check_unchanged
from conformance.checks.growing import check_growing
from conformance.checks.influence import check_chunks, check_neighbours, check_surroundings
from conformance.checks.lives import check_life
from conformance.checks.logits import own_rows
from conformance.checks.logits_values import check_values as check_logits_values
from conformance.checks.read_sets import check_pairing, check_read_set
from conformance.checks.sampling_corners import CornerChecks
from conformance.checks.store import check_store
from conformance.checks.values import check_values
from conformance.clauses import CLAUSES
from conformance.findings import Broken
from conformance.implementation import load_implementation
from conformance.judge import Judge
from conformance.mutants.steps import SoundSteps
from conformance.replay import claims_of, write_replay
from conformance.verdicts import render_finding

ROOT = Path(__file__).resolve().parent.parent
SMALL = Limits(context=70, sequences=2, queries=12, elements=20_000)
BLOCK_SIZES = [4, 16, 1]


def attention(judge, check, *more, **drawn):
    decode = judge.function == "decode_attention"
    cases = attention_cases(judge.capabilities, decode=decode, limits=SMALL, kv_heads=(1, 2), **drawn)
    return cases, lambda case: check(judge, case, *more)


def store(judge, **drawn):
    return stores(judge.capabilities, **drawn), functools.partial(check_store, judge)


def batch(judge, method):
    cases = decodes(BLOCK_SIZES) if judge.function == "prepare_decode" else prefills(BLOCK_SIZES)
    return cases, getattr(BatchChecks(judge), method)


def grown(judge):
    return growing(judge.capabilities), functools.partial(check_growing, judge)


JUDGED = [  # mutant, clause, function, (cases, check) of a judge
    ("newest_token_dropped", "DEC-1", "decode_attention", lambda judge: attention(judge, check_read_set)),
    ("causal_top_left", "PRE-1", "prefill_attention", lambda judge: attention(judge, check_read_set)),
    ("value_from_neighbouring_slot", "DEC-1", "decode_attention", lambda judge: attention(judge, check_pairing)),
    ("empty_row_spreads", "DEC-8", "decode_attention", lambda judge: attention(judge, check_empties, empties=True, min_sequences=2)),
    ("scale_missing", "DEC-2", "decode_attention", lambda judge: attention(judge, check_values, 4.0)),
    ("decode_scores_in_half", "DEC-2", "decode_attention", lambda judge: attention(judge, check_values, 16.0)),
    ("heads_transposed", "KV-1", "store_kvcache", lambda judge: store(judge)),
    ("minus_one_as_index", "KV-3", "store_kvcache", lambda judge: store(judge, skips=SKIPS[1:])),
    ("row_stride_from_shape", "KV-4", "store_kvcache", lambda judge: store(judge, layouts=STRIDED_LAYOUTS)),
    ("block_stride_from_shape", "KV-4", "store_kvcache", lambda judge: store(judge, layouts=STRIDED_LAYOUTS)),
    ("int64_mapping_read_as_int32", "KV-5", "store_kvcache", lambda judge: store(judge, index_dtypes=(torch.int64,))),
    ("first_block_always", "SLOT-1", "prepare_prefill", lambda judge: batch(judge, "prefill_slots")),
    ("decode_offset_of_length", "SLOT-1", "prepare_decode", lambda judge: batch(judge, "decode_slots")),
    ("slots_as_int64", "SLOT-1", "compute_slot_mapping", lambda judge: batch(judge, "computed_slots")),
    ("max_seqlen_of_first_sequence", "BATCH-4", "prepare_prefill", lambda judge: batch(judge, "max_seqlens")),
    ("tables_only_if_all_hit", "BATCH-5", "prepare_prefill", lambda judge: batch(judge, "block_tables")),
    ("slots_start_at_zero", "SLOT-2", "prepare_prefill", lambda judge: batch(judge, "chunks")),
    ("rows_picked_by_a_product_with_zeros", "LOGIT-3", "last_token_logits",
     lambda judge: (poisoned(judge.capabilities), functools.partial(own_rows, judge))),
    ("logits_summed_in_bfloat16", "LOGIT-6", "last_token_logits",
     lambda judge: (values_cases(judge.capabilities), functools.partial(check_logits_values, judge))),
    ("lone_sequence_without_scale", "DEC-5", "decode_attention", lambda judge: attention(judge, check_neighbours, min_sequences=2)),
    ("batch_without_scale", "DEC-5", "decode_attention", lambda judge: attention(judge, check_neighbours, min_sequences=2)),
    ("batch_without_scale", "PRE-3", "prefill_attention", lambda judge: attention(judge, check_surroundings, paged=True, min_sequences=2)),
    ("second_chunk_misaligned", "PRE-4", "prefill_attention", lambda judge: attention(judge, check_chunks, 7, paged=True)),
    ("store_is_queued", "STEP-1", "decode_attention", grown),
    ("scale_missing", "STEP-1", "decode_attention", grown),
    ("newest_dropped_when_it_opens_a_block", "STEP-1", "decode_attention", grown),
]


def failure(name, clause, function, how):
    """(finding, implementation) of the smallest case that breaks the clause."""
    implementation = load_implementation(f"conformance.mutants:{name}", torch.device("cpu"))
    judge = Judge(implementation, CLAUSES[clause], function)
    cases, check = how(judge)
    with pytest.raises(Broken) as caught:
        judge.for_all(cases, check, examples=100)
    return caught.value.finding, implementation


def run(script, cwd, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)


def numbers(text):
    return [float(number) for number in re.findall(r"nan|-?inf|-?\d+\.?\d*(?:e[-+]\d+)?", text)]


def told_by(finding):
    """The first wrong element as the report has it, in the words of the script."""
    facts = dict(finding.facts)
    if "bits" in facts:
        return facts["bits"]
    if "got" in facts:
        return f"got {facts['got']}, want {facts['want'].split()[0]}"
    label = next(label for label, text in finding.facts if text.startswith(("is ", "has ")))
    return label.replace("out[", "result[")


@pytest.mark.parametrize(("name", "clause", "function", "how"), JUDGED, ids=[f"{entry[1]} {entry[0]}" for entry in JUDGED])
def test_a_replay_names_the_element_that_the_report_names(tmp_path, name, clause, function, how):
    finding, implementation = failure(name, clause, function, how)
    report = render_finding(CLAUSES[clause], finding, implementation.name, "cpu", function)
    line = write_replay(CLAUSES[clause], finding, report, implementation, tmp_path)
    script = next(tmp_path.glob("*.py"))
    assert line.startswith(f"python {script}") and re.fullmatch(rf"{clause}-[0-9a-f]{{4}}\.py", script.name)
    assert "conformance" not in re.sub(r"(?s)\A\"\"\".*?\"\"\"|'?conformance\.mutants:\w+'?", "", script.read_text())
    wrong, right = run(script, tmp_path), run(script, tmp_path, "conformance.mutants:sound")
    assert (wrong.returncode, right.returncode) == (1, 0), (wrong, right)
    assert told_by(finding) in wrong.stdout
    assert "\nwrong: " in "\n" + wrong.stdout and right.stdout.startswith("right: ")
    for label, text in finding.facts:  # the same numbers, where the report gives got, want and limit in one line
        if label.startswith("out["):
            got, want, limit = numbers(text)
            told = numbers(wrong.stdout.splitlines()[0].split(":", 1)[1])
            assert told[:2] == pytest.approx([got, want], rel=1e-5, nan_ok=True) and told[2] == pytest.approx(limit, rel=5e-2)


@pytest.mark.parametrize(("name", "clause", "function"), [
    ("decode_output_buffer_kept", "DEC-9", "decode_attention"), ("prefill_output_buffer_kept", "PRE-9", "prefill_attention"),
])  # fmt: skip
def test_a_result_that_a_later_call_overwrites_is_replayed_by_two_calls(tmp_path, name, clause, function):
    def twice(judge):
        cases, _ = attention(judge, check_unchanged)
        return st.tuples(cases, cases), lambda pair: check_unchanged(judge, *pair)

    finding, implementation = failure(name, clause, function, twice)
    write_replay(CLAUSES[clause], finding, "", implementation, tmp_path)
    script = next(tmp_path.glob("*.py"))
    wrong, right = run(script, tmp_path), run(script, tmp_path, "conformance.mutants:sound")
    assert (wrong.returncode, right.returncode) == (1, 0), (wrong, right)
    assert re.match(r"result\[\d+, \d+, \d+\]: was \S+, is \S+ after later calls\n", wrong.stdout), wrong.stdout


def test_answers_of_a_block_manager_are_asked_for_again(tmp_path):
    """The same answers are wrong again; of others the script says that it cannot tell."""
    implementation = load_implementation("conformance.mutants:published_blocks_leak", torch.device("cpu"))
    pool, whole = Pool(torch.float32, block_size=4, num_blocks=6), Prefill((100_000,))
    with pytest.raises(Broken) as caught:
        check_life(Judge(implementation, CLAUSES["LIFE-8"], "BlockManager"), LifeCase(pool, (Admit(24), whole, Finish(0), Admit(24, (0,)), whole)))
    write_replay(CLAUSES["LIFE-8"], caught.value.finding, "", implementation, tmp_path)
    script = next(tmp_path.glob("*.py"))
    wrong, right = run(script, tmp_path), run(script, tmp_path, "conformance.mutants:sound")
    assert (wrong.returncode, right.returncode) == (1, 2), (wrong, right)
    assert "wrong: every answer is as it was reported" in wrong.stdout and "this script cannot tell, the suite can" in right.stdout
    assert "reported: None" in right.stdout


def test_a_race_with_given_noise_is_judged_again(tmp_path):
    implementation = load_implementation("conformance.mutants:noise_times_p", torch.device("cpu"))
    judge = Judge(implementation, CLAUSES["SAMPLE-4"], "sample")
    with pytest.raises(Broken) as caught:
        judge.for_each([RaceCase(20, 17, seed=1)], CornerChecks(judge).race)
    write_replay(CLAUSES["SAMPLE-4"], caught.value.finding, "", implementation, tmp_path)
    script = next(tmp_path.glob("*.py"))
    wrong, right = run(script, tmp_path), run(script, tmp_path, "conformance.mutants:sound")
    assert (wrong.returncode, right.returncode) == (1, 0), (wrong, right)


class OverwritesTheFirstSlot(SoundSteps):
    """A store of one row writes it over the row that was stored first, too."""

    def write(self, cache, block, offset, row):
        cache[block, offset] = row
        first = self.__dict__.setdefault("first", {}).setdefault(cache.data_ptr(), (block, offset))
        if len(self.mapping) == 1:
            cache[first] = row


def test_a_slot_that_a_later_step_overwrote_is_named():
    judge = judge_of(OverwritesTheFirstSlot(), "STEP-1")
    cases, check = grown(judge)
    with pytest.raises(Broken) as caught:
        judge.for_all(cases, check, examples=40)
    assert re.fullmatch(r"slot \d+ does not hold the key of position 0 \(1 of \d+ positions are wrong\)", dict(caught.value.finding.facts)["cache"])
    assert "overwritten by a later step" in caught.value.finding.likely


def test_a_user_s_file_is_found_from_the_folder_that_the_suite_ran_in(tmp_path, monkeypatch):
    (tmp_path / "helper_of_the_user.py").write_text("HEADS = 1\n")
    (tmp_path / "kernels.py").write_text(
        "import helper_of_the_user\n\n"
        "def store_kvcache(key, value, k_cache, v_cache, slot_mapping):\n    k_cache.fill_(1)\n"
    )
    monkeypatch.chdir(tmp_path)
    implementation = load_implementation("kernels.py", torch.device("cpu"))
    judge = Judge(implementation, CLAUSES["KV-2"], "store_kvcache")
    with pytest.raises(Broken) as caught:
        judge.for_all(*store(judge), examples=5)
    write_replay(CLAUSES["KV-2"], caught.value.finding, "the report", implementation, Path(".whichslot"))
    ran = run(next(Path(".whichslot").glob("*.py")), tmp_path)
    assert ran.returncode == 1 and "k_cache[0, 0, 0, 0]: bits are" in ran.stdout, ran


def test_what_cannot_be_replayed_is_said(tmp_path):
    finding, implementation = failure(*JUDGED[0])
    finding.call = None
    line = write_replay(CLAUSES["DEC-1"], finding, "", implementation, tmp_path)
    assert line == "no script: the failure is no single call of the implementation"
    finding, implementation = failure(*JUDGED[0])
    finding.call.kwargs["scale"] = object()
    line = write_replay(CLAUSES["DEC-1"], finding, "", implementation, tmp_path)
    assert line == "no script: scale is a object, which no script can hold"
    finding, implementation = failure(*JUDGED[0])
    finding.call.want = torch.rand(300, 1, 300, dtype=torch.float64)
    finding.call.limit = 0.0
    line = write_replay(CLAUSES["DEC-1"], finding, "", implementation, tmp_path)
    assert re.fullmatch(r"no script: it would take \d+ kB, 200 are the most", line)
    assert list(tmp_path.iterdir()) == []


def test_claims_are_read_from_the_facts():
    facts = [
        ("slot_mapping[3]", "is 5, it must be 7  (sequence 0)"),
        ("block_tables[0, 2]", "is 4, it must be -1 (padding)"),
        ("max_seqlen_q", "is 3, it must be 4"),
        ("slot_mapping", "has dtype torch.int64, the contract says torch.int32"),
        ("input_ids", "has shape (3,), it must be (4,)"),
        ("block_tables", "is a tensor although no sequence has cached tokens, it must be None"),
        ("split at", "3 of 7 tokens"),
        ("returned", "a list, the contract says a tensor of shape (1, 1, 16)"),
        ("returned", "shape (1, 16), the contract says (1, 1, 16)"),
        ("returned", "dtype torch.float64, q has torch.float16"),
        ("returned", "a Tensor, the contract says None: the caches are written in place"),
    ]
    assert claims_of(facts) == [
        ("slot_mapping", (3,), "7"),
        ("block_tables", (0, 2), "-1"),
        ("max_seqlen_q", "value", "4"),
        ("slot_mapping", "dtype", "torch.int32"),
        ("input_ids", "shape", "(4,)"),
        ("block_tables", "type", "NoneType"),
        ("result", "type", "Tensor"),
        ("result", "shape", "(1, 1, 16)"),
        ("result", "dtype", "torch.float16"),
        ("result", "type", "NoneType"),
    ]
