"""Which tensors gpu_impl's Hopper prefill reads; all others go to the Triton kernel."""

import pytest
import torch

prefill_hopper = pytest.importorskip("gpu_impl.prefill_hopper", exc_type=ImportError)  # Gluon is not the same in every version of Triton

HEADS, KV_HEADS, DIM = 8, 2, 64


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def queries(*, heads=HEADS, dim=DIM):
    return half(6, heads, dim)


def caches(block_size=16, *, kv_heads=KV_HEADS, dim=DIM):
    return tuple(half(2, 3, block_size, kv_heads, dim))


def far_apart():
    """The heads of a token too far from each other for an offset within an item to be counted in 32 bits."""
    return torch.empty(HEADS * 2**24, dtype=torch.bfloat16).as_strided((6, HEADS, DIM), (DIM, 2**24, 1))  # never touched


QKV = half(6, HEADS + 2 * KV_HEADS, DIM)
TAKEN = {
    "packed": (queries(), *caches()),
    "a view of fused projections": (QKV[:, :HEADS], *caches()),
    "heads of 128, pages of 256": (queries(dim=128), *caches(256, dim=128)),
    "interleaved caches": (queries(), *half(3, 16, 2, KV_HEADS, DIM).unbind(2)),
    "heads first": (half(HEADS, 6, DIM).transpose(0, 1), *caches()),
}
LEFT = {
    "float32": (queries().float(), *(each.float() for each in caches())),
    "heads of 80": (queries(dim=80), *caches(dim=80)),
    "pages of 8": (queries(), *caches(8)),
    "pages of 48": (queries(), *caches(48)),
    "queries that begin anywhere": (half(6 * HEADS * DIM + 1)[1:].view(6, HEADS, DIM), *caches()),
    "queries whose dimensions lie apart": (half(6, HEADS, 2 * DIM)[..., ::2], *caches()),
    "queries an odd stride apart": (half(6, HEADS * DIM + 1)[:, :-1].unflatten(1, (HEADS, DIM)), *caches()),
    "queries whose heads lie far apart": (far_apart(), *caches()),
    "more heads in a group than are counted": (queries(heads=129), *caches(kv_heads=1)),
    "heads first in the cache": (queries(), *half(2, 3, KV_HEADS, 16, DIM).transpose(2, 3).unbind(0)),
    "caches with room between the blocks": (queries(), *half(2, 3, 20, KV_HEADS, DIM)[:, :, :16].unbind(0)),
    "caches without a block": (queries(), *half(2, 0, 16, KV_HEADS, DIM).unbind(0)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_it_takes(name):
    assert prefill_hopper.takes(*TAKEN[name], True)


@pytest.mark.parametrize("name", LEFT)
def test_it_leaves(name):
    assert not prefill_hopper.takes(*LEFT[name], True)


def test_without_a_cache_it_takes_any_number_of_keys():
    assert prefill_hopper.takes(QKV[:, :HEADS], QKV[:, HEADS : HEADS + KV_HEADS], QKV[:, HEADS + KV_HEADS :], False)


@pytest.mark.parametrize("group_size", [1, 2, 3, 7, 8, 71, 127, prefill_hopper.MOST_IN_GROUP])
def test_rows_are_told_apart_by_a_product(group_size):
    """n * ceil(65536 / G) >> 16 is n // G for every row that an item can have."""
    rows = range(group_size - 1 + prefill_hopper.ROWS.value)
    assert [n * -(-(1 << 16) // group_size) >> 16 for n in rows] == [n // group_size for n in rows]
