"""Attention whose results lie on another device, or are no tensors; a store that gives back a cache."""

import torch


def prefill_attention(q, k, v, **how):
    return q.tolist()


def decode_attention(q, k_cache, v_cache, *, context_lens, block_tables, scale):
    return torch.empty_like(q, device="meta")


def store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    return k_cache
