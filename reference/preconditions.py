"""What the reference asks of its arguments. A bad call gets a ValueError with one sentence that holds the values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LARGEST_INT32 = 2**31 - 1


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """The number with its noun: "1 block", "2 blocks"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def require_integers(tensor: torch.Tensor, name: str, shape: str) -> None:
    """`tensor` is int32 or int64 and has as many dimensions as `shape`, which is written as in "(B, M)"."""
    num_dims = len([letter for letter in shape.strip("()").split(",") if letter])
    require(tensor.dim() == num_dims, f"{name} has shape {tuple(tensor.shape)}, it must be {shape}")
    require(tensor.dtype in (torch.int32, torch.int64), f"{name} is {tensor.dtype}, it must be int32 or int64")


def require_int32_slots(slots: Sequence[int], positions: Sequence[int], who: str) -> None:
    """slot_mapping is int32: every slot, given with its position, must fit."""
    for slot, position in zip(slots, positions, strict=True):
        require(slot <= LARGEST_INT32, f"{who} has slot {slot} at position {position}, it does not fit int32")


def require_block_size(block_size: int) -> None:
    require(block_size >= 1, f"block_size is {block_size}, it must be at least 1")


def require_table(block_table: Sequence[int], num_tokens: int, block_size: int, who: str) -> None:
    """`block_table` must name a physical block for each of the first `num_tokens` tokens."""
    needed = -(-num_tokens // block_size)
    require(
        len(block_table) >= needed,
        f"{who} needs {count(needed, 'block')} for {count(num_tokens, 'token')} at block size {block_size}, its table has {len(block_table)}",
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
    require(cu_seqlens.dim() == 1 and len(cu_seqlens) >= 1, f"{name} has shape {tuple(cu_seqlens.shape)}, it must be (B+1,)")
    require_integers(cu_seqlens, name, "(B+1,)")
    sums: list[int] = cu_seqlens.tolist()
    require(sums[0] == 0, f"{name} starts at {sums[0]}, it must start at 0")
    for i in range(1, len(sums)):
        require(sums[i] >= sums[i - 1], f"{name} decreases from {sums[i - 1]} to {sums[i]} at entry {i}")
    if num_tokens is not None:
        require(sums[-1] == num_tokens, f"{name} ends at {sums[-1]}, it must end at the number of tokens, {num_tokens}")
    return sums


def require_block_tables(block_tables: torch.Tensor, num_sequences: int) -> None:
    """(B, M) integers, one row for each sequence of cu_seqlens_q."""
    require_integers(block_tables, "block_tables", "(B, M)")
    require(
        len(block_tables) == num_sequences,
        f"block_tables has {count(len(block_tables), 'row')}, cu_seqlens_q tells of {count(num_sequences, 'sequence')}",
    )
