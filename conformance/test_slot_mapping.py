"""SLOT: where each token's KV goes."""

import functools

import pytest

from conformance.buffers import METADATA_LAYOUTS
from conformance.cases.sequences import (
    BLOCK_SIZES,
    MANY_SEQUENCES,
    NO_LIMIT,
    decodes,
    long_sequences,
    many_sequences,
    nobody_scheduled,
    prefills,
    with_empties,
)
from conformance.checks.batches import BatchChecks
from conformance.judge import Judge


def block_sizes(judge: Judge) -> list[int]:
    return judge.capabilities.allowed("block_sizes", BLOCK_SIZES)


def most(judge: Judge) -> int:
    return judge.capabilities.max_context or NO_LIMIT


@pytest.mark.clause("SLOT-1", function="prepare_prefill")
def test_slot_mapping_of_a_prefill(judge: Judge) -> None:
    sizes, longest = block_sizes(judge), most(judge)
    many = [many_sequences(sizes, MANY_SEQUENCES, most=longest), *long_sequences(sizes, most=longest)]
    judge.for_all(prefills(block_sizes(judge), most=most(judge)), BatchChecks(judge).prefill_slots, examples=120, explicit=many)


@pytest.mark.clause("SLOT-1", function="prepare_decode")
def test_slot_mapping_of_a_decode_step(judge: Judge) -> None:
    sizes, longest = block_sizes(judge), most(judge)
    many = [many_sequences(sizes, MANY_SEQUENCES, decode=True, most=longest), *long_sequences(sizes, decode=True, most=longest)]
    judge.for_all(decodes(block_sizes(judge), most=most(judge)), BatchChecks(judge).decode_slots, examples=120, explicit=many)


@pytest.mark.clause("SLOT-1", function="compute_slot_mapping")
def test_slot_mapping_from_tensors(judge: Judge) -> None:
    cases = prefills(block_sizes(judge), most=most(judge)).map(with_empties)
    sizes, longest = block_sizes(judge), most(judge)
    around = [with_empties(many_sequences(sizes, count, most=longest), around=True) for count in (2, MANY_SEQUENCES)]
    around += [*long_sequences(sizes, most=longest), nobody_scheduled(sizes, most=longest)]
    judge.for_all(cases, BatchChecks(judge).computed_slots, examples=80, explicit=around)
    for layout in METADATA_LAYOUTS[1:]:
        judge.for_each(around[:2], functools.partial(BatchChecks(judge).computed_slots, layout=layout))


@pytest.mark.clause("SLOT-2", function="prepare_prefill")
def test_slot_mapping_of_chunks(judge: Judge) -> None:
    judge.for_all(prefills(block_sizes(judge), hits=True, most=most(judge)), BatchChecks(judge).chunks, examples=80)


@pytest.mark.clause("SLOT-2", function="prepare_decode")
def test_slot_mapping_of_decode_equals_prefill(judge: Judge) -> None:
    judge.for_all(decodes(block_sizes(judge), most=most(judge)), BatchChecks(judge).decode_equals_prefill, examples=80)
