"""Every function but compute_slot_mapping is wrong in a way of its own."""

import torch

from reference import compute_slot_mapping

__all__ = ["compute_slot_mapping"]


def prepare_prefill(sequences, block_size, *, device="cpu"):
    raise RuntimeError("no kernel image is available")


def prepare_decode(sequences, block_size, *, device="cpu"):
    return None


def store_kvcache(key, value, kv_cache, slot_mapping):
    """Another signature: one cache."""


def prefill_attention(q, k, v, **how):
    """Another dtype."""
    return q.double()


def decode_attention(q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """Another shape: heads side by side."""
    return q.flatten(1)


def last_token_logits(hidden, weight, cu_seqlens_q=None):
    """Another device."""
    rows = len(hidden) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    return torch.empty(rows, len(weight), dtype=hidden.dtype, device="meta")


def sample(logits, temperatures):
    """Another dtype, one id a row."""
    return logits.argmax(1).int()
