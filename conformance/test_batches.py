"""BATCH: the other tensors of a prefill and of a decode step."""

import pytest

from conformance.cases.sequences import (
    BLOCK_SIZES,
    MANY_SEQUENCES,
    NO_LIMIT,
    SequencesCase,
    decodes,
    long_sequences,
    many_sequences,
    prefills,
    warm_ups,
    wide_tables,
)
from conformance.checks.batches import BatchChecks
from conformance.judge import Judge


def block_sizes(judge: Judge) -> list[int]:
    return judge.capabilities.allowed("block_sizes", BLOCK_SIZES)


def most(judge: Judge) -> int:
    return judge.capabilities.max_context or NO_LIMIT


def wide_prefills(judge: Judge) -> list[SequencesCase]:
    sizes, longest = block_sizes(judge), most(judge)
    return [many_sequences(sizes, MANY_SEQUENCES, most=longest), *wide_tables(sizes, most=longest), *long_sequences(sizes, most=longest)]


@pytest.mark.clause("BATCH-1", function="prepare_prefill")
def test_input_ids(judge: Judge) -> None:
    judge.for_all(prefills(block_sizes(judge), most=most(judge)), BatchChecks(judge).input_ids, examples=80, explicit=wide_prefills(judge))


@pytest.mark.clause("BATCH-2", function="prepare_prefill")
def test_positions(judge: Judge) -> None:
    judge.for_all(prefills(block_sizes(judge), most=most(judge)), BatchChecks(judge).positions, examples=80, explicit=wide_prefills(judge))


@pytest.mark.clause("BATCH-3", function="prepare_prefill")
def test_cu_seqlens(judge: Judge) -> None:
    judge.for_all(prefills(block_sizes(judge), most=most(judge)), BatchChecks(judge).cu_seqlens, examples=80, explicit=wide_prefills(judge))


@pytest.mark.clause("BATCH-4", function="prepare_prefill")
def test_max_seqlens(judge: Judge) -> None:
    judge.for_all(prefills(block_sizes(judge), most=most(judge)), BatchChecks(judge).max_seqlens, examples=80, explicit=wide_prefills(judge))


@pytest.mark.clause("BATCH-5", function="prepare_prefill")
def test_block_tables(judge: Judge) -> None:
    judge.for_all(prefills(block_sizes(judge), most=most(judge)), BatchChecks(judge).block_tables, examples=80, explicit=wide_prefills(judge))


@pytest.mark.clause("BATCH-6", function="prepare_decode")
def test_decode_step(judge: Judge) -> None:
    sizes, longest = block_sizes(judge), most(judge)
    wide = [many_sequences(sizes, MANY_SEQUENCES, decode=True, most=longest), *wide_tables(sizes, most=longest)]
    wide += long_sequences(sizes, decode=True, most=longest)
    judge.for_all(decodes(block_sizes(judge), most=most(judge)), BatchChecks(judge).decode_step, examples=80, explicit=wide)


@pytest.mark.clause("BATCH-7", function="prepare_prefill")
def test_warm_up(judge: Judge) -> None:
    judge.for_all(warm_ups(block_sizes(judge), most=most(judge)), BatchChecks(judge).warm_up, examples=30)


@pytest.mark.clause("CLAIM-3", function="prepare_decode")
def test_slot_mapping_with_spare_blocks(judge: Judge) -> None:
    judge.for_all(decodes(block_sizes(judge), spare_blocks=True, most=most(judge)), BatchChecks(judge).decode_slots, examples=80)
