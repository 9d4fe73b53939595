"""The tensors of a prefill and of a decode step: vectorised over tokens, and the slot mapping computed on the device."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from gpu_impl.launch import ceil_div, on_device_of, require
from reference.records import DecodeBatch, PrefillBatch, SequenceState

Device = str | torch.device
TOKENS = 1024  # of a program that expands a chunk
ALIGNED = 64  # bytes, of a tensor within a buffer


def prepare_prefill(sequences: Sequence[SequenceState], block_size: int, *, device: Device = "cpu") -> PrefillBatch:
    """Tokens [cached, cached + scheduled) of each sequence, end to end (clauses BATCH-1...5, BATCH-7, SLOT-1).

    block_tables is None unless a sequence has cached tokens; then every sequence gets its row. If no sequence has a block table (warm-up),
    slot_mapping is empty. token_ids may be arrays of int64 too, which spares the host what it does for each token of a list. Raises
    ValueError for counts that do not fit the sequence and for a table that is short or holds a negative id.
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
    ends = np.array(lens_k, dtype=np.int64)
    cu_seqlens_q, cu_seqlens_k = _prefix_sums(ends - starts), _prefix_sums(ends)
    table_array = np.empty((len(sequences), 0), dtype=np.int32)
    if not warm_up:
        table_array = _padded(tables)
        _require_tables(table_array, tables, lens_k, block_size)
        _require_slots(table_array, starts, ends, block_size)
    input_ids = _scheduled_tokens(sequences, cu_seqlens_q, device)
    on_device = _on_device(device, cu_seqlens_q, cu_seqlens_k, table_array)
    if input_ids.is_cuda:
        positions, slot_mapping = expanded_on_device(*on_device, block_size, len(input_ids), int((ends - starts).max()))
    else:
        positions, slot_mapping = (torch.from_numpy(array).to(device) for array in expanded(table_array, starts, ends, block_size))
    return PrefillBatch(
        input_ids=input_ids,
        positions=positions,
        cu_seqlens_q=on_device[0],
        cu_seqlens_k=on_device[1],
        max_seqlen_q=int((ends - starts).max()),
        max_seqlen_k=max(lens_k),
        slot_mapping=slot_mapping,
        block_tables=on_device[2] if starts.any() else None,
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
    ends = np.array(lens, dtype=np.int64)
    _require_slots(table_array, ends - 1, ends, block_size)
    blocks = table_array[np.arange(len(sequences)), (ends - 1) // block_size].astype(np.int64)
    last_tokens = np.array([sequence.token_ids[-1] for sequence in sequences], dtype=np.int64)
    slots = (blocks * block_size + (ends - 1) % block_size).astype(np.int32)
    input_ids, positions, slot_mapping, context_lens, block_tables = _on_device(
        device, last_tokens, ends - 1, slots, ends.astype(np.int32), table_array
    )
    return DecodeBatch(input_ids, positions, slot_mapping, context_lens, block_tables)


def compute_slot_mapping(positions: torch.Tensor, cu_seqlens_q: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
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
    """Each table names a block for each of its sequence's first `lens[i]` tokens."""
    needed = -(-np.array(lens) // block_size)
    held = np.array([len(table) for table in tables])
    for i in np.flatnonzero(held < needed):
        raise ValueError(f"sequence {i} needs {needed[i]} blocks for {lens[i]} tokens at block size {block_size}, its table has {held[i]}")
    used = np.arange(table_array.shape[1]) < needed[:, None]
    for i, column in np.argwhere(used & (table_array < 0)):
        raise ValueError(f"sequence {i} has block id {table_array[i, column]} in column {column} of its table, ids start at 0")


def _padded(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """(B, M) int32: row i is table i, -1 beyond it; M is the longest table's length."""
    padded = np.full((len(tables), max(len(table) for table in tables)), -1, dtype=np.int32)
    for i, (row, table) in enumerate(zip(padded, tables, strict=True)):
        try:
            if isinstance(table, list):
                struct.pack_into(f"{len(table)}i", row, 0, *table)
            else:
                row[: len(table)] = table
        except (struct.error, OverflowError) as error:
            column = next(column for column, block in enumerate(table) if not -(2**31) <= block < 2**31)
            raise ValueError(f"sequence {i} has block id {table[column]} in column {column} of its table, it does not fit int32") from error
    return padded


def _prefix_sums(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


# --- tokens, positions, slots --------------------------------------------------------------------------------------------------------------


def _scheduled_tokens(sequences: Sequence[SequenceState], cu_seqlens_q: np.ndarray, device: Device) -> torch.Tensor:
    """(T,) int64 on the device: the tokens of each chunk, end to end. A list is written by `struct` in half the time that an array of it takes."""
    on_gpu = torch.device(device).type == "cuda"
    tokens = torch.empty(int(cu_seqlens_q[-1]), dtype=torch.int64, pin_memory=on_gpu)
    array = tokens.numpy()
    for sequence, first, end in zip(sequences, cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        chunk = sequence.token_ids[sequence.num_cached_tokens : sequence.num_cached_tokens + end - first]
        if isinstance(chunk, list):
            struct.pack_into(f"{len(chunk)}q", array, 8 * first, *chunk)
        else:
            array[first:end] = chunk
    return tokens.to(device, non_blocking=True)


def expanded(table_array: np.ndarray, starts: np.ndarray, ends: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions (T,) int64 and slots (T,) int32 of [start, end) of each sequence, on the host: block by block. No slots without tables."""
    lens = ends - starts
    ramp, offsets = np.arange(int(lens.max())), np.arange(block_size, dtype=np.int32)
    positions = np.empty(int(lens.sum()), dtype=np.int64)
    slots = np.empty(len(positions) if table_array.shape[1] else 0, dtype=np.int32)
    first_slots = table_array * np.int32(block_size)  # of each block; in cells that are not used it may be anything
    at = 0
    for blocks, start, end in zip(first_slots, starts.tolist(), ends.tolist(), strict=True):
        here = slice(at, at + end - start)
        np.add(ramp[: end - start], start, out=positions[here])
        if len(slots):
            first = start // block_size
            whole = blocks[first : -(-end // block_size), None] + offsets
            slots[here] = whole.reshape(-1)[start - first * block_size : end - first * block_size]
        at = here.stop
    return positions, slots


def expanded_on_device(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, block_tables: torch.Tensor, block_size: int, num_tokens: int, max_seqlen_q: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the tensors of a batch, where they lie: what goes to the device is a table, not a slot for each token."""
    positions = torch.empty(num_tokens, dtype=torch.int64, device=cu_seqlens_q.device)
    width = block_tables.shape[1]
    slots = torch.empty(num_tokens if width else 0, dtype=torch.int32, device=cu_seqlens_q.device)
    with on_device_of(positions):
        _expand_kernel[(len(block_tables), ceil_div(max_seqlen_q, TOKENS))](
            cu_seqlens_q, cu_seqlens_k, block_tables, positions, slots, width, block_size, TOKENS=TOKENS, WITH_SLOTS=width > 0
        )
    return positions, slots


@triton.jit
def _expand_kernel(
    cu_seqlens_q, cu_seqlens_k, block_tables, positions, slots, width, block_size, TOKENS: tl.constexpr, WITH_SLOTS: tl.constexpr
):  # fmt: skip
    sequence = tl.program_id(0)
    first, end = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_q + sequence + 1)
    last_k = tl.load(cu_seqlens_k + sequence + 1) - tl.load(cu_seqlens_k + sequence)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    ok = token < end - first
    position = last_k - (end - first) + token
    tl.store(positions + first + token, position.to(tl.int64), mask=ok)
    if WITH_SLOTS:
        block = tl.load(block_tables + sequence.to(tl.int64) * width + position // block_size, mask=ok, other=0)
        tl.store(slots + first + token, block * block_size + position % block_size, mask=ok)


def _require_slots(table_array: np.ndarray, starts: np.ndarray, ends: np.ndarray, block_size: int) -> None:
    """The slots of [start, end) of each sequence fit int32."""
    columns = np.arange(table_array.shape[1])
    chunk = (columns >= (starts // block_size)[:, None]) & (columns < (-(-ends // block_size))[:, None])
    last = np.minimum(block_size, ends[:, None] - columns * block_size) - 1  # offset of a block's last token
    largest = np.where(chunk, table_array.astype(np.int64) * block_size + last, 0).max(initial=0)
    require(largest < 2**31, f"slot {largest} does not fit the int32 slot_mapping")


def _on_device(device: Device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copies on the device. For a GPU they lie end to end in one pinned buffer: one copy, for which the host does not wait."""
    if torch.device(device).type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    firsts = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
    buffer = torch.empty(firsts[-1], dtype=torch.uint8, pin_memory=True)
    for array, first in zip(arrays, firsts, strict=False):
        buffer.numpy()[first : first + array.nbytes] = array.reshape(-1).view(np.uint8)
    sent = buffer.to(device, non_blocking=True)
    parts = (sent[first : first + array.nbytes] for array, first in zip(arrays, firsts, strict=False))
    return [part.view(getattr(torch, array.dtype.name)).view(array.shape) for part, array in zip(parts, arrays, strict=True)]
