"""What one writes without a kernel: the peer that every machine has."""

from __future__ import annotations

import torch


def store_kvcache(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """index_put into the caches; a mapping with -1 in it has to drop those rows first, which this peer leaves out."""
    block_size = k_cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, offsets] = key
    v_cache[blocks, offsets] = value


def last_token_logits(hidden: torch.Tensor, weight: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> torch.Tensor:
    """The last rows first, then one product."""
    if cu_seqlens_q is not None:
        hidden = hidden[cu_seqlens_q[1:].long() - 1]
    return hidden @ weight.T


def sample(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """softmax and torch.multinomial over the whole batch."""
    p = torch.softmax(logits.float() / temperatures[:, None], dim=1)
    return torch.multinomial(p, 1)[:, 0]
