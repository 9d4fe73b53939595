"""Mutants of the store kernel."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_store import SoundStore, flat


@mutant("KV-3", replaces="skips", of=SoundStore, source="triton #619")
def minus_one_as_index(self, slot, cache):
    """-1 is used as an index: the cache's last slot is overwritten."""
    return False


@mutant("KV-3", replaces="slot_of_row", of=SoundStore, source="onnxruntime #32391")
def minus_one_clamped_to_zero(self, slots, t):
    """-1 is clamped to 0: slot 0 is overwritten."""
    return max(slots[t], 0)


@mutant("KV-3", replaces="rows_written", of=SoundStore, source="vllm-ascend #6344")
def stops_at_the_first_skip(self, count):
    """Rows after a skipped one are not written."""
    skipped = [t for t in range(count) if self.mapping[t] < 0]
    return range(skipped[0] if skipped else count)


@mutant("KV-1", replaces="sources", of=SoundStore, source="own")
def key_and_value_swapped(self, key, value):
    """K goes into the value cache and V into the key cache."""
    return value, key


@mutant("KV-4", replaces="row", of=SoundStore, source="flashinfer #527")
def row_stride_from_shape(self, rows, t):
    """A row's address is t * Hk * D whatever its stride: wrong for slices of a fused QKV row."""
    width = rows[0].numel()
    first = rows.storage_offset() + t * width
    return flat(rows)[first : first + width].view(rows.shape[1:])


@mutant("KV-4", replaces="write", of=SoundStore, source="aiter #3492")
def block_stride_from_shape(self, cache, block, offset, row):
    """A block's address is block * S * Hk * D whatever its stride: K runs into V where blocks are interleaved."""
    width = row.numel()
    first = cache.storage_offset() + (block * cache.shape[1] + offset) * width
    flat(cache)[first : first + width] = row.reshape(-1)


@mutant("KV-1", replaces="write", of=SoundStore, source="vllm #22036 (review)")
def heads_transposed(self, cache, block, offset, row):
    """The row is written head-dimension first."""
    cache[block, offset] = row.T.reshape(row.shape)


@mutant("KV-1", replaces="write", of=SoundStore, source="mojo_opset #266")
def first_tile_of_the_row_only(self, cache, block, offset, row):
    """Only the first 64 elements of a row are copied."""
    flat_row = row.reshape(-1).clone()
    held = cache[block, offset].reshape(-1)
    flat_row[64:] = held[64:]
    cache[block, offset] = flat_row.view(row.shape)


@mutant("KV-5", replaces="write", of=SoundStore, source="lmdeploy #3781")
def odd_rows_cut_to_a_power_of_two(self, cache, block, offset, row):
    """A row of more than 128 elements whose length is no multiple of 16 or 64 is cut to the power of two under it."""
    width = row.numel()
    held = cache[block, offset].reshape(-1).clone()
    whole = width < 8 or width % 64 == 0 or (width % 16 == 0 and width < 100) or (width & (width - 1)) == 0
    kept = width if whole else 1 << (width.bit_length() - 1)
    held[:kept] = row.reshape(-1)[:kept]
    cache[block, offset] = held.view(row.shape)


@mutant("KV-5", replaces="read_mapping", of=SoundStore, source="vllm-ascend #16664")
def int64_mapping_read_as_int32(self, slot_mapping):
    """An int64 mapping is read as int32: every second entry is the upper half, 0 or -1."""
    return slot_mapping.contiguous().view(torch.int32)[: len(slot_mapping)]


@mutant("KV-1", replaces="slot_of_row", of=SoundStore, source="own")
def all_rows_to_the_first_slot(self, slots, t):
    """Every row goes to the first row's slot."""
    return slots[0] if slots[t] >= 0 else -1


@mutant("KV-1", replaces="rows_written", of=SoundStore, source="own")
def one_row_too_few(self, count):
    """The last row is not written."""
    return range(count - 1)


@mutant("KV-1", replaces="rows_written", of=SoundStore, source="own")
def partial_tile_of_rows_missed(self, count):
    """Rows past the last whole tile of 16 are not written when there is a whole tile."""
    return range(count - count % 16 if count > 16 else count)


