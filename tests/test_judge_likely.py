"""The line `likely` of a report: planted faults of the store, of batches, of logits and of scales are told by name."""

import functools
from typing import ClassVar

import pytest
import torch
from planted import judge_of

from conformance.cases.attention import AttentionCase, Limits, attention_cases
from conformance.cases.logits_values import corners, values_cases
from conformance.cases.sequences import decodes, prefills
from conformance.cases.stores import SKIPS, STRIDED_LAYOUTS, stores
from conformance.checks.batches import BatchChecks
from conformance.checks.likely import ReadSet, likely_cause
from conformance.checks.logits_values import check_values as check_logits_values
from conformance.checks.store import check_store
from conformance.checks.values import check_values
from conformance.clauses import CLAUSES
from conformance.findings import Broken
from conformance.implementation import load_implementation
from conformance.judge import Judge
from conformance.mutants.sound_attention import SoundAttention
from conformance.mutants.sound_batches import SoundBatches
from conformance.mutants.sound_logits import SoundLogits
from conformance.mutants.sound_store import SoundStore

SIZES = [4, 16, 1]

STORE = {  # mutant: (clause, how cases are drawn, what is told)
    "key_and_value_swapped": ("KV-1", {}, "key and value are swapped"),
    "heads_transposed": ("KV-1", {"head_shapes": ((3, 40),)}, "heads are transposed: "),
    "first_tile_of_the_row_only": ("KV-1", {"head_shapes": ((3, 40),)}, "only the first 64 of 120 elements of the row arrived"),
    "row_tail_past_a_thousand": ("KV-1", {"head_shapes": ((9, 128),)}, "only the first 1024 of 1152 elements of the row arrived"),
    "bits_through_float": ("KV-1", {}, "bits are not exact: "),
    "negative_zero_lost": ("KV-1", {}, "bits are not exact: -0.0 are lost"),
    "all_rows_to_the_first_slot": ("KV-1", {}, "another row lies here: row 1 of key, whose slot is "),
    "one_row_too_few": ("KV-1", {}, "the row was not written"),
    "row_stride_from_shape": ("KV-4", {"layouts": STRIDED_LAYOUTS}, "rows of key are read Hk * D = "),
    "minus_one_as_index": ("KV-3", {"skips": SKIPS[1:]}, "-1 is not skipped"),
}
BATCHES = {  # mutant: (clause, function, method, what is told)
    "decode_offset_of_length": ("SLOT-1", "prepare_decode", "decode_slots", "the offset is len % S"),
    "next_slot_is_previous_plus_one": ("SLOT-1", "prepare_decode", "decode_slots", "slot = previous slot + 1"),
    "first_block_always": ("SLOT-1", "prepare_prefill", "prefill_slots", "the table's first block is used"),
    "table_of_next_sequence": ("SLOT-1", "prepare_prefill", "prefill_slots", "the table row of sequence i + 1 is used"),
    "another_block_size_than_the_readers": ("SLOT-1", "prepare_prefill", "prefill_slots", "slots are computed with a block size of "),
    "slots_start_at_zero": ("SLOT-2", "prepare_prefill", "chunks", "num_cached_tokens is ignored"),
    "slots_in_sixteen_bits": ("SLOT-1", "compute_slot_mapping", "computed_slots", "slots are kept in 16 bits"),
    "last_partial_block_dropped": ("SLOT-1", "prepare_prefill", "prefill_slots", "rows from 0 on are not computed: they hold 0"),
    "ids_start_at_zero": ("BATCH-1", "prepare_prefill", "input_ids", "num_cached_tokens is ignored"),
    "token_zero_is_padding": ("BATCH-1", "prepare_prefill", "input_ids", "token 0 is taken for padding"),
    "positions_relative_to_chunk": ("BATCH-2", "prepare_prefill", "positions", "positions count from the chunk's start"),
    "keys_count_whole_prompt": ("BATCH-3", "prepare_prefill", "cu_seqlens", "the whole prompt is counted"),
    "max_seqlen_of_first_sequence": ("BATCH-4", "prepare_prefill", "max_seqlens", "it is the first sequence's"),
    "rows_without_hit_blank": ("BATCH-5", "prepare_prefill", "block_tables", "the row is left blank: its sequence has no cached tokens"),
    "table_padding_zero": ("BATCH-5", "prepare_prefill", "block_tables", "padding is 0, which is a block"),
    "tables_sorted": ("BATCH-5", "prepare_prefill", "block_tables", "block ids are sorted"),
    "context_without_newest": ("BATCH-6", "prepare_decode", "decode_step", "the newest token is not counted"),
    "decode_position_is_length": ("BATCH-6", "prepare_decode", "decode_step", "the position is len"),
}
LOGITS = {
    "logits_summed_in_bfloat16": "close, and beyond rounding",
    "float32_logits_in_tf32": "close, and beyond rounding",
    "hidden_size_in_whole_tiles": "only the first 992 of 1000 columns are read",
    "weight_rows_packed": "weight's rows are read 25 elements apart",
}


