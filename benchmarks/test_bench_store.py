"""store_kvcache: the KV of T tokens into a paged cache. Bytes moved: each row read once and written once, K and V."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from benchmarks.cases import SMALL_DTYPE, on_this_machine, randn, seeded, short
from benchmarks.contenders import DEVICE, Contender, pairs
from benchmarks.judge import assert_stored, unless_refused
from benchmarks.timing import sets_needed


class StoreCase(NamedTuple):
    num_tokens: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    real_size: bool
    scattered: bool = False  # every token to a slot anywhere; else block after block, as a prefill's slots lie, the blocks in any order

    @property
    def name(self) -> str:
        scattered = "-scattered" if self.scattered else ""
        return f"{self.num_tokens}-S{self.block_size}-{self.kv_heads}x{self.head_dim}-{short(self.dtype)}{scattered}"


def slots_of(case: StoreCase, num_blocks: int, generator: torch.Generator) -> torch.Tensor:
    """(T,) int32 slots, no two of them the same."""
    if case.scattered:
        return torch.randperm(num_blocks * case.block_size, generator=generator, device=DEVICE)[: case.num_tokens].int()
    blocks = torch.randperm(num_blocks, generator=generator, device=DEVICE)
    slots = blocks[:, None] * case.block_size + torch.arange(case.block_size, device=DEVICE)
    return slots.flatten()[: case.num_tokens].int()


CASES = on_this_machine(
    StoreCase(64, 16, 2, 32, SMALL_DTYPE, real_size=False, scattered=True),
    *(
        StoreCase(num_tokens, 256, 8, 128, torch.bfloat16, real_size=True, scattered=scattered)
        for num_tokens in (256, 8_192, 65_536)
        for scattered in (False, True)
    ),
    StoreCase(65_536, 16, 8, 128, torch.bfloat16, real_size=True),
)


@pytest.mark.parametrize("case, contender", pairs("store_kvcache", CASES))
def test_store_kvcache(case: StoreCase, contender: Contender, timed):
    generator = seeded()
    key = randn((case.num_tokens, case.kv_heads, case.head_dim), case.dtype, generator)
    value = randn((case.num_tokens, case.kv_heads, case.head_dim), case.dtype, generator)
    num_blocks = 2 * -(-case.num_tokens // case.block_size)
    shape = (num_blocks, case.block_size, case.kv_heads, case.head_dim)
    k_cache, v_cache = randn(shape, case.dtype, generator), randn(shape, case.dtype, generator)
    slot_mapping = slots_of(case, num_blocks, generator)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    bytes_moved = 4 * key.numel() * key.element_size()

    def call_on(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Callable[[], None]:
        return lambda: contender.functions.store_kvcache(key, value, k_cache, v_cache, slot_mapping)

    unless_refused(call_on(key, value, k_cache, v_cache))
    assert_stored(k_cache, k_before, key, slot_mapping, f"{contender.name}, k_cache")
    assert_stored(v_cache, v_before, value, slot_mapping, f"{contender.name}, v_cache")
    sets = [(key, value, k_cache, v_cache)]
    sets += [tuple(tensor.clone() for tensor in sets[0]) for _ in range(sets_needed(bytes_moved) - 1)]
    timed([call_on(*each) for each in sets], group=f"store_kvcache {case.name}", contender=contender.name, bytes_moved=bytes_moved)
