"""Cases of store_kvcache: rows, slots, strides, and bits of every kind."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from hypothesis import strategies as st

from conformance.buffers import CACHE_LAYOUTS, ROW_LAYOUTS
from conformance.capabilities import Capabilities
from conformance.cases.attention import short
from conformance.cases.lengths import TILES

BLOCK_SIZES = (4, 1, 2, 3, 16, 8, 5, 32, 64, 100, 128, 256)
HEAD_SHAPES = ((1, 16), (2, 16), (1, 64), (3, 40), (8, 128), (5, 7), (1, 80), (4, 32), (2, 256), (1, 1), (3, 96), (9, 128), (32, 128), (2, 192))
MOST_BITS = 2**23 - 1  # elements of a tensor whose bits are all drawn
SKIPS = ("none", "first", "last", "interior", "some", "all")
NOTABLE_BITS = {
    torch.float16: (0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x7BFF),
    torch.bfloat16: (0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7F7F),
    torch.float32: (0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF),
}  # 0, -0, smallest and largest subnormal, +-inf, quiet and signalling NaN, NaN with every payload bit, largest finite


@dataclass(frozen=True)
class StoreCase:
    dtype: torch.dtype
    block_size: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    num_blocks: int
    skip: str = "none"  # which rows have slot -1
    slot_seed: int = 0
    data_seed: int = 0
    index_dtype: torch.dtype = torch.int32
    cache_layout: str = "plain"
    row_layout: str = "plain"
    value_layout: str = "plain"
    strided_mapping: bool = False
    edge_slots: bool = True  # whether the first and the last slot of the cache are written too

    @cached_property
    def slots(self) -> list[int]:
        """slot_mapping: distinct slots in no order, -1 where rows are skipped."""
        shuffle = random.Random(self.slot_seed)
        total = self.num_blocks * self.block_size
        inner = list(range(total) if self.edge_slots else range(1, total - 1))
        slots = shuffle.sample(inner, self.num_rows)
        if self.num_rows == 0:
            return slots
        skipped = {
            "none": [],
            "first": [0],
            "last": [self.num_rows - 1],
            "interior": [self.num_rows // 2],
            "some": [t for t in range(self.num_rows) if shuffle.random() < 0.4],
            "all": list(range(self.num_rows)),
        }[self.skip]
        return [-1 if t in skipped else slot for t, slot in enumerate(slots)]

    def random_bits(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        """Values of every bit pattern, the notable ones often."""
        generator = torch.Generator().manual_seed(seed)
        width, count = self.dtype.itemsize, math.prod(shape)
        if count > MOST_BITS:  # they repeat
            return self.random_bits((MOST_BITS,), seed).repeat(-(-count // MOST_BITS))[:count].view(shape)
        integers = {2: torch.int16, 4: torch.int32}[width]
        raw = torch.randint(-(2 ** (8 * width - 1)), 2 ** (8 * width - 1), shape, generator=generator, dtype=torch.int64)
        notable = torch.tensor(NOTABLE_BITS[self.dtype], dtype=torch.int64)
        chosen = notable[torch.randint(0, len(notable), shape, generator=generator)]
        mixed = torch.where(torch.rand(shape, generator=generator) < 0.3, chosen, raw)
        signed = torch.where(mixed >= 2 ** (8 * width - 1), mixed - 2 ** (8 * width), mixed)
        return signed.to(integers).view(self.dtype)

    def headline(self, implementation: str, device: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{implementation}.store_kvcache   {dtype} · S {self.block_size} · Hk {self.num_kv_heads} · D {self.head_dim} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        return [
            ("slot_mapping", short(str(self.slots)) + f" {str(self.index_dtype).removeprefix('torch.')}"),
            ("caches", f"{self.num_blocks} blocks, {self.cache_layout} layout"),
            ("key, value", f"{self.row_layout} and {self.value_layout} rows"),
        ]

    def size(self) -> int:
        return self.num_rows


@st.composite
def stores(
    draw: st.DrawFn,
    capabilities: Capabilities,
    *,
    skips: tuple[str, ...] = ("none",),
    layouts: tuple[tuple[str, str], ...] = (("plain", "plain"),),
    index_dtypes: tuple[torch.dtype, ...] = (torch.int32,),
    head_shapes: tuple[tuple[int, int], ...] = HEAD_SHAPES,
    rows: tuple[int, ...] | None = None,
) -> StoreCase:
    """layouts: pairs of (cache layout, row layout) to draw from."""
    block_size = draw(st.sampled_from(capabilities.allowed("block_sizes", BLOCK_SIZES)), label="block_size")
    if capabilities.head_dims is not None:
        head_shapes = tuple(shape for shape in head_shapes if shape[1] in capabilities.head_dims) or ((2, min(capabilities.head_dims)),)
    num_kv_heads, head_dim = draw(st.sampled_from(head_shapes), label="heads")
    around_tiles = sorted({n for tile in TILES[:3] for n in (tile - 1, tile, tile + 1)})
    num_rows = draw(
        st.sampled_from(rows) if rows is not None else st.one_of(st.integers(1, 12), st.sampled_from(around_tiles)), label="num_rows"
    )
    if num_kv_heads * head_dim > 1024:
        num_rows = min(num_rows, 5)
    spare = draw(st.sampled_from([1, 2, 5]), label="spare blocks")
    if block_size > max(BLOCK_SIZES):  # the caches stay as small as those of smaller blocks
        spare, num_kv_heads = 1, max(1, min(num_kv_heads, 1024 * max(BLOCK_SIZES) // (block_size * head_dim)))
    cache_layout, row_layout = draw(st.sampled_from(layouts), label="layouts")
    return StoreCase(
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_rows=num_rows,
        num_blocks=-(-(num_rows + 2) // block_size) + spare,
        skip=draw(st.sampled_from(skips), label="skip"),
        slot_seed=draw(st.integers(0, 999), label="slot_seed"),
        data_seed=draw(st.integers(0, 999), label="data_seed"),
        index_dtype=draw(st.sampled_from(index_dtypes), label="index_dtype"),
        cache_layout=cache_layout,
        row_layout=row_layout,
        value_layout=row_layout if len(layouts) < 3 else draw(st.sampled_from(ROW_LAYOUTS), label="value_layout"),
        strided_mapping=len(layouts) >= 3 and draw(st.booleans(), label="strided_mapping"),
        edge_slots=draw(st.booleans(), label="edge_slots"),
    )


def fixed_stores(capabilities: Capabilities, *sizes: tuple[int, int, int], skip: str = "none") -> list[StoreCase]:
    """What every effort tries: (kv heads, head dimension, rows) past where a grid or a row is often cut."""
    block_size = capabilities.allowed("block_sizes", (16, *BLOCK_SIZES))[0]
    dims = [capabilities.allowed("head_dims", (head_dim,))[0] for _, head_dim, _ in sizes]
    return [
        StoreCase(capabilities.dtypes[0], block_size, -(-heads * head_dim // dim), dim, rows, -(-(rows + 2) // block_size) + 1, skip)
        for (heads, head_dim, rows), dim in zip(sizes, dims, strict=True)
    ]


def whole_pools(capabilities: Capabilities) -> list[StoreCase]:
    """A cache of one block, every slot of it written."""
    block_size = capabilities.allowed("block_sizes", (16, *BLOCK_SIZES))[0]
    return [replace(case, num_blocks=1) for case in fixed_stores(capabilities, (1, 16, block_size))]


def strided_stores(capabilities: Capabilities) -> list[StoreCase]:
    """More rows than a call of few: the path that such calls may take must know every stride, too."""
    (case,) = fixed_stores(capabilities, (2, 32, 300))
    strided = replace(case, cache_layout="interleaved", row_layout="fused", value_layout="head_major", strided_mapping=True)
    return [strided, replace(strided, index_dtype=torch.int64, cache_layout="head_major", slot_seed=1)]


STRIDED_LAYOUTS = tuple((cache, row) for cache in CACHE_LAYOUTS for row in ROW_LAYOUTS if (cache, row) != ("plain", "plain"))
