"""How attention's kernels are cut: tiles by head dimension and dtype, programs by shapes alone. Chosen from times on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu_impl.launch import INTERPRET, num_multiprocessors, power_of_two


class Tile(NamedTuple):
    """How a kernel is cut: rows and keys of a program's tile, warps of a program, loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def packs_group(max_seqlen_q: int, group_size: int) -> bool:
    """A short chunk packs the query heads of a group into one tile, so that their keys are read once."""
    return INTERPRET or max_seqlen_q * group_size <= 64


def prefill_tile(rows: int, max_seqlen_k: int, head_dim: int, dtype: torch.dtype) -> Tile:
    if INTERPRET:
        return Tile(min(power_of_two(rows), 256), min(power_of_two(max(max_seqlen_k, 1)), 512), 4, 1)
    if dtype == torch.float32:  # IEEE products run on the plain cores out of registers, which large tiles would spill
        return Tile(16 if rows <= 16 or head_dim > 64 else 32, 32, 4 if head_dim <= 64 else 8, 1)
    block_m = 16 if rows <= 16 else 64 if rows <= 64 else 128
    if head_dim > 128:
        return Tile(block_m, 64, 8 if block_m == 128 else 4, 2)
    if head_dim > 64:
        return Tile(block_m, 128 if block_m == 128 else 64, 8 if block_m == 128 else 4, 2)
    return Tile(block_m, 128 if block_m == 128 else 64, 8 if block_m == 128 else 4, 3)


def decode_tile(group_size: int, longest: int, head_dim: int, dtype: torch.dtype) -> Tile:
    if INTERPRET:
        return Tile(power_of_two(group_size), min(power_of_two(longest), 1024), 4, 1)
    if dtype == torch.float32:
        return Tile(16, 32, 4 if head_dim <= 64 else 8, 1)
    block_m = min(max(16, power_of_two(group_size)), 64)
    if head_dim <= 64:
        return Tile(block_m, 128, 4, 4)
    return Tile(block_m, 64 if head_dim <= 128 else 32, 4, 5)


def decode_programs(num_units: int, head_dim: int, device: torch.device) -> int:
    """How many programs share a batch: as many as keep the memory busy, from shapes alone, and no more than there may be tiles of keys."""
    if INTERPRET:
        return min(num_units, 7)
    return min(num_units, (3 if head_dim <= 64 else 2) * num_multiprocessors(device))


def kind_of_pages(block_size: int, block_n: int) -> str:
    """How a kernel finds a position's block: see PAGES in `gpu_impl.attention_kernels`."""
    if block_size & (block_size - 1):
        return "any"
    return "shift" if block_size % block_n else "tiles"
