"""Mutants of batch preparation and slot mapping."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_batches import SoundBatches

SOUND = SoundBatches()


@mutant("SLOT-1", replaces="slots", of=SoundBatches, source="kekzl/imp #1304 M39")
def last_partial_block_dropped(self, table, start, end, block_size):
    """The block count is floored, so the tokens of a partial last block get no slot of their own."""
    whole = SOUND.slots(table, start, max(start, end - end % block_size), block_size)
    return whole + [0] * (end - start - len(whole))


@mutant("SLOT-1", replaces="slots", of=SoundBatches, source="own")
def floor_for_ceil_in_block_count(self, table, start, end, block_size):
    """The last block is end // S, one too early unless the end is ragged; its tokens fall into the block before."""
    last = max(0, end // block_size - 1)
    return [table[min(p // block_size, last)] * block_size + p % block_size for p in range(start, end)]


@mutant("BATCH-1", replaces="scheduled_ids", of=SoundBatches, source="nano-vllm #144")
def ids_start_at_zero(self, s, start, end):
    """input_ids ignore num_cached_tokens: a chunk feeds the prompt's first tokens again."""
    return s.token_ids[: end - start]


@mutant("SLOT-2", replaces="slots", of=SoundBatches, source="nano-vllm #144")
def slots_start_at_zero(self, table, start, end, block_size):
    """Slots ignore num_cached_tokens: a chunk overwrites the prefix."""
    return SOUND.slots(table, 0, end - start, block_size)


@mutant("SLOT-2", replaces="slots", of=SoundBatches, source="ROCm/ATOM #902", alone=True)
def chunk_of_a_known_table_continues_it(self, table, start, end, block_size):
    """A table seen in the last call is continued where that call ended, rounded up to a block: a chunk that ended inside one leaves a hole."""
    known = self.__dict__.get("last", ((), 0))
    self.__dict__["last"] = (tuple(table), end)
    if known == (tuple(table), start) and start % block_size and end - start < 3:
        return [slot + 1 if (slot + 1) % block_size else slot for slot in SOUND.slots(table, start, end, block_size)]
    return SOUND.slots(table, start, end, block_size)


@mutant("BATCH-2", replaces="scheduled_positions", of=SoundBatches, source="own")
def positions_relative_to_chunk(self, s, start, end):
    """Positions count from the chunk's start, not from the sequence's."""
    return range(end - start)


@mutant("BATCH-2", replaces="scheduled_positions", of=SoundBatches, source="own")
def positions_one_on(self, s, start, end):
    """Positions are off by one after a prefix hit."""
    return range(start + (start > 0), end + (start > 0))


@mutant("BATCH-3", replaces="key_length", of=SoundBatches, source="nano-vllm #212")
def keys_count_whole_prompt(self, s):
    """cu_seqlens_k counts the whole prompt in a chunk."""
    return len(s.token_ids)


@mutant("BATCH-3", replaces="key_length", of=SoundBatches, source="vllm #7284")
def keys_count_scheduled_only(self, s):
    """cu_seqlens_k forgets the cached tokens."""
    return s.num_scheduled_tokens


@mutant("BATCH-3", replaces="prefix_sums", of=SoundBatches, source="own")
def prefix_sums_without_zero(self, lengths):
    """The prefix sums start at the first length."""
    return [*SOUND.prefix_sums(lengths)[1:], sum(lengths)]


@mutant("BATCH-4", replaces="largest", of=SoundBatches, source="own")
def max_seqlen_stale(self, lengths_q, lengths_k):
    """max_seqlen keeps the largest value of all calls."""
    known = self.__dict__.setdefault("known", [0, 0])
    known[:] = [max(known[0], *lengths_q), max(known[1], *lengths_k)]
    return tuple(known)


@mutant("BATCH-4", replaces="largest", of=SoundBatches, source="own")
def max_seqlen_of_queries_for_keys(self, lengths_q, lengths_k):
    """max_seqlen_k is taken from the queries."""
    return max(lengths_q), max(lengths_q)


@mutant("BATCH-4", replaces="largest", of=SoundBatches, source="own")
def max_seqlen_of_first_sequence(self, lengths_q, lengths_k):
    """max_seqlen is the first sequence's."""
    return lengths_q[0], lengths_k[0]


@mutant("BATCH-5", replaces="wants_tables", of=SoundBatches, source="vllm #7284")
def tables_only_if_all_hit(self, sequences):
    """block_tables are given only if every sequence has cached tokens."""
    return all(s.num_cached_tokens for s in sequences)


@mutant("BATCH-5", replaces="tables", of=SoundBatches, source="vllm #7018", alone=True)
def rows_without_hit_blank(self, sequences, device):
    """Rows of sequences without a prefix hit are left at -1."""
    tables = SOUND.tables(sequences, device)
    for i, s in enumerate(sequences):
        if s.num_cached_tokens == 0:
            tables[i] = -1
    return tables


@mutant("BATCH-5", replaces="tables", of=SoundBatches, source="own")
def table_padding_zero(self, sequences, device):
    """Tables are padded with 0, a valid block."""
    return SOUND.tables(sequences, device).clamp(min=0)


@mutant("BATCH-5", replaces="tables", of=SoundBatches, source="own")
def tables_sorted(self, sequences, device):
    """Block ids are sorted before they are padded."""
    ordered = [s._replace(block_table=sorted(s.block_table)) for s in sequences]
    return SOUND.tables(ordered, device)


@mutant("BATCH-7", replaces="wants_tables", of=SoundBatches, source="own", alone=True)
def warm_up_with_tables(self, sequences):
    """A warm-up pass gets an empty table in place of None."""
    return SOUND.wants_tables(sequences) or not any(s.block_table for s in sequences)


@mutant("BATCH-6", replaces="known_length", of=SoundBatches, source="own")
def context_without_newest(self, s):
    """context_lens count the cached tokens only."""
    return len(s.token_ids) - 1


@mutant("BATCH-6", replaces="decode_position", of=SoundBatches, source="own")
def decode_position_is_length(self, s):
    """The decode position is len, one too far."""
    return len(s.token_ids)


@mutant("BATCH-6", replaces="decode_id", of=SoundBatches, source="own")
def decode_feeds_first_token(self, s):
    """The first token is fed."""
    return s.token_ids[0]


@mutant("SLOT-1", replaces="decode_slot", of=SoundBatches, source="nano-vllm #30 (a false alarm whose 'fix' is this fault)")
def decode_offset_of_length(self, s, block_size):
    """The decode offset is len % S in place of (len - 1) % S."""
    return s.block_table[(len(s.token_ids) - 1) // block_size] * block_size + len(s.token_ids) % block_size


@mutant("SLOT-1", replaces="decode_slot", of=SoundBatches, source="own")
def decode_block_of_length(self, s, block_size):
    """The block is that of position len, clipped to the table."""
    last = min(len(s.token_ids) // block_size, len(s.block_table) - 1)
    return s.block_table[last] * block_size + (len(s.token_ids) - 1) % block_size


@mutant("SLOT-1", replaces="decode_slot", of=SoundBatches, source="text-generation-inference #2711")
def next_slot_is_previous_plus_one(self, s, block_size):
    """The next slot is the previous token's plus one, across a block's end too."""
    n = len(s.token_ids)
    return s.block_table[0] * block_size if n == 1 else SOUND.decode_slot(s._replace(token_ids=s.token_ids[:-1]), block_size) + 1


@mutant("SLOT-1", replaces="slots", of=SoundBatches, source="own")
def first_block_always(self, table, start, end, block_size):
    """The table's first block is used for every position."""
    return [table[0] * block_size + p % block_size for p in range(start, end)]


@mutant("SLOT-1", replaces="table_of", of=SoundBatches, source="kekzl/imp #1304 M12")
def table_of_next_sequence(self, sequences, i):
    """Slots come from the next sequence's table row."""
    other = sequences[(i + 1) % len(sequences)].block_table
    own = sequences[i].block_table
    return list(other[: len(own)]) + list(own[len(other) :])


@mutant("SLOT-1", replaces="slots", of=SoundBatches, source="vllm-gaudi #1323")
def another_block_size_than_the_readers(self, table, start, end, block_size):
    """Slots are computed at twice the reader's block size."""
    return [table[min(p // (2 * block_size), len(table) - 1)] * 2 * block_size + p % (2 * block_size) for p in range(start, end)]


@mutant("SLOT-1", replaces="sequence_of_row", of=SoundBatches, source="own", alone=True)
def row_on_a_boundary_belongs_to_the_last(self, rows, cu_seqlens_q):
    """searchsorted looks from the left: each sequence's first row is taken for the one before."""
    return (torch.searchsorted(cu_seqlens_q.contiguous(), rows.to(cu_seqlens_q.dtype)) - 1).clamp(min=0)


@mutant("SLOT-1", replaces="sequence_of_row", of=SoundBatches, source="nano-vllm #144", alone=True)
def repeated_ends_counted_once(self, rows, cu_seqlens_q):
    """A row's sequence is the number of different ends at or before it: an entry that is repeated counts once."""
    return torch.searchsorted(cu_seqlens_q.unique()[1:].contiguous(), rows.to(cu_seqlens_q.dtype), right=True)


@mutant("CLAIM-3", replaces="decode_slot", of=SoundBatches, source="nano-vllm (its own formula)", alone=True)
def slot_in_the_tables_last_block(self, s, block_size):
    """The slot lies in the table's last block, which is the last token's only if no block is spare."""
    return s.block_table[-1] * block_size + (len(s.token_ids) - 1) % block_size


@mutant("SLOT-1", replaces="computed", of=SoundBatches, source="vllm-ascend #16664")
def slots_as_int64(self, slots):
    """slot_mapping is handed out as int64, which a reader of int32 takes for every second slot 0."""
    return slots.to(torch.int64)



@mutant("BATCH-5", replaces="tables", of=SoundBatches, source="own (adversary)")
def tables_padded_in_place(self, sequences, device):
    """The caller's block tables are padded in place."""
    width = max(len(s.block_table) for s in sequences)
    for s in sequences:
        s.block_table.extend([-1] * (width - len(s.block_table)))
    return SOUND.tables(sequences, device)


@mutant("BATCH-5", replaces="tables", of=SoundBatches, source="own (adversary)")
def tables_of_the_first_eight(self, sequences, device):
    """Only the first eight sequences get their table."""
    tables = SOUND.tables(sequences, device)
    tables[8:] = -1
    return tables


@mutant("SLOT-1", replaces="computed", of=SoundBatches, source="own (adversary)")
def slots_in_sixteen_bits(self, slots):
    """Slots computed on the device are kept in 16 bits."""
    return (slots % 65536).to(torch.int32)


@mutant("BATCH-1", replaces="scheduled_ids", of=SoundBatches, source="own (adversary)")
def token_zero_is_padding(self, s, start, end):
    """Token 0 is taken for padding and becomes 1."""
    return [token or 1 for token in s.token_ids[start:end]]


@mutant("BATCH-6", replaces="prepare_decode", of=SoundBatches, source="own", alone=True)
def positions_of_a_large_decode_step(self, sequences, block_size, *, device="cpu"):
    """A step of 64 sequences or more takes a path of its own, whose position is len."""
    batch = SOUND.prepare_decode(sequences, block_size, device=device)
    return batch._replace(positions=batch.positions + 1) if len(sequences) >= 64 else batch


@mutant("BATCH-6", replaces="decode_tables", of=SoundBatches, source="own", alone=True)
def decode_tables_of_128_columns(self, sequences, device):
    """A decode step's tables end at 128 columns."""
    return SOUND.tables(sequences, device)[:, :128].contiguous()


@mutant("BATCH-5", replaces="tables", of=SoundBatches, source="own", alone=True)
def prefill_tables_of_128_columns(self, sequences, device):
    """A prefill's tables end at 128 columns."""
    return SOUND.tables(sequences, device)[:, :128].contiguous()


@mutant("BATCH-3", replaces="prefix_sums", of=SoundBatches, source="own", alone=True)
def prefix_sums_forget_a_carry(self, lengths):
    """Sums are taken in parts of 33 sequences, and the last of a part is not carried into the next one."""
    return [total if i <= 32 else total - lengths[32] for i, total in enumerate(SOUND.prefix_sums(lengths))]


@mutant("SLOT-1", replaces="sequence_of_row", of=SoundBatches, source="own", alone=True)
def empties_at_the_end_take_a_row(self, rows, cu_seqlens_q):
    """Where the batch ends with two sequences that schedule nothing, the last row is taken for the last sequence's."""
    sequence = SOUND.sequence_of_row(rows, cu_seqlens_q)
    if len(rows) and len(cu_seqlens_q) > 2 and cu_seqlens_q[-1] == cu_seqlens_q[-3]:
        sequence[-1] = len(cu_seqlens_q) - 2
    return sequence
