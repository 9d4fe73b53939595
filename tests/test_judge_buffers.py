"""The guarded buffers: views that do not overlap, every byte watched, every place named (conformance/buffers.py)."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.buffers import CACHE_LAYOUTS, PATTERN, RED_ZONE, ROW_LAYOUTS, Buffers, bits, dirty_free_memory, first_difference, index_in_view

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")
sizes = st.integers(1, 4)


def values_of(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def buffers(draw):
    """Buffers of one call: caches in some layout, rows in some layout, a table."""
    dtype, cache, row = (draw(st.sampled_from(choices)) for choices in (DTYPES, CACHE_LAYOUTS, ROW_LAYOUTS))
    shape = tuple(draw(sizes) for _ in range(4))
    made = Buffers(CPU)
    made.put_caches(values_of(shape, dtype), values_of(shape, dtype, 1), cache)
    made.put("key", values_of((draw(st.integers(0, 3)), *shape[2:]), dtype, 2), row)
    made.put_table("block_tables", torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape[:2]), draw(st.integers(0, 3)))
    return made


def elements_of(buffer):
    """The storage element of each element of the view, in the view's own order."""
    return buffer.image(torch.arange(len(buffer.storage))).flatten().tolist()


def storages(made):
    return {buffer.storage.data_ptr(): buffer for buffer in made.all}.values()


@given(buffers())
def test_views_keep_off_each_other_and_off_the_red_zones(made):
    for storage in storages(made):
        taken = [e for buffer in made.all if buffer.storage.data_ptr() == storage.storage.data_ptr() for e in elements_of(buffer)]
        assert len(taken) == len(set(taken))
        assert all(RED_ZONE <= element < len(storage.storage) - RED_ZONE for element in taken)


@given(buffers())
def test_index_in_view_is_the_inverse_of_indexing(made):
    for buffer in made.all:
        indices = list(itertools.product(*(range(size) for size in buffer.view.shape)))
        by_element = dict(zip(elements_of(buffer), indices, strict=True))
        for element in range(RED_ZONE - 3, len(buffer.storage) - RED_ZONE + 3):
            assert index_in_view(buffer.view, element) == by_element.get(element), (buffer.name, element)


@given(buffers(), st.data())
def test_one_flipped_bit_anywhere_is_seen_and_named(made, data):
    made.freeze()
    assert made.changed() == ""
    buffer = data.draw(st.sampled_from(made.all))
    element = data.draw(st.integers(0, len(buffer.storage) - 1))
    flat = bits(buffer.storage)
    bit = data.draw(st.integers(0, 8 * flat.element_size() - 1))
    mask = torch.tensor(1 << bit).to(flat.dtype)
    flat[element] ^= mask
    told = made.changed()
    owners = [b for b in made.all if b.storage.data_ptr() == buffer.storage.data_ptr() and element in elements_of(b)]
    if owners:
        assert f"at {owners[0].name}{list(index_in_view(owners[0].view, element))}" in told
    elif element < RED_ZONE:
        assert told.endswith(f" {RED_ZONE - element} elements before its first")
    elif element >= len(buffer.storage) - RED_ZONE:
        assert told.endswith(f" {element - len(buffer.storage) + RED_ZONE + 1} elements past its last")
    else:
        assert told.endswith(f"in the gap of its strides, storage element {element - RED_ZONE}")
    flat[element] ^= mask
    assert made.changed() == ""


@given(buffers())
def test_what_no_view_holds_is_the_pattern(made):
    """Red zones and the gaps of strides: whatever is read there is known, and finite."""
    for storage in storages(made):
        held = [e for buffer in made.all if buffer.storage.data_ptr() == storage.storage.data_ptr() for e in elements_of(buffer)]
        others = torch.ones(len(storage.storage), dtype=torch.bool)
        others[held] = False
        assert others.sum() >= 2 * RED_ZONE
        assert (storage.storage.view(torch.uint8).view(len(storage.storage), -1)[others] == PATTERN).all()
        assert torch.isfinite(storage.storage[others].double()).all()


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_caches_hold_what_they_were_given(layout, dtype):
    keys, values = values_of((3, 4, 2, 5), dtype), values_of((3, 4, 2, 5), dtype, 1)
    k_cache, v_cache = Buffers(CPU).put_caches(keys, values, layout)
    assert torch.equal(bits(k_cache.contiguous()), bits(keys)) and torch.equal(bits(v_cache.contiguous()), bits(values))
    assert k_cache.is_contiguous() == (layout in ("plain", "layer", "unlike"))
    assert v_cache.is_contiguous() == (layout in ("plain", "layer"))


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_rows_hold_what_they_were_given(layout):
    rows = values_of((3, 2, 5), torch.float16)
    view = Buffers(CPU).put("q", rows, layout)
    assert torch.equal(view, rows)
    assert view.stride() == {"plain": (10, 5, 1), "fused": (30, 5, 1), "head_major": (5, 15, 1), "unaligned": (10, 5, 1)}[layout]
    assert (view.storage_offset() % 8 != 0) == (layout in ("fused", "unaligned"))


def test_a_strided_vector_holds_every_second_element():
    view = Buffers(CPU).put("slot_mapping", torch.arange(5), "strided")
    assert view.tolist() == [0, 1, 2, 3, 4] and view.stride() == (2,)


@pytest.mark.parametrize(("layout", "vector", "matrix"), [("strided", 2, (6, 2)), ("transposed", 3, (1, 2))])
def test_metadata_lie_apart(layout, vector, matrix):
    lens, table = torch.arange(5, dtype=torch.int32), torch.arange(6, dtype=torch.int32).view(2, 3)
    made = Buffers(CPU)
    views = made.put("context_lens", lens, layout, gap=1), made.put("block_tables", table, layout, gap=0)
    assert torch.equal(views[0], lens) and torch.equal(views[1], table)
    assert views[0].stride() == (vector,) and views[1].stride() == matrix
    assert views[0].as_strided((2,), (1,), views[0].storage_offset()).tolist() == [0, 1]


def test_a_narrowed_table_has_the_pitch_of_the_wider_one():
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    view = Buffers(CPU).put_table("block_tables", table, 2)
    assert torch.equal(view, table) and view.stride() == (5, 1)


def test_a_layout_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="cache layout 'diagonal' is none of plain, layer"):
        Buffers(CPU).put_caches(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), "diagonal")


@pytest.mark.parametrize("payload", [0x7E01, 0xFE00, 0x7C01])
def test_nan_payloads_and_signed_zeros_are_told_apart(payload):
    made = Buffers(CPU)
    view = made.put("key", torch.full((2, 2), float("nan"), dtype=torch.float16))
    made.freeze()
    bits(view)[1, 0] = torch.tensor(payload).to(torch.int16)
    assert made.changed() == "key at key[1, 0]"
    view = made.put("value", torch.zeros(2, 2))
    bits(made.all[0].storage).copy_(made.all[0].before)
    made.freeze()
    view[0, 1] = -0.0
    assert made.changed() == "value at value[0, 1]"


def test_first_difference_is_the_first():
    left = torch.arange(12).view(3, 4)
    right = left.clone()
    assert first_difference(left, right) is None
    right[1, 2] = right[2, 3] = -1
    assert first_difference(left, right) == 6


def test_freed_memory_is_dirty():
    """The next allocation of the size that was dirtied is full of NaN, but for the bytes that the CPU's allocator keeps its lists in."""
    found = 0
    for _ in range(20):
        dirty_free_memory((64, 64), torch.float32, CPU)
        found += int(torch.empty(64, 64).isnan().sum()) > 64 * 64 - 32
    assert found > 0