@mutant("KV-2", replaces="write", of=SoundStore, source="mojo_opset #266")
def neighbour_clobbered_past_the_row(self, cache, block, offset, row):
    """The vector width is rounded up: the element after the row is zeroed, unless a later row lies there."""
    cache[block, offset] = row
    if offset + 1 < cache.shape[1] and block * cache.shape[1] + offset + 1 not in self.mapping:
        cache[block, offset + 1].reshape(-1)[0:1].zero_()


@mutant("KV-2", replaces="skips", of=SoundStore, source="rvllm #32")
def slot_zero_touched(self, slot, cache):
    """Slot 0 serves as the padding's slot and is zeroed by every call that does not map it."""
    if 0 not in self.mapping:
        cache[0, 0] = 0
    return slot < 0


@mutant("KV-1", replaces="row", of=SoundStore, source="vllm #54338")
def bits_through_float(self, rows, t):
    """Rows go through a float conversion: NaN payloads and subnormals are lost."""
    return rows[t].where((rows[t] & 0x7F) != 1, rows[t] & ~0x7F)


@mutant("KV-1", replaces="row", of=SoundStore, source="own")
def negative_zero_lost(self, rows, t):
    """-0.0 is stored as +0.0, as x + 0 does."""
    lowest = torch.iinfo(rows.dtype).min
    return torch.where(rows[t] == lowest, torch.zeros_like(rows[t]), rows[t])


