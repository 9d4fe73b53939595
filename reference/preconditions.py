"""What the reference asks of its arguments. A bad call gets a ValueError with one sentence that holds the values."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)


def require_block_size(block_size: int) -> None:
    require(block_size >= 1, f"block_size is {block_size}, it must be at least 1")


def require_table(block_table: Sequence[int], num_tokens: int, block_size: int, who: str) -> None:
    """`block_table` must name a physical block for each of the first `num_tokens` tokens."""
    needed = -(-num_tokens // block_size)
    require(
        len(block_table) >= needed,
        f"{who} needs {needed} blocks for {num_tokens} tokens at block size {block_size}, its table has {len(block_table)}",
    )
    for column, block in enumerate(block_table[:needed]):
        require(block >= 0, f"{who} has block id {block} in column {column} of its table, ids start at 0")


def require_blocks_in_cache(block_table: Sequence[int], num_blocks: int, who: str) -> None:
    for column, block in enumerate(block_table):
        require(
            0 <= block < num_blocks,
            f"{who} has block id {block} in column {column} of its table, the cache has blocks 0 to {num_blocks - 1}",
        )


def require_cu_seqlens(cu_seqlens: torch.Tensor, num_tokens: int | None, name: str) -> list[int]:
    """Prefix sums from 0 that never decrease, and end at `num_tokens` where that is given. Returns them as a list."""
    sums = cu_seqlens.tolist()
    require(cu_seqlens.dim() == 1 and len(sums) >= 1, f"{name} has shape {tuple(cu_seqlens.shape)}, it must be (B+1,)")
    require(sums[0] == 0, f"{name} starts at {sums[0]}, it must start at 0")
    for i in range(1, len(sums)):
        require(sums[i] >= sums[i - 1], f"{name} decreases from {sums[i - 1]} to {sums[i]} at entry {i}")
    if num_tokens is not None:
        require(sums[-1] == num_tokens, f"{name} ends at {sums[-1]}, there are {num_tokens} tokens")
    return sums
