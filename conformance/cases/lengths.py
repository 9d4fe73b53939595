"""Lengths around every edge that a kernel can have: blocks, tiles, zero."""

from __future__ import annotations

from hypothesis import strategies as st

TILES = (16, 32, 64, 128, 256)


def edges(block_size: int, maximum: int) -> list[int]:
    """1, S - 1, S, S + 1, kS - 1, kS, kS + 1 and tile - 1, tile, tile + 1, up to `maximum`, smallest first."""
    around = {1, 2, 3, maximum}
    for multiple in (1, 2, 3, 4, 7):
        around.update({multiple * block_size - 1, multiple * block_size, multiple * block_size + 1})
    for tile in TILES:
        around.update({tile - 1, tile, tile + 1})
    return sorted(length for length in around if 1 <= length <= maximum)


def lengths(block_size: int, maximum: int) -> st.SearchStrategy[int]:
    """A sequence length of at least 1: on an edge, near the block size, or anywhere."""
    near_blocks = [n for n in edges(block_size, maximum) if n <= 4 * block_size + 1] or [1]
    return st.one_of(st.sampled_from(near_blocks), st.sampled_from(edges(block_size, maximum)), st.integers(1, maximum))
