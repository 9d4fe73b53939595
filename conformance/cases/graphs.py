"""Decode steps of one bucket: captured at some lengths, replayed with fewer sequences, longer ones, wider and narrower tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from conformance.capabilities import Capabilities
from conformance.cases.tables import blocks_for, shuffled_tables

BLOCK_SIZES = (16, 4, 1, 3, 64, 256)
LONGEST = 100  # times a captured length


@dataclass(frozen=True)
class GraphCase:
    dtype: torch.dtype
    block_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    bucket: int  # rows of the captured step
    captured: tuple[int, ...]  # context_lens of its capture
    replays: tuple[tuple[int, ...], ...]  # context_lens of each replay; rows after them are padding
    table_seed: int = 0

    @property
    def width(self) -> int:
        """Columns of block_tables, the same in every replay."""
        return max(blocks_for(n, self.block_size) for lens in (self.captured, *self.replays) for n in lens) + 1

    @property
    def num_blocks(self) -> int:
        return max(sum(blocks_for(n, self.block_size) for n in lens) for lens in (self.captured, *self.replays)) + 2

    def tables(self, step: int, lens: tuple[int, ...]) -> list[list[int]]:
        """Block 0 is always in use: slot 0 is where padding that is not skipped would be written."""
        tables = shuffled_tables([blocks_for(n, self.block_size) for n in lens], self.num_blocks, self.table_seed + step)
        if any(0 in table for table in tables):
            return tables
        first = tables[0][0]
        return [[0 if block == first else block for block in table] for table in tables]

    def headline(self, implementation: str, device: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{implementation}   {dtype} · S {self.block_size} · Hk {self.num_kv_heads} · G {self.group_size} · D {self.head_dim} · {device}"
        )

    def literals(self) -> list[tuple[str, str]]:
        return [
            ("captured", f"{self.bucket} rows, context_lens {list(self.captured)}, tables of {self.width} columns"),
            ("replayed", ", then ".join(f"context_lens {list(lens)}" for lens in self.replays)),
        ]

    def size(self) -> int:
        return sum(sum(lens) for lens in self.replays)


@st.composite
def graphs(draw: st.DrawFn, capabilities: Capabilities, *, longest: int = 4096) -> GraphCase:
    block_size = draw(st.sampled_from(capabilities.allowed("block_sizes", BLOCK_SIZES)), label="block_size")
    longest = min(longest, capabilities.max_context or longest)
    bucket = draw(st.sampled_from((4, 2, 1, 8)), label="bucket")
    captured = draw(st.lists(st.integers(1, min(40, longest)), min_size=bucket, max_size=bucket).map(tuple), label="captured lengths")
    most = min(longest, LONGEST * max(captured))
    around = sorted({min(most, max(1, n)) for n in (1, block_size, block_size + 1, 2 * block_size, 10 * max(captured), most)})
    lengths = st.one_of(st.sampled_from(around), st.integers(1, most))
    replay = st.lists(lengths, min_size=1, max_size=bucket).map(tuple)
    return GraphCase(
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        block_size=block_size,
        num_kv_heads=draw(st.sampled_from((1, 2)), label="num_kv_heads"),
        group_size=draw(st.sampled_from(capabilities.allowed("group_sizes", (1, 2, 4))), label="group_size"),
        head_dim=draw(st.sampled_from(capabilities.allowed("head_dims", (16, 64, 128))), label="head_dim"),
        bucket=bucket,
        captured=captured,
        replays=tuple(draw(st.lists(replay, min_size=1, max_size=3), label="replays")),
        table_seed=draw(st.integers(0, 999), label="table_seed"),
    )
