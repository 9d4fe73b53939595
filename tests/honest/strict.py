"""The sound kernels with limits that they keep to the letter: past them a RuntimeError, as a library raises it. Their slots lie in one buffer."""

import torch

from conformance.mutants.sound_kernels import SoundKernels

BLOCK_SIZES, MOST = (16,), 100
CAPABILITIES = {"block_sizes": BLOCK_SIZES, "max_context": MOST}
sound = SoundKernels()
slots = torch.empty(100_000, dtype=torch.int32)


def require(block_size, lengths):
    longest = max(map(int, lengths), default=0)
    if block_size not in BLOCK_SIZES or longest > MOST:
        raise RuntimeError(f"{longest} tokens in blocks of {block_size} are past what this library takes: {MOST} in blocks of {BLOCK_SIZES}")


def kept(mapping):
    return slots[: len(mapping)].copy_(mapping)


def prepare_prefill(sequences, block_size, *, device="cpu"):
    require(block_size, [len(sequence.token_ids) for sequence in sequences])
    batch = sound.prepare_prefill(sequences, block_size, device=device)
    return batch._replace(slot_mapping=kept(batch.slot_mapping))


def prepare_decode(sequences, block_size, *, device="cpu"):
    require(block_size, [len(sequence.token_ids) for sequence in sequences])
    batch = sound.prepare_decode(sequences, block_size, device=device)
    return batch._replace(slot_mapping=kept(batch.slot_mapping))


def compute_slot_mapping(positions, cu_seqlens_q, block_tables, block_size):
    require(block_size, positions + 1)
    return kept(sound.compute_slot_mapping(positions, cu_seqlens_q, block_tables, block_size))


def store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    require(k_cache.shape[1], [])
    sound.store_kvcache(key, value, k_cache, v_cache, slot_mapping)


def decode_attention(q, k_cache, v_cache, *, context_lens, **metadata):
    require(k_cache.shape[1], context_lens)
    return sound.decode_attention(q, k_cache, v_cache, context_lens=context_lens, **metadata)


def prefill_attention(q, k, v, *, cu_seqlens_k, block_tables=None, **metadata):
    require(BLOCK_SIZES[0] if block_tables is None else k.shape[1], cu_seqlens_k.diff())
    return sound.prefill_attention(q, k, v, cu_seqlens_k=cu_seqlens_k, block_tables=block_tables, **metadata)


BlockManager = sound.BlockManager
