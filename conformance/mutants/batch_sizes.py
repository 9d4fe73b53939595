"""Faults of the batch tensors that show where sequences are long or many, or nobody is scheduled."""

from __future__ import annotations

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_batches import SoundBatches

SOUND = SoundBatches()


# --- long sequences ---------------------------------------------------------------------------------------------------------------------


@mutant("SLOT-1", replaces="slots", of=SoundBatches, source="own (adversary)")
def slots_of_a_chunk_end_at_a_thousand(self, table, start, end, block_size):
    """One program of 1,024 lanes for each chunk: later tokens get -1."""
    slots = SOUND.slots(table, start, end, block_size)
    return slots[:1024] + [-1] * (len(slots) - 1024)


@mutant("BATCH-2", replaces="scheduled_positions", of=SoundBatches, source="own (adversary)", alone=True)
def positions_end_at_two_thousand(self, s, start, end):
    """Positions are cut at the length of a table of rotations."""
    return [min(position, 2047) for position in range(start, end)]


@mutant("BATCH-6", replaces="decode_position", of=SoundBatches, source="own (adversary)")
def decode_positions_in_sixteen_bits(self, s):
    """The position of a decode step keeps 16 bits."""
    return (len(s.token_ids) - 1) % 2**16


@mutant("SLOT-1", replaces="decode_slot", of=SoundBatches, source="own (adversary)")
def decode_slots_of_sixteen_bits_of_position(self, s, block_size):
    """The slot of a decode step is that of the position's low 16 bits."""
    position = (len(s.token_ids) - 1) % 2**16
    return s.block_table[position // block_size] * block_size + position % block_size


@mutant("SLOT-1", replaces="compute_slot_mapping", of=SoundBatches, source="own (adversary)")
def computed_slots_end_at_eight_thousand(self, positions, cu_seqlens_q, block_tables, block_size):
    """The grid ends at 8,192 tokens."""
    slots = SOUND.compute_slot_mapping(positions, cu_seqlens_q, block_tables, block_size)
    slots[8192:] = -1
    return slots


@mutant("BATCH-1", replaces="scheduled_ids", of=SoundBatches, source="own", alone=True)
def ids_of_a_chunk_end_at_four_thousand(self, s, start, end):
    """A buffer of 4,096 token ids: later ones of a chunk are 0."""
    ids = list(s.token_ids[start:end])
    return ids[:4096] + [0] * (len(ids) - 4096)


@mutant("BATCH-4", replaces="largest", of=SoundBatches, source="own", alone=True)
def longest_keys_in_thirteen_bits(self, lengths_q, lengths_k):
    """max_seqlen_k keeps 13 bits."""
    return max(lengths_q), max(lengths_k) % 2**13


@mutant("BATCH-2", replaces="scheduled_positions", of=SoundBatches, source="own (adversary)")
def prefill_positions_in_sixteen_bits(self, s, start, end):
    """The positions of a prefill keep 16 bits."""
    return [position % 2**16 for position in range(start, end)]


@mutant("SLOT-1", replaces="slots", of=SoundBatches, source="own (adversary)")
def prefill_slots_of_fifteen_bits_of_position(self, table, start, end, block_size):
    """The slots of a prefill are those of the positions' low 15 bits."""
    return [table[position % 2**15 // block_size] * block_size + position % block_size for position in range(start, end)]


@mutant("BATCH-3", replaces="prefix_sums", of=SoundBatches, source="own (adversary)")
def prefix_sums_in_sixteen_bits(self, lengths):
    """Sums overflow 16 bits with a sign."""
    return [(total + 2**15) % 2**16 - 2**15 for total in SOUND.prefix_sums(lengths)]


@mutant("BATCH-4", replaces="largest", of=SoundBatches, source="own (adversary)")
def longest_keys_in_sixteen_bits(self, lengths_q, lengths_k):
    """max_seqlen_k keeps 16 bits."""
    return max(lengths_q), max(lengths_k) % 2**16


@mutant("SLOT-1", replaces="compute_slot_mapping", of=SoundBatches, source="own (adversary)")
def computed_slots_of_fifteen_bits_of_position(self, positions, cu_seqlens_q, block_tables, block_size):
    """Positions keep 15 bits."""
    return SOUND.compute_slot_mapping(positions % 2**15, cu_seqlens_q, block_tables, block_size)


# --- many sequences, and none -----------------------------------------------------------------------------------------------------------


@mutant("SLOT-1", replaces="prepare_decode", of=SoundBatches, source="own (adversary)")
def decode_slots_after_the_256th_missing(self, sequences, block_size, *, device="cpu"):
    """A buffer of 256 slots: later rows of a decode step get -1."""
    batch = SOUND.prepare_decode(sequences, block_size, device=device)
    batch.slot_mapping[256:] = -1
    return batch


@mutant("BATCH-3", replaces="prefix_sums", of=SoundBatches, source="own (adversary)")
def prefix_sums_forget_a_carry_after_256(self, lengths):
    """Sums are taken in parts of 257 sequences, and the last of a part is not carried into the next one."""
    return [total if i <= 256 else total - lengths[256] for i, total in enumerate(SOUND.prefix_sums(lengths))]


@mutant("SLOT-1", replaces="compute_slot_mapping", of=SoundBatches, source="own (adversary)")
def computed_slots_after_the_128th_sequence_missing(self, positions, cu_seqlens_q, block_tables, block_size):
    """The search for a row's sequence ends after 128 of them."""
    slots = SOUND.compute_slot_mapping(positions, cu_seqlens_q, block_tables, block_size)
    slots[int(cu_seqlens_q[: 128 + 1][-1]) :] = -1
    return slots


@mutant("SLOT-1", replaces="compute_slot_mapping", of=SoundBatches, source="vllm #14666")
def no_positions_no_grid(self, positions, cu_seqlens_q, block_tables, block_size):
    """A step that schedules nothing launches an empty grid, which is an error."""
    if len(positions) == 0:
        raise RuntimeError("invalid argument: grid size 0")
    return SOUND.compute_slot_mapping(positions, cu_seqlens_q, block_tables, block_size)
