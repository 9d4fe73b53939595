"""Lengths of real batches, worked by hand, and the sums that benchmarks take from them."""

import pytest
import torch

import reference
from benchmarks import judging, plain_python, trace
from benchmarks.attention_calls import prefill_inputs
from benchmarks.cases import AttentionCase, Model, small_batch
from conformance.cases.requests import Request
from reference import prepare_decode, prepare_prefill
from reference.records import SequenceState


def test_prefix_hits_are_whole_blocks_and_never_the_whole_prompt():
    request = Request((7, 8, 9), 12)
    assert [trace.cached_tokens(request, seen, 4) for seen in (set(), {8, 9}, {7}, {7, 8}, {7, 8, 9})] == [0, 0, 4, 8, 8]


def test_the_middle_chunk():
    """Of 20 tokens behind 4 cached ones: chunks [4, 9) [9, 14) [14, 19) [19, 20)."""
    assert trace.middle_chunk(Request((1,), 20), 4, 5) == (14, 19)
    assert trace.middle_chunk(Request((1,), 20), 16, 5) == (16, 20)
    assert trace.middle_chunk(Request((1,), 20), 10, 5) == (15, 20)


def test_batches_of_the_trace_are_those_of_the_issue():
    decoding, chunks, mixed = trace.decoding(64), trace.prefilling(16, 2048), trace.mixed(4, 2048, 60)
    assert len(decoding.k_lens) == 64 and set(decoding.q_lens) == {1} and len(set(decoding.k_lens)) > 60
    assert all(1 <= q <= 2048 and q <= k for q, k in zip(*chunks)) and sum(q < k for q, k in zip(*chunks)) > 8
    assert mixed.q_lens[:4] == chunks.q_lens[:4] and mixed.q_lens[4:] == (1,) * 60


def test_pairs_bytes_and_flops_of_a_case():
    """2 queries over 5 keys see 4 + 5, 1 query over 3 sees 3."""
    case = AttentionCase((2, 1), (5, 3), 4, Model(4, 2, 8), torch.float32, real_size=False, batch="two")
    assert (case.visible_pairs, case.num_tokens, case.name) == (12, 3, "two-S4-4/2x8-fp32")
    assert case.bytes_moved == 4 * 8 * (2 * 8 * 2 + 2 * 3 * 4) and case.flops == 4 * 12 * 4 * 8


def test_a_case_judges_its_sequences_by_their_own_lengths():
    """Negative control: rows of another sequence are not taken for right."""
    inputs = prefill_inputs(small_batch("two", trace.Lengths((3, 2), (9, 4))))
    out = inputs.call(reference)
    inputs.judge(out, "the reference")
    with pytest.raises(AssertionError, match="times the error budget"):
        inputs.judge(out.flip(0), "reversed")


def test_plain_python_prepares_as_the_reference_does():
    sequences = [SequenceState([5, 6, 7], 0, 3, [2]), SequenceState([1, 2, 3, 4, 8, 9, 9], 4, 2, [7, 9])]
    for ours, theirs in (
        (plain_python.prepare_prefill(sequences, 4), prepare_prefill(sequences, 4)),
        (plain_python.prepare_decode(sequences, 4), prepare_decode(sequences, 4)),
    ):
        for field, expected in zip(theirs._fields, theirs):
            actual = getattr(ours, field)
            assert torch.equal(actual, expected) and actual.dtype == expected.dtype if torch.is_tensor(expected) else actual == expected


def test_the_cost_of_judging_is_told(tmp_path):
    rows = list(judging.oracle_rows((40, 80)))
    assert [row[:3] for row in rows] == [["1", "40", "40"], ["1", "80", "80"], ["16", "40", "520"], ["16", "80", "1,160"]]
    assert {len(row) for row in rows} == {12}
    junit = tmp_path / "suite.xml"
    junit.write_text(
        '<testsuites><testsuite><testcase classname="conformance.test_a" time="1.5"/><testcase classname="conformance.test_b" time="3"/>'
        '<testcase classname="conformance.test_a" time="0.5"/></testsuite></testsuites>'
    )
    assert judging.seconds_by_file(junit) == {"conformance/test_b.py": (1, 3.0), "conformance/test_a.py": (2, 2.0)}
