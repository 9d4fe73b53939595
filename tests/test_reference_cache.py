"""The cache of the reference: allocation, layer views, and a store that is bit for bit right (clauses KV-1...5)."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import allocate_kv_cache, layer_views, store_kvcache

INTEGER_OF = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
SPECIAL_BITS = {  # -0.0, +-inf, least and largest subnormal, quiet NaN with payload, signalling NaN, negative NaN
    torch.float16: [0x8000, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x7E2A, 0x7D01, 0xFFFF],
    torch.bfloat16: [0x8000, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x7FEA, 0x7F81, 0xFFFF],
    torch.float32: [0x80000000, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF, 0x7FC12345, 0x7F800001, 0xFFFFFFFF],
}


def random_bits(shape, dtype, seed):
    """An integer tensor whose bits, read as `dtype`, hold every special value among random ones."""
    integer = INTEGER_OF[dtype]
    info = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(info.min, info.max + 1, shape, dtype=integer, generator=generator)
    special = torch.tensor(SPECIAL_BITS[dtype], dtype=torch.int64).to(integer)  # wraps to the signed value of the same bits
    chosen = torch.rand(shape, generator=generator) < 0.3
    return torch.where(chosen, special[torch.randint(len(special), shape, generator=generator)], bits)


def expected_image(before, bits, slots):
    """The cache (N, S, Hk, D) after the store, in integers, by a flat copy."""
    image = before.clone().contiguous().numpy()
    flat = image.reshape(image.shape[0] * image.shape[1], -1)
    for row, slot in zip(bits.numpy().reshape(len(bits), flat.shape[1]), slots, strict=True):
        if slot >= 0:
            flat[slot] = row
    return torch.from_numpy(image)


def check_store(k_bits, v_bits, k_cache_bits, v_cache_bits, slots, dtype, index_dtype=torch.int32, store=store_kvcache):
    """Store float views of the integer tensors, then compare the whole caches and the inputs in integers."""
    k_before, v_before = k_bits.clone(), v_bits.clone()
    expected_k, expected_v = expected_image(k_cache_bits, k_bits, slots), expected_image(v_cache_bits, v_bits, slots)
    slot_mapping = torch.tensor(slots, dtype=index_dtype)
    result = store(*(x.view(dtype) for x in (k_bits, v_bits, k_cache_bits, v_cache_bits)), slot_mapping)
    assert result is None
    assert torch.equal(k_cache_bits, expected_k) and torch.equal(v_cache_bits, expected_v)
    assert torch.equal(k_bits, k_before) and torch.equal(v_bits, v_before)
    assert slot_mapping.tolist() == slots


def test_allocate_and_layer_views():
    kv_cache = allocate_kv_cache(3, 5, 4, 2, 8, dtype=torch.bfloat16)
    assert kv_cache.shape == (2, 3, 5, 4, 2, 8) and kv_cache.dtype == torch.bfloat16 and kv_cache.is_contiguous()
    assert allocate_kv_cache(1, 1, 1, 1, 1).dtype == torch.float32
    assert allocate_kv_cache(1, 1, 1, 1, 1, device="meta").device.type == "meta"
    for layer in range(3):
        for view in layer_views(kv_cache, layer):
            assert view.shape == (5, 4, 2, 8)
            assert view.untyped_storage().data_ptr() == kv_cache.untyped_storage().data_ptr()


def test_layer_views_are_disjoint_and_cover_the_cache():
    kv_cache = allocate_kv_cache(3, 5, 4, 2, 8).zero_()
    views = [view for layer in range(3) for view in layer_views(kv_cache, layer)]
    for view in views:
        assert torch.all(view == 0), "an earlier view wrote here"
        view.add_(1)
    assert torch.all(kv_cache == 1)


def test_layer_views_keys_first():
    kv_cache = torch.arange(2 * 3 * 4).reshape(2, 3, 4, 1, 1, 1)
    k_cache, v_cache = layer_views(kv_cache, 1)
    assert (k_cache.flatten().tolist(), v_cache.flatten().tolist()) == ([4, 5, 6, 7], [16, 17, 18, 19])


def test_hand_worked_store():
    """Block size 4, block table [7, 9], the worked slots; the mapping's third row is padding."""
    k_cache, v_cache = torch.zeros(10, 4, 1, 1), torch.zeros(10, 4, 1, 1)
    key = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(4, 1, 1)
    store_kvcache(key, 10 * key, k_cache, v_cache, torch.tensor([31, 36, -1, 37]))
    assert {i: x for i, x in enumerate(k_cache.flatten().tolist()) if x} == {31: 1.0, 36: 2.0, 37: 4.0}
    assert {i: x for i, x in enumerate(v_cache.flatten().tolist()) if x} == {31: 10.0, 36: 20.0, 37: 40.0}
    assert (k_cache[7, 3].item(), k_cache[9, 0].item(), k_cache[9, 1].item()) == (1.0, 2.0, 4.0)


