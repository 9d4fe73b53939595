"""Sequences that grow over one cache: prefilled in chunks, then decoded a token at a time across a block's end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from conformance.capabilities import Capabilities
from conformance.cases.lengths import edges
from conformance.cases.sequences import NO_LIMIT
from conformance.cases.tables import blocks_for, shuffled_tables

BLOCK_SIZES = (4, 1, 2, 3, 16, 8, 5, 32, 64, 256)


@dataclass(frozen=True)
class GrowingCase:
    dtype: torch.dtype
    block_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    chunks: tuple[tuple[int, ...], ...]  # of each sequence: prefill chunk sizes
    steps: int  # decode steps after the last chunk
    table_seed: int
    data_seed: int

    @property
    def final_lengths(self) -> list[int]:
        return [sum(chunks) + self.steps for chunks in self.chunks]

    @property
    def num_blocks(self) -> int:
        return sum(blocks_for(n, self.block_size) for n in self.final_lengths) + 3

    @property
    def tables(self) -> list[list[int]]:
        return shuffled_tables([blocks_for(n, self.block_size) for n in self.final_lengths], self.num_blocks, self.table_seed)

    def headline(self, implementation: str, device: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{implementation}   {dtype} · S {self.block_size} · Hk {self.num_kv_heads} · G {self.group_size} · D {self.head_dim} · {device}"
        )

    def literals(self) -> list[tuple[str, str]]:
        return [
            ("prefill chunks", str([list(chunks) for chunks in self.chunks])),
            ("decode steps", str(self.steps)),
            ("block_tables", str(self.tables)),
        ]

    def size(self) -> int:
        return sum(self.final_lengths)


@st.composite
def growing(draw: st.DrawFn, capabilities: Capabilities, *, longest: int = 40) -> GrowingCase:
    block_size = draw(st.sampled_from(capabilities.allowed("block_sizes", BLOCK_SIZES)), label="block_size")
    most = capabilities.max_context or NO_LIMIT
    longest = min(most, max(longest, block_size + 3))
    around = [n for n in edges(block_size, longest) if n <= 2 * block_size + 1] or [1]
    chunks = draw(
        st.lists(st.lists(st.sampled_from(around), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple), label="chunks"
    )
    case = GrowingCase(
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        block_size=block_size,
        num_kv_heads=draw(st.sampled_from((1, 2)), label="num_kv_heads"),
        group_size=draw(st.sampled_from(capabilities.allowed("group_sizes", (1, 2, 3))), label="group_size"),
        head_dim=draw(st.sampled_from(capabilities.allowed("head_dims", (16, 64, 32, 128))), label="head_dim"),
        chunks=chunks,
        steps=draw(st.integers(1, 4), label="steps"),
        table_seed=draw(st.integers(0, 999), label="table_seed"),
        data_seed=draw(st.integers(0, 999), label="data_seed"),
    )
    steps = min(case.steps, most - 1)
    return replace(case, steps=steps, chunks=tuple(cut(chunks, most - steps) for chunks in case.chunks))


def cut(chunks: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The chunks of the first `most` tokens.

    >>> cut((5, 3), 6), cut((5, 3), 5)
    ((5, 1), (5,))
    """
    kept = [min(chunk, most - sum(chunks[:i])) for i, chunk in enumerate(chunks)]
    return tuple(chunk for chunk in kept if chunk > 0)
