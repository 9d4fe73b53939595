"""SLOT: where each token's KV goes."""

import pytest

from conformance.cases.sequences import BLOCK_SIZES, NO_LIMIT, decodes, many_sequences, prefills, with_empties
from conformance.checks.batches import BatchChecks
from conformance.judge import Judge


def block_sizes(judge: Judge) -> list[int]:
    return judge.capabilities.allowed("block_sizes", BLOCK_SIZES)


def most(judge: Judge) -> int:
    return judge.capabilities.max_context or NO_LIMIT


@pytest.mark.clause("SLOT-1", function="prepare_prefill")
def test_slot_mapping_of_a_prefill(judge: Judge) -> None:
    many = [many_sequences(block_sizes(judge), 65, most=most(judge))]
    judge.for_all(prefills(block_sizes(judge), most=most(judge)), BatchChecks(judge).prefill_slots, examples=120, explicit=many)


@pytest.mark.clause("SLOT-1", function="prepare_decode")
def test_slot_mapping_of_a_decode_step(judge: Judge) -> None:
    many = [many_sequences(block_sizes(judge), 65, decode=True, most=most(judge))]
    judge.for_all(decodes(block_sizes(judge), most=most(judge)), BatchChecks(judge).decode_slots, examples=120, explicit=many)


@pytest.mark.clause("SLOT-1", function="compute_slot_mapping")
def test_slot_mapping_from_tensors(judge: Judge) -> None:
    cases = prefills(block_sizes(judge), most=most(judge)).map(with_empties)
    around = [with_empties(many_sequences(block_sizes(judge), count, most=most(judge)), around=True) for count in (2, 65)]
    judge.for_all(cases, BatchChecks(judge).computed_slots, examples=80, explicit=around)


@pytest.mark.clause("SLOT-2", function="prepare_prefill")
def test_slot_mapping_of_chunks(judge: Judge) -> None:
    judge.for_all(prefills(block_sizes(judge), hits=True, most=most(judge)), BatchChecks(judge).chunks, examples=80)


@pytest.mark.clause("SLOT-2", function="prepare_decode")
def test_slot_mapping_of_decode_equals_prefill(judge: Judge) -> None:
    judge.for_all(decodes(block_sizes(judge), most=most(judge)), BatchChecks(judge).decode_equals_prefill, examples=80)
