"""Keys, values and queries as a cheap function of what a token is: computed on the device, for a whole batch at once, and known everywhere.

A number names a token together with everything before it, as a model's KV depends on the whole prefix. Rows are bytes over 64: they look
random, and float16, bfloat16 and float32 hold them exactly, so that a cache is compared bit for bit with what it must hold.
"""

from __future__ import annotations

import torch

KEY, VALUE, QUERY = range(3)
# odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014) as signed integers: products wrap around
GAMMA, MIX_1, MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def rows_of(names: torch.Tensor, num_heads: int, head_dim: int, dtype: torch.dtype, kind: int) -> torch.Tensor:
    """(T, heads, D) in [-2, 2) for names (T,) int64; kind: KEY, VALUE or QUERY."""
    lanes = torch.arange(num_heads * head_dim, device=names.device) * 4 + kind + 1
    mixed = names[:, None] * GAMMA + lanes * MIX_2
    mixed = (mixed ^ (mixed >> 30)) * MIX_1
    mixed = (mixed ^ (mixed >> 27)) * MIX_2
    return (((mixed >> 40) & 255) - 128).to(dtype).div_(64).view(len(names), num_heads, head_dim)


def next_name(name: int, token: int) -> int:
    """The name of `token` after the token called `name`; the first token comes after 0. 62 bits."""
    mixed = (name * 6364136223846793005 + (token + 1) * 1442695040888963407) % 2**64
    return (mixed ^ (mixed >> 29)) % 2**62


def names_of(tokens: list[int]) -> list[int]:
    """The name of each position of a sequence."""
    names, name = [], 0
    for token in tokens:
        name = next_name(name, token)
        names.append(name)
    return names
