"""Mutants of compute_slot_mapping: integers that are views, read as if they lay side by side."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_batches import SoundBatches

SOUND = SoundBatches()


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a kernel reads which takes the tensor to be contiguous, kept in the range of the right ones."""
    strides = [1] if tensor.dim() == 1 else [tensor.shape[1], 1]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


@mutant("SLOT-1", replaces="compute_slot_mapping", of=SoundBatches, source="own (adversary)", alone=True)
def table_columns_read_without_their_stride(self, positions, cu_seqlens_q, block_tables, block_size):
    """The columns of block_tables are taken to lie side by side; the stride of its rows is honoured."""
    read = block_tables.as_strided(block_tables.shape, (block_tables.stride(0), 1), block_tables.storage_offset())
    return SOUND.compute_slot_mapping(positions, cu_seqlens_q, read, block_size)


@mutant("SLOT-1", replaces="compute_slot_mapping", of=SoundBatches, source="own (adversary)", alone=True)
def positions_read_without_their_stride(self, positions, cu_seqlens_q, block_tables, block_size):
    """positions are read as if they were contiguous."""
    read = side_by_side(positions).clamp(0, block_tables.shape[1] * block_size - 1)
    return SOUND.compute_slot_mapping(read, cu_seqlens_q, block_tables, block_size)


@mutant("SLOT-1", replaces="compute_slot_mapping", of=SoundBatches, source="own (adversary)", alone=True)
def query_sums_read_without_their_stride(self, positions, cu_seqlens_q, block_tables, block_size):
    """cu_seqlens_q is read as if it were contiguous."""
    rows = torch.arange(len(positions), device=positions.device)
    read = side_by_side(cu_seqlens_q)
    sequence = torch.stack([(read[1:] <= row).sum() for row in rows]) if len(rows) else rows
    columns = (positions // block_size).clamp(max=block_tables.shape[1] - 1)
    return self.computed(block_tables[sequence.clamp(max=len(block_tables) - 1), columns].long() * block_size + positions % block_size)