@pytest.mark.parametrize("dtype", INTEGER_OF, ids=str)
def test_the_special_bits_are_what_they_are_called(dtype):
    special = torch.tensor(SPECIAL_BITS[dtype], dtype=torch.int64).to(INTEGER_OF[dtype]).view(dtype)
    tiny = torch.finfo(dtype).tiny
    assert special[0] == 0 and torch.signbit(special[0])
    assert special[1:3].tolist() == [float("inf"), -float("inf")]
    assert 0 < special[3] < tiny and -tiny < special[4] < 0
    assert torch.isnan(special[5:]).all()


@pytest.mark.parametrize("dtype", INTEGER_OF, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_store_is_bit_exact_and_changes_nothing_else(dtype, data):
    num_blocks, block_size, kv_heads, head_dim = data.draw(st.tuples(*[st.integers(1, 5)] * 4), label="N, S, Hk, D")
    slots = data.draw(st.lists(st.integers(0, num_blocks * block_size - 1), unique=True), label="slots")
    for place in data.draw(st.lists(st.integers(0, len(slots)), max_size=3), label="padding at"):
        slots.insert(place, -1)
    index_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label="index dtype")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    rows, cache = (len(slots), kv_heads, head_dim), (num_blocks, block_size, kv_heads, head_dim)
    key, value = random_bits(rows, dtype, seed), random_bits(rows, dtype, seed + 1)
    k_cache, v_cache = random_bits(cache, dtype, seed + 2), random_bits(cache, dtype, seed + 3)
    check_store(key, value, k_cache, v_cache, slots, dtype, index_dtype)


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -1], [-1, 0], [0, -1, 11], [11, -1]], ids=str)
def test_padding_and_no_token_at_all(slots):
    key, value = random_bits((len(slots), 2, 3), torch.float16, 1), random_bits((len(slots), 2, 3), torch.float16, 2)
    k_cache, v_cache = random_bits((3, 4, 2, 3), torch.float16, 3), random_bits((3, 4, 2, 3), torch.float16, 4)
    check_store(key, value, k_cache, v_cache, slots, torch.float16)


def fused_qkv(bits):
    """key and value as slices of a fused row (T, Hq + 2 Hk, D) with Hq = 4, Hk = 2."""
    return bits[:, 4:6], bits[:, 6:8]


@pytest.mark.parametrize("dtype", INTEGER_OF, ids=str)
@pytest.mark.parametrize("layout", ["layer views", "interleaved", "heads first"])
def test_strided_inputs_and_caches(layout, dtype):
    """All strides at once: fused key and value, into caches that are views; every byte around them stays."""
    qkv = random_bits((5, 8, 3), dtype, 10)
    shapes = {"layer views": (2, 3, 4, 4, 2, 3), "interleaved": (4, 4, 2, 2, 3), "heads first": (2, 4, 2, 4, 3)}
    base = random_bits(shapes[layout], dtype, 11)

    def caches(whole):
        if layout == "layer views":
            return whole[0, 1], whole[1, 1]
        if layout == "interleaved":
            return whole[:, :, 0], whole[:, :, 1]
        return whole[0].transpose(1, 2), whole[1].transpose(1, 2)

    expected_base, slots = base.clone(), [15, 0, -1, 6, 9]
    for view, bits in zip(caches(expected_base), fused_qkv(qkv), strict=True):
        view.copy_(expected_image(view, bits, slots))
    check_store(*fused_qkv(qkv), *caches(base), slots, dtype)
    assert torch.equal(base, expected_base)


@pytest.mark.parametrize("fault", ["a NaN payload", "a zero's sign", "the row below", "V for K"])
def test_the_comparison_sees_small_faults(fault):
    """Negative control: the check is made on a store with one fault."""

    def faulty_store(key, value, k_cache, v_cache, slot_mapping):
        store_kvcache(key, value, k_cache, v_cache, slot_mapping)
        bits = k_cache.view(torch.int16)
        last = np.unravel_index(int(slot_mapping[-1]), k_cache.shape[:2])
        if fault == "a NaN payload":
            bits[torch.isnan(k_cache)] = 0x7E00
        elif fault == "a zero's sign":
            bits[k_cache == 0] = 0
        elif fault == "the row below":
            k_cache[last[0], last[1] - 1] = k_cache[last]
        else:
            k_cache[last] = value[-1]

    bits = [random_bits(shape, torch.float16, seed) for seed, shape in enumerate([(6, 2, 8)] * 2 + [(3, 4, 2, 8)] * 2)]
    check_store(*[b.clone() for b in bits], [3, 9, 4, -1, 0, 6], torch.float16)
    with pytest.raises(AssertionError):
        check_store(*bits, [3, 9, 4, -1, 0, 6], torch.float16, store=faulty_store)


def test_every_row_goes_to_any_slot():
    """All 24 orders of four rows in a cache of two blocks of two: a permutation never moves a row twice."""
    for slots in itertools.permutations(range(4)):
        key, cache = torch.arange(1.0, 5.0).reshape(4, 1, 1), torch.zeros(2, 2, 1, 1)
        store_kvcache(key, key, cache, torch.zeros(2, 2, 1, 1), torch.tensor(slots))
        assert [cache.flatten()[slot].item() for slot in slots] == [1.0, 2.0, 3.0, 4.0]