def likely_of(judge, cases, check):
    with pytest.raises(Broken) as caught:
        judge.for_all(cases, check, examples=200)
    return caught.value.finding.likely


def judge_of_mutant(name, clause, function):
    return Judge(load_implementation(f"conformance.mutants:{name}", torch.device("cpu")), CLAUSES[clause], function)


@pytest.mark.parametrize("name", STORE)
def test_store(name):
    clause, drawn, told = STORE[name]
    judge = judge_of_mutant(name, clause, "store_kvcache")
    assert likely_of(judge, stores(judge.capabilities, **drawn), functools.partial(check_store, judge)).startswith(told)


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    clause, function, method, told = BATCHES[name]
    judge = judge_of_mutant(name, clause, function)
    cases = decodes(SIZES) if function == "prepare_decode" else prefills(SIZES)
    assert told in likely_of(judge, cases, getattr(BatchChecks(judge), method))


@pytest.mark.parametrize("name", LOGITS)
def test_logits(name):
    judge = judge_of_mutant(name, "LOGIT-6", "last_token_logits")
    with pytest.raises(Broken) as caught:
        judge.for_each(corners(judge.capabilities), functools.partial(check_logits_values, judge))
    assert caught.value.finding.likely.startswith(LOGITS[name])


class HalfSums(SoundLogits):
    """A product split in two, whose parts are rounded to half precision before they are added: what torch lets cuBLAS do."""

    CAPABILITIES: ClassVar = {}

    def product(self, picked, weight):
        middle = picked.shape[1] // 2
        parts = [(p.float() @ w.float().T).to(picked.dtype) for p, w in zip(split(picked, middle), split(weight, middle), strict=True)]
        return (parts[0].float() + parts[1].float()).to(picked.dtype)


def split(tensor, middle):
    return tensor[:, :middle], tensor[:, middle:]


@pytest.mark.parametrize("stated", [{}, {"half_sums": "half"}], ids=str)
def test_sums_in_half_precision_hold_where_they_are_stated(monkeypatch, stated):
    monkeypatch.setattr(HalfSums, "CAPABILITIES", stated)
    judge = judge_of(HalfSums(), "LOGIT-6", "last_token_logits")
    if stated:
        judge.for_all(values_cases(judge.capabilities), functools.partial(check_logits_values, judge), examples=60)
        assert max(judge.record.worst_budget.values()) <= 1
    else:
        assert "close, and beyond rounding" in likely_of(judge, values_cases(judge.capabilities), functools.partial(check_logits_values, judge))


class AnotherSlot(SoundStore):
    def slot_of_row(self, slots, t):
        return slots[t] ^ 1 if slots[t] ^ 1 not in slots else slots[t]


class AnotherScale(SoundAttention):
    def scores(self, q, keys, scale):
        return super().scores(q, keys, 1.7 * scale)


def test_a_row_in_another_slot_of_its_block_is_told():
    judge = judge_of(AnotherSlot(), "KV-1", "store_kvcache")
    told = likely_of(judge, stores(judge.capabilities, rows=(1, 3)), functools.partial(check_store, judge))
    assert told.startswith("the row lies in slot ")


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_a_scale_of_no_known_formula_is_recovered(decode):
    judge = judge_of(AnotherScale(), "DEC-2", "decode_attention" if decode else "prefill_attention")
    cases = attention_cases(judge.capabilities, decode=decode, limits=Limits(context=40, sequences=2, queries=5))
    told = likely_of(judge, cases, lambda case: check_values(judge, case, 4.0))
    assert told.startswith("fits scale ") and ": 1.7 times as much, " in told, told


def test_right_slots_fit_no_wrong_formula():
    judge = judge_of(SoundBatches(), "SLOT-1", "prepare_prefill")
    judge.for_all(prefills(SIZES), BatchChecks(judge).prefill_slots, examples=50)


@pytest.mark.parametrize(
    ("visible", "told"),
    [(257, "the causal mask is one off: a row does not see its own position, or a last block or tile is skipped"),
     (101, "the causal mask is one off: a row does not see its own position, or a last block is skipped"),
     (259, "the causal mask is one off: a row does not see its own position")],
)  # fmt: skip
def test_a_position_that_opens_a_block_or_tile_may_be_skipped_with_it(visible, told):
    case = AttentionCase(False, torch.float16, 4, 1, 1, 16, (1,), (visible,))
    newest = case.slots[0][visible - 1]
    assert likely_cause(ReadSet(case, 0, [newest], [], [])) == told
