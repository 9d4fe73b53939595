"""The cases' shapes and inputs. Small ones run everywhere and have the reference beside them; those of real size need a GPU.

Letters: B sequences, T query tokens, N blocks of S tokens, Hq and Hk heads, D head dimension, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from benchmarks.contenders import DEVICE, ON_GPU
from benchmarks.trace import Lengths

SMALL_DTYPE = torch.bfloat16 if ON_GPU else torch.float32


class Model(NamedTuple):
    """The heads of one layer."""

    query_heads: int
    kv_heads: int
    head_dim: int


LLAMA_8B = Model(32, 8, 128)
LLAMA_1B = Model(32, 8, 64)
PHI_2 = Model(32, 32, 80)  # a head dimension that is no power of two
SMALL = Model(4, 2, 64)


class AttentionCase(NamedTuple):
    """Sequences of k_lens tokens, the last q_lens of which are queries. Decode has one query each."""

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    block_size: int | None  # None: keys and values of this pass, without a cache
    model: Model
    dtype: torch.dtype
    real_size: bool
    batch: str = ""  # the name of a batch whose lengths differ

    @property
    def num_sequences(self) -> int:
        return len(self.q_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(q_len * (k_len - q_len) + q_len * (q_len + 1) // 2 for q_len, k_len in zip(self.q_lens, self.k_lens))

    @property
    def bytes_moved(self) -> int:
        """q and the output once, K and V of every sequence once."""
        model = self.model
        elements = 2 * sum(self.k_lens) * model.kv_heads + 2 * self.num_tokens * model.query_heads
        return elements * model.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 4 * self.visible_pairs * self.model.query_heads * self.model.head_dim

    @property
    def name(self) -> str:
        q_len, k_len = self.q_lens[0], self.k_lens[0]
        even = f"{self.num_sequences}x{q_len}+{k_len - q_len}" if 1 < q_len < k_len else f"{self.num_sequences}x{k_len}"
        layout = f"S{self.block_size}" if self.block_size else "dense"
        return f"{self.batch or even}-{layout}-{self.model.query_heads}/{self.model.kv_heads}x{self.model.head_dim}-{short(self.dtype)}"


class PagedCache(NamedTuple):
    k_cache: torch.Tensor  # (N, S, Hk, D)
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # (B, M) int32


def small_attention(q_len: int, cached: int, block_size: int | None) -> AttentionCase:
    return AttentionCase((q_len,) * 3, (cached + q_len,) * 3, block_size, SMALL, SMALL_DTYPE, real_size=False)


def small_batch(batch: str, lengths: Lengths) -> AttentionCase:
    return AttentionCase(*lengths, 4, SMALL, SMALL_DTYPE, real_size=False, batch=batch)


def real_attention(num_sequences: int, q_len: int, cached: int, block_size: int | None, model: Model = LLAMA_8B) -> AttentionCase:
    q_lens, k_lens = (q_len,) * num_sequences, (cached + q_len,) * num_sequences
    return AttentionCase(q_lens, k_lens, block_size, model, torch.bfloat16, real_size=True)


def real_batch(batch: str, lengths: Lengths, block_size: int, model: Model = LLAMA_8B) -> AttentionCase:
    return AttentionCase(*lengths, block_size, model, torch.bfloat16, real_size=True, batch=batch)


def paged_cache(case: AttentionCase, generator: torch.Generator) -> PagedCache:
    """A full cache, its blocks dealt to the sequences in random order, with as many foreign blocks as the longest sequence has."""
    assert case.block_size is not None
    blocks_of = [-(-k_len // case.block_size) for k_len in case.k_lens]
    num_blocks = sum(blocks_of) + max(blocks_of)
    order = torch.randperm(num_blocks, generator=generator, device=DEVICE).int()
    block_tables = torch.full((case.num_sequences, max(blocks_of)), -1, dtype=torch.int32, device=DEVICE)
    for row, blocks in zip(block_tables, order.split([*blocks_of, max(blocks_of)])):
        row[: len(blocks)] = blocks
    shape = (num_blocks, case.block_size, case.model.kv_heads, case.model.head_dim)
    return PagedCache(randn(shape, case.dtype, generator), randn(shape, case.dtype, generator), block_tables)


def of_sequence(cache: PagedCache, sequence: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (length, Hk, D) of its positions, gathered: position p lies in block table[p // S] at offset p % S."""
    positions = torch.arange(length, device=DEVICE)
    block_size = cache.k_cache.shape[1]
    blocks, offsets = cache.block_tables[sequence].long()[positions // block_size], positions % block_size
    return cache.k_cache[blocks, offsets], cache.v_cache[blocks, offsets]


def cumulative(length: int, count: int) -> torch.Tensor:
    """cu_seqlens of `count` sequences of the same length."""
    return torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * length


def prefix_sums(lengths: Sequence[int]) -> torch.Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def randn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE, generator=generator)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def on_this_machine(*cases):
    """The small cases, and on a GPU those of real size too."""
    return [case for case in cases if ON_GPU or not case.real_size]
