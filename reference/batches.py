"""The tensors of a prefill and of a decode step, built from the sequences' states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference.preconditions import LARGEST_INT32, count, require, require_block_size, require_int32_slots, require_table
from reference.records import DecodeBatch, PrefillBatch, SequenceState
from reference.slots import slot_of_position, slots_block_by_block


def prepare_prefill(sequences: Sequence[SequenceState], block_size: int, *, device: str | torch.device = "cpu") -> PrefillBatch:
    """Tokens [cached, cached + scheduled) of each sequence, end to end (clauses BATCH-1...5, BATCH-7, SLOT-1).

    A sequence's table holds at least the blocks up to its chunk's end. In a warm-up pass no sequence has a table: slot_mapping is then
    empty and block_tables None. block_tables is None too if no sequence has cached tokens; if one has, every sequence gets its row.
    Raises ValueError for an empty batch, a sequence that schedules nothing, counts past the sequence, a table that is too short or holds
    a negative id, and a slot or block id that does not fit int32.

    Two sequences at block size 4; the second one has 4 cached tokens and schedules 2 of its 3 remaining ones:

    >>> batch = prepare_prefill([SequenceState([5, 6, 7], 0, 3, [2]), SequenceState([1, 2, 3, 4, 8, 9, 9], 4, 2, [7, 9])], 4)
    >>> batch.input_ids.tolist(), batch.positions.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 4, 5])
    >>> batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.tolist(), batch.max_seqlen_q, batch.max_seqlen_k
    ([0, 3, 5], [0, 3, 9], 3, 6)
    >>> batch.slot_mapping.tolist(), batch.block_tables.tolist()
    ([8, 9, 10, 36, 37], [[2, -1], [7, 9]])
    """
    require_block_size(block_size)
    require(len(sequences) >= 1, "a prefill needs at least one sequence, the batch is empty")
    warm_up = all(len(sequence.block_table) == 0 for sequence in sequences)
    input_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    cu_seqlens_q, cu_seqlens_k = [0], [0]
    for i, sequence in enumerate(sequences):
        start = sequence.num_cached_tokens
        end = start + sequence.num_scheduled_tokens
        require(start >= 0, f"sequence {i} has num_cached_tokens {start}, it must be at least 0")
        require(end > start, f"sequence {i} schedules {end - start} tokens, a prefill needs at least 1 of each sequence")
        require(
            end <= len(sequence.token_ids),
            f"sequence {i} has {count(len(sequence.token_ids), 'token')}, "
            f"num_cached_tokens {start} and num_scheduled_tokens {end - start} end at {end}",
        )
        input_ids.extend(sequence.token_ids[start:end])
        positions.extend(range(start, end))
        cu_seqlens_q.append(cu_seqlens_q[-1] + end - start)
        cu_seqlens_k.append(cu_seqlens_k[-1] + end)
        if warm_up:
            require(start == 0, f"sequence {i} has {count(start, 'cached token')} and no block table")
        else:
            require_table(sequence.block_table, end, block_size, f"sequence {i}")
            slots = slots_block_by_block(sequence.block_table, start, end, block_size)
            require_int32_slots(slots, range(start, end), f"sequence {i}")
            slot_mapping.extend(slots)
    any_cached = any(sequence.num_cached_tokens > 0 for sequence in sequences)
    return PrefillBatch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        cu_seqlens_q=torch.tensor(cu_seqlens_q, dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor(cu_seqlens_k, dtype=torch.int32, device=device),
        max_seqlen_q=max(sequence.num_scheduled_tokens for sequence in sequences),
        max_seqlen_k=max(sequence.num_cached_tokens + sequence.num_scheduled_tokens for sequence in sequences),
        slot_mapping=torch.tensor(slot_mapping, dtype=torch.int32, device=device),
        block_tables=padded_block_tables(sequences, device) if any_cached else None,
    )


def prepare_decode(sequences: Sequence[SequenceState], block_size: int, *, device: str | torch.device = "cpu") -> DecodeBatch:
    """The last token of each sequence, at position len - 1, and the slot that its KV goes to (clauses BATCH-6, SLOT-2).

    Raises ValueError for an empty batch, a sequence without tokens, a table that is too short or holds a negative id, and a slot
    or block id that does not fit int32.

    >>> batch = prepare_decode([SequenceState([5, 6, 7, 8, 9], 4, 1, [2, 6])], 4)
    >>> [field.tolist() for field in batch]
    [[9], [4], [24], [5], [[2, 6]]]
    """
    require_block_size(block_size)
    require(len(sequences) >= 1, "a decode step needs at least one sequence, the batch is empty")
    lengths = [len(sequence.token_ids) for sequence in sequences]
    for i, sequence in enumerate(sequences):
        require(lengths[i] >= 1, f"sequence {i} has no token to decode from")
        require_table(sequence.block_table, lengths[i], block_size, f"sequence {i}")
    slots = [slot_of_position(s.block_table, n - 1, block_size) for s, n in zip(sequences, lengths, strict=True)]
    for i, slot in enumerate(slots):
        require_int32_slots([slot], [lengths[i] - 1], f"sequence {i}")
    return DecodeBatch(
        input_ids=torch.tensor([sequence.token_ids[-1] for sequence in sequences], dtype=torch.int64, device=device),
        positions=torch.tensor([length - 1 for length in lengths], dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=padded_block_tables(sequences, device),
    )


def padded_block_tables(sequences: Sequence[SequenceState], device: str | torch.device) -> torch.Tensor:
    """(B, M) int32: row i is sequence i's own table, -1 beyond it; M is the longest table's length."""
    for i, sequence in enumerate(sequences):
        for column, block in enumerate(sequence.block_table):
            fits = -LARGEST_INT32 - 1 <= block <= LARGEST_INT32
            require(fits, f"sequence {i} has block id {block} in column {column} of its table, it does not fit int32")
    width = max(len(sequence.block_table) for sequence in sequences)
    rows = [list(sequence.block_table) + [-1] * (width - len(sequence.block_table)) for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int32, device=device)
