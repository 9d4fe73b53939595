"""prepare_prefill, prepare_decode and compute_slot_mapping: the host's work before a step. Bytes moved: the tensors that are made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from benchmarks.cases import cumulative, on_this_machine
from benchmarks.contenders import DEVICE, Contender, pairs
from benchmarks.judge import unless_refused
from reference.records import SequenceState


class PrepareCase(NamedTuple):
    """B sequences of `cached + scheduled` tokens."""

    num_sequences: int
    scheduled: int
    cached: int
    block_size: int
    arrays: bool = False  # token ids are arrays of int64, as engines keep them that prepare many tokens; else lists
    real_size: bool = False  # left false where the reference is fast enough to stand beside; every machine times all of them

    @property
    def name(self) -> str:
        return f"{self.num_sequences}x{self.scheduled}+{self.cached}-S{self.block_size}{'-arrays' if self.arrays else ''}"

    @property
    def length(self) -> int:
        return self.cached + self.scheduled


PREFILL_CASES = (
    PrepareCase(4, 19, 21, 16),
    PrepareCase(64, 512, 1_536, 16),
    PrepareCase(4, 8_192, 0, 256),
    PrepareCase(64, 4_096, 0, 256),
    PrepareCase(64, 4_096, 0, 256, arrays=True),
    PrepareCase(64, 4_096, 4_096, 16),
    PrepareCase(64, 4_096, 4_096, 16, arrays=True),
)
DECODE_CASES = (
    PrepareCase(4, 1, 40, 16),
    PrepareCase(256, 1, 2_047, 16),
    PrepareCase(256, 1, 2_047, 256),
)
SLOT_CASES = on_this_machine(PREFILL_CASES[0], *(case._replace(real_size=True) for case in PREFILL_CASES[1:] if not case.arrays))


def states(case: PrepareCase) -> tuple[list[SequenceState], torch.Tensor]:
    """The sequences, their blocks dealt in random order, and their tables as a tensor (B, M)."""
    columns = -(-case.length // case.block_size)
    order = torch.randperm((case.num_sequences + 1) * columns, generator=torch.Generator().manual_seed(0))
    tables = order[: case.num_sequences * columns].reshape(case.num_sequences, columns).int()
    tokens = np.arange(case.length)
    kept = tokens.copy if case.arrays else tokens.tolist
    return [SequenceState(kept(), case.cached, case.scheduled, table) for table in tables.tolist()], tables.to(DEVICE)


def expected_slots(tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """slot(p) = table[p // S] * S + p % S of every sequence's `positions`, end to end."""
    return (tables[:, positions // block_size] * block_size + positions % block_size).flatten().int()


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, who: str) -> None:
    assert actual.dtype == expected.dtype, f"{who} is {actual.dtype}, it must be {expected.dtype}"
    assert torch.equal(actual, expected), f"{who} is {actual.tolist()[:20]} ..., it must be {expected.tolist()[:20]} ..."


@pytest.mark.parametrize("case, contender", pairs("prepare_prefill", PREFILL_CASES))
def test_prepare_prefill(case: PrepareCase, contender: Contender, timed):
    sequences, tables = states(case)

    def call():
        return contender.functions.prepare_prefill(sequences, case.block_size, device=DEVICE)

    batch = unless_refused(call)
    positions = torch.arange(case.cached, case.length, device=DEVICE)
    expected = dict(
        input_ids=positions.repeat(case.num_sequences),  # a state's token ids count up from 0
        positions=positions.repeat(case.num_sequences),
        cu_seqlens_q=cumulative(case.scheduled, case.num_sequences),
        cu_seqlens_k=cumulative(case.length, case.num_sequences),
        slot_mapping=expected_slots(tables, positions, case.block_size),
    )
    for field, tensor in expected.items():
        assert_equal(getattr(batch, field), tensor, f"{contender.name}: {field}")
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (case.scheduled, case.length)
    if case.cached:
        assert_equal(batch.block_tables, tables, f"{contender.name}: block_tables")
    time_host(timed, call, case, contender, "prepare_prefill", batch)


@pytest.mark.parametrize("case, contender", pairs("prepare_decode", DECODE_CASES))
def test_prepare_decode(case: PrepareCase, contender: Contender, timed):
    sequences, tables = states(case)

    def call():
        return contender.functions.prepare_decode(sequences, case.block_size, device=DEVICE)

    batch = unless_refused(call)
    last = torch.tensor([case.length - 1], device=DEVICE)
    expected = dict(
        input_ids=last.repeat(case.num_sequences),
        positions=last.repeat(case.num_sequences),
        slot_mapping=expected_slots(tables, last, case.block_size),
        context_lens=(last + 1).int().repeat(case.num_sequences),
        block_tables=tables,
    )
    for field, tensor in expected.items():
        assert_equal(getattr(batch, field), tensor, f"{contender.name}: {field}")
    time_host(timed, call, case, contender, "prepare_decode", batch)


@pytest.mark.parametrize("case, contender", pairs("compute_slot_mapping", SLOT_CASES))
def test_compute_slot_mapping(case: PrepareCase, contender: Contender, timed):
    _, tables = states(case)
    positions = torch.arange(case.cached, case.length, device=DEVICE)
    every_position = positions.repeat(case.num_sequences)
    cu_seqlens_q = cumulative(case.scheduled, case.num_sequences)

    def call() -> torch.Tensor:
        return contender.functions.compute_slot_mapping(every_position, cu_seqlens_q, tables, case.block_size)

    slot_mapping = unless_refused(call)
    assert_equal(slot_mapping, expected_slots(tables, positions, case.block_size), f"{contender.name}: slot_mapping")
    bytes_moved = sum(tensor.nbytes for tensor in (every_position, cu_seqlens_q, tables, slot_mapping))
    timed([call], group=f"compute_slot_mapping {case.name}", contender=contender.name, bytes_moved=bytes_moved)


def time_host(timed, call, case: PrepareCase, contender: Contender, function: str, batch) -> None:
    bytes_moved = sum(getattr(batch, field).nbytes for field in ("input_ids", "positions", "slot_mapping"))
    timed([call], group=f"{function} {case.name}", contender=contender.name, bytes_moved=bytes_moved, on_host=True)
