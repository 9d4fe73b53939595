"""The records of the contract: what a sequence is, and the tensors of a prefill and of a decode step.

An implementation may return any object that has these attributes. Letters as everywhere in this project: B sequences, T query tokens of the
batch, N physical blocks, S tokens per block, M columns of the block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class SequenceState(NamedTuple):
    """One sequence before a step. `num_cached_tokens + num_scheduled_tokens` is where this step's chunk ends."""

    token_ids: Sequence[int]  # every token known so far: prompt and generated ones
    num_cached_tokens: int = 0  # leading tokens whose KV is in the cache already (an earlier chunk, or a prefix-cache hit)
    num_scheduled_tokens: int = 0  # tokens to compute in this step
    block_table: Sequence[int] = ()  # physical block of each logical block; empty in a warm-up pass that has no cache yet


class PrefillBatch(NamedTuple):
    """The tensors of a prefill step; the sequences' scheduled tokens lie end to end."""

    input_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64, index of each token in its own sequence
    cu_seqlens_q: torch.Tensor  # (B+1,) int32, prefix sums from 0 of the scheduled tokens
    cu_seqlens_k: torch.Tensor  # (B+1,) int32, prefix sums from 0 of cached + scheduled tokens
    max_seqlen_q: int
    max_seqlen_k: int
    slot_mapping: torch.Tensor  # (T,) int32, empty in a warm-up pass
    block_tables: torch.Tensor | None  # (B, M) int32 padded with -1; None if no sequence has cached tokens


class DecodeBatch(NamedTuple):
    """The tensors of a decode step: the last token of each sequence."""

    input_ids: torch.Tensor  # (B,) int64
    positions: torch.Tensor  # (B,) int64, length - 1
    slot_mapping: torch.Tensor  # (B,) int32
    context_lens: torch.Tensor  # (B,) int32, tokens that the row sees, its own included
    block_tables: torch.Tensor  # (B, M) int32 padded with -1
