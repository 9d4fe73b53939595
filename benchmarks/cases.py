"""The cases' shapes and inputs. Small ones run everywhere and have the reference beside them; those of real size need a GPU.

Letters: B sequences, T query tokens, N blocks of S tokens, Hq and Hk heads, D head dimension, V vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.contenders import DEVICE, ON_GPU

SMALL_DTYPE = torch.bfloat16 if ON_GPU else torch.float32


class AttentionCase(NamedTuple):
    """B sequences of `cached + q_len` tokens, of which q_len are queries. Decode has q_len 1."""

    num_sequences: int
    q_len: int
    cached: int
    block_size: int | None  # None: keys and values of this pass, without a cache
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    real_size: bool

    @property
    def k_len(self) -> int:
        return self.cached + self.q_len

    @property
    def name(self) -> str:
        tokens = f"{self.q_len}+{self.cached}" if self.cached and self.q_len > 1 else f"{self.k_len}"
        layout = f"S{self.block_size}" if self.block_size else "dense"
        return f"{self.num_sequences}x{tokens}-{layout}-{self.query_heads}/{self.kv_heads}x{self.head_dim}-{short(self.dtype)}"


class PagedCache(NamedTuple):
    k_cache: torch.Tensor  # (N, S, Hk, D)
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # (B, M) int32


def small_attention(q_len: int, cached: int, block_size: int | None) -> AttentionCase:
    return AttentionCase(3, q_len, cached, block_size, 4, 2, 64, SMALL_DTYPE, real_size=False)


def real_attention(num_sequences: int, q_len: int, cached: int, block_size: int | None) -> AttentionCase:
    """The shape of an 8-billion-parameter model of today: 32 query heads, 8 key/value heads, D 128."""
    return AttentionCase(num_sequences, q_len, cached, block_size, 32, 8, 128, torch.bfloat16, real_size=True)


def paged_cache(case: AttentionCase, generator: torch.Generator) -> PagedCache:
    """A full cache, its blocks dealt to the sequences in random order, with as many foreign blocks as one sequence has."""
    assert case.block_size is not None
    columns = -(-case.k_len // case.block_size)
    num_blocks = (case.num_sequences + 1) * columns
    order = torch.randperm(num_blocks, generator=generator, device=DEVICE).int()
    block_tables = order[: case.num_sequences * columns].reshape(case.num_sequences, columns)
    shape = (num_blocks, case.block_size, case.kv_heads, case.head_dim)
    return PagedCache(randn(shape, case.dtype, generator), randn(shape, case.dtype, generator), block_tables)


def cumulative(length: int, count: int) -> torch.Tensor:
    """cu_seqlens of `count` sequences of the same length."""
    return torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * length


def randn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE, generator=generator)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def on_this_machine(*cases):
    """The small cases, and on a GPU those of real size too."""
    return [case for case in cases if ON_GPU or not case.real_size]