@mutant("KV-1", replaces="block_and_offset", of=SoundStore, source="vllm #47056")
def offset_by_sixteen(self, slot, block_size):
    """The kernel splits slots by a page of 16 whatever the cache's block size."""
    return (slot // 16) * 16 // block_size, (slot // 16) * 16 % block_size + min(slot % 16, block_size - 1) % block_size


@mutant("CLAIM-4", replaces="require_slots", of=SoundStore, source="nano-vllm (its guard is equality with -1)", alone=True)
def bad_slots_pass(self, slots, num_slots):
    """A slot past the cache is taken modulo its size, and no error is raised."""
    slots[:] = [slot if slot < 0 else slot % num_slots for slot in slots]


@mutant("KV-1", replaces="rows_written", of=SoundStore, source="vllm #52058")
def rows_counted_in_eight_bits(self, count):
    """The number of rows is kept in eight bits."""
    return range(count % 256 if count > 255 else count)


@mutant("KV-3", replaces="slot_of_row", of=SoundStore, source="rvllm #32", alone=True)
def nothing_mapped_goes_to_slot_zero(self, slots, t):
    """A call of eight rows or more that maps none of them writes its first row to slot 0."""
    return 0 if t == 0 and len(slots) >= 8 and max(slots) < 0 else slots[t]


@mutant("KV-5", replaces="rows_written", of=SoundStore, source="vllm #14666", alone=True)
def no_rows_no_grid(self, count):
    """A call without rows launches an empty grid, which is an error."""
    if count == 0:
        raise RuntimeError("invalid argument: grid size 0")
    return range(count)


@mutant("KV-2", replaces="skips", of=SoundStore, source="own", alone=True)
def scratch_in_slot_four_thousand(self, slot, cache):
    """In a cache of more than 4,096 slots, slot 4,096 serves as scratch."""
    block, offset = divmod(4096, cache.shape[1])
    if block < min(len(cache), 70_000) and 4096 not in self.mapping:
        cache[block, offset] = 0
    return slot < 0


@mutant("KV-4", replaces="sources", of=SoundStore, source="own (adversary)")
def value_read_with_the_keys_strides(self, key, value):
    """Value rows are read at the key's strides."""
    reachable = len(flat(value)) - value.storage_offset()
    needed = 1 + sum((size - 1) * stride for size, stride in zip(key.shape, key.stride(), strict=True)) if key.numel() else 0
    return key, value.as_strided(value.shape, key.stride(), value.storage_offset()) if needed <= reachable else value


@mutant("KV-1", replaces="write", of=SoundStore, source="own (adversary)")
def row_tail_past_a_thousand(self, cache, block, offset, row):
    """Only the first 1,024 elements of a row are copied."""
    held = cache[block, offset].reshape(-1).clone()
    held[:1024] = row.reshape(-1)[:1024]
    cache[block, offset] = held.view(row.shape)


@mutant("KV-4", replaces="read_mapping", of=SoundStore, source="xLLM #932")
def mapping_read_without_its_stride(self, slot_mapping):
    """slot_mapping is read as if it were contiguous: a view of every second element gives the wrong slots."""
    slots = slot_mapping.as_strided(slot_mapping.shape, (1,), slot_mapping.storage_offset())
    return slots.where(slots < 2**16, slots.new_tensor(-1))


@mutant("KV-3", replaces="skips", of=SoundStore, source="own", alone=True)
def whole_tiles_have_no_guard(self, slot, cache):
    """A number of rows that fills its tiles of 128 takes a path without the guard of -1."""
    return slot < 0 and len(self.mapping) % 128 != 0


@mutant("KV-1", replaces="write", of=SoundStore, source="own", alone=True)
def row_tail_past_four_thousand(self, cache, block, offset, row):
    """Only the first 4,096 elements of a row are copied."""
    held = cache[block, offset].reshape(-1).clone()
    held[:4096] = row.reshape(-1)[:4096]
    cache[block, offset] = held.view(row.shape)


@mutant("KV-1", replaces="rows_written", of=SoundStore, source="own", alone=True)
def rows_past_two_thousand(self, count):
    """The grid ends at 2,048 rows."""
    return range(min(count, 2048))


@mutant("KV-1", replaces="rows_written", of=SoundStore, source="own (adversary)", alone=True)
def rows_past_four_thousand(self, count):
    """The grid ends at 4,096 rows."""
    return range(min(count, 4096))


@mutant("KV-1", replaces="skips", of=SoundStore, source="own (adversary)")
def last_slot_of_a_single_block(self, slot, cache):
    """In a cache of one block the last slot is taken for the end, and left out."""
    return slot < 0 or (len(cache) == 1 and slot == cache.shape[1] - 1)


@mutant("KV-3", replaces="slot_of_row", of=SoundStore, source="own (adversary)")
def many_rows_have_no_guard(self, slots, t):
    """From 256 rows on a path without the guard: -1 goes to slot 0."""
    return slots[t] if len(slots) < 256 else max(slots[t], 0)


@mutant("KV-4", replaces="sources", of=SoundStore, source="own (adversary)", alone=True)
def many_rows_are_read_as_packed(self, key, value):
    """In calls of more than 128 rows key and value are taken to lie end to end."""
    if len(key) <= 128:
        return key, value
    heads, dim = key.shape[1:]
    return tuple(rows.as_strided(rows.shape, (heads * dim, dim, 1), rows.storage_offset()) for rows in (key, value))


@mutant("KV-4", replaces="read_mapping", of=SoundStore, source="own (adversary)")
def long_mapping_read_without_its_stride(self, slot_mapping):
    """An int64 mapping of many rows is read as if it were contiguous."""
    if slot_mapping.dtype != torch.int64 or len(slot_mapping) <= 128:
        return slot_mapping
    slots = slot_mapping.as_strided(slot_mapping.shape, (1,), slot_mapping.storage_offset())
    return slots.where(slots < 2**16, slots.new_tensor(-1))


@mutant("KV-3", replaces="read_mapping", of=SoundStore, source="own (adversary)")
def many_wide_slots_have_no_guard(self, slot_mapping):
    """An int64 mapping of 128 rows or more takes a path without the guard: -1 goes to slot 0."""
    return slot_mapping.clamp(min=0) if slot_mapping.dtype == torch.int64 and len(slot_mapping) >= 128 else slot_mapping


@mutant("KV-4", replaces="write", of=SoundStore, source="own (adversary)")
def many_rows_ignore_the_stride_of_heads(self, cache, block, offset, row):
    """In calls of more than 128 rows the heads of a slot are taken to lie end to end."""
    first, storage = cache.storage_offset() + block * cache.stride(0) + offset * cache.stride(1), flat(cache)
    if len(self.mapping) <= 128 or first + row.numel() > len(storage):
        cache[block, offset] = row
    else:
        storage[first : first + row.numel()] = row.reshape(-1)
