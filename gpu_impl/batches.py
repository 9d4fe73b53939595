"""The tensors of a prefill and of a decode step: vectorised over tokens, and the slot mapping computed on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_impl.launch import require
from reference.records import DecodeBatch, PrefillBatch, SequenceState

Device = str | torch.device


def prepare_prefill(sequences: Sequence[SequenceState], block_size: int, *, device: Device = "cpu") -> PrefillBatch:
    """Tokens [cached, cached + scheduled) of each sequence, end to end (clauses BATCH-1...5, BATCH-7, SLOT-1).

    block_tables is None unless a sequence has cached tokens; then every sequence gets its row. If no sequence has a block table (warm-up),
    slot_mapping is empty. Raises ValueError for counts that do not fit the sequence and for a table that is short or holds a negative id.
    """
    _require_batch(sequences, block_size)
    tables = [sequence.block_table for sequence in sequences]
    lens_k = [sequence.num_cached_tokens + sequence.num_scheduled_tokens for sequence in sequences]
    warm_up = not any(len(table) for table in tables)
    for i, sequence in enumerate(sequences):
        cached, scheduled, known = sequence.num_cached_tokens, sequence.num_scheduled_tokens, len(sequence.token_ids)
        require(cached >= 0, f"sequence {i} has num_cached_tokens {cached}, it must be at least 0")
        require(scheduled >= 1, f"sequence {i} schedules {scheduled} tokens, a prefill needs at least 1 of each sequence")
        require(lens_k[i] <= known, f"sequence {i} has {known} tokens, {cached} cached and {scheduled} scheduled ones end at {lens_k[i]}")
        require(not warm_up or cached == 0, f"sequence {i} has {cached} cached tokens and no block table")
    starts = np.array([sequence.num_cached_tokens for sequence in sequences], dtype=np.int64)
    lens_q = np.array([sequence.num_scheduled_tokens for sequence in sequences], dtype=np.int64)
    ends_q = np.cumsum(lens_q)
    input_ids = np.concatenate(
        [np.asarray(s.token_ids[s.num_cached_tokens : end], dtype=np.int64) for s, end in zip(sequences, lens_k, strict=True)]
    )
    positions = np.arange(ends_q[-1]) + np.repeat(starts - (ends_q - lens_q), lens_q)
    slot_mapping, table_array = np.empty(0, dtype=np.int32), None
    if not warm_up:
        table_array = _padded(tables)
        _require_tables(table_array, tables, lens_k, block_size)
        blocks = table_array[np.repeat(np.arange(len(sequences)), lens_q), positions // block_size].astype(np.int64)
        slot_mapping = _slots(blocks, positions, block_size)
    return PrefillBatch(
        input_ids=_tensor(input_ids, device),
        positions=_tensor(positions, device),
        cu_seqlens_q=_tensor(_prefix_sums(lens_q), device),
        cu_seqlens_k=_tensor(_prefix_sums(starts + lens_q), device),
        max_seqlen_q=int(lens_q.max()),
        max_seqlen_k=max(lens_k),
        slot_mapping=_tensor(slot_mapping, device),
        block_tables=_tensor(table_array, device) if table_array is not None and starts.any() else None,
    )


def prepare_decode(sequences: Sequence[SequenceState], block_size: int, *, device: Device = "cpu") -> DecodeBatch:
    """The last token of each sequence, at position len - 1, and the slot that its KV goes to (clauses BATCH-6, SLOT-2).

    Raises ValueError for a sequence without tokens and for a table that is short or holds a negative id.
    """
    _require_batch(sequences, block_size)
    tables = [sequence.block_table for sequence in sequences]
    lens = [len(sequence.token_ids) for sequence in sequences]
    for i, length in enumerate(lens):
        require(length >= 1, f"sequence {i} has no token to decode from")
    table_array = _padded(tables)
    _require_tables(table_array, tables, lens, block_size)
    positions = np.array(lens, dtype=np.int64) - 1
    blocks = table_array[np.arange(len(sequences)), positions // block_size].astype(np.int64)
    return DecodeBatch(
        input_ids=_tensor(np.array([sequence.token_ids[-1] for sequence in sequences], dtype=np.int64), device),
        positions=_tensor(positions, device),
        slot_mapping=_tensor(_slots(blocks, positions, block_size), device),
        context_lens=_tensor((positions + 1).astype(np.int32), device),
        block_tables=_tensor(table_array, device),
    )


def compute_slot_mapping(
    positions: torch.Tensor, cu_seqlens_q: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> torch.Tensor:
    """(T,) int32 on the device of its inputs, without a host synchronisation (clauses SLOT-1, SLOT-2).

    positions: (T,), cu_seqlens_q: (B+1,), block_tables: (B, M) with any number of spare columns. A token after the last sequence, one past
    its table's width and one whose table cell is negative get -1, which `store_kvcache` skips: values on a device cannot be refused.
    """
    num_tokens, (num_seqs, width) = positions.shape[0], block_tables.shape
    require(block_size >= 1, f"block_size is {block_size}, it must be at least 1")
    require(
        cu_seqlens_q.shape == (num_seqs + 1,),
        f"block_tables has {num_seqs} rows, cu_seqlens_q has {cu_seqlens_q.numel()} entries, it must have {num_seqs + 1}",
    )
    if num_tokens == 0 or num_seqs == 0 or width == 0:
        return torch.full((num_tokens,), -1, dtype=torch.int32, device=positions.device)
    tokens = torch.arange(num_tokens, dtype=cu_seqlens_q.dtype, device=positions.device)
    # right=True steps over sequences without tokens, whose ends repeat the one before
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True)
    column = torch.div(positions, block_size, rounding_mode="floor")
    known = (sequence < num_seqs) & (column >= 0) & (column < width)
    blocks = block_tables[sequence.clamp(max=num_seqs - 1), column.clamp(0, width - 1)].long()
    slots = blocks * block_size + (positions - column * block_size)
    return torch.where(known & (blocks >= 0), slots, -1).to(torch.int32)


def _require_batch(sequences: Sequence[SequenceState], block_size: int) -> None:
    require(block_size >= 1, f"block_size is {block_size}, it must be at least 1")
    require(len(sequences) >= 1, "a step needs at least one sequence, the batch is empty")


def _require_tables(table_array: np.ndarray, tables: Sequence[Sequence[int]], lens: list[int], block_size: int) -> None:
    """Each table names a block for each of its sequence's first `lens[i]` tokens, and the slots fit int32."""
    needed = -(-np.array(lens) // block_size)
    for i, table in enumerate(tables):
        require(
            len(table) >= needed[i],
            f"sequence {i} needs {needed[i]} blocks for {lens[i]} tokens at block size {block_size}, its table has {len(table)}",
        )
    used = np.arange(table_array.shape[1]) < needed[:, None]
    for i, column in np.argwhere(used & (table_array < 0)):
        raise ValueError(f"sequence {i} has block id {table_array[i, column]} in column {column} of its table, ids start at 0")


def _padded(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """(B, M) int32: row i is table i, -1 beyond it; M is the longest table's length."""
    padded = np.full((len(tables), max(len(table) for table in tables)), -1, dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _slots(blocks: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    slots = blocks * block_size + positions % block_size
    require(slots.max(initial=0) < 2**31, f"slot {slots.max(initial=0)} does not fit the int32 slot_mapping")
    return slots.astype(np.int32)


def _prefix_sums(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def _tensor(array: np.ndarray, device: Device) -> torch.Tensor:
    """A copy on the device; pinned on the way to a GPU, so that the host does not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor.to(device)
