"""Mutants whose offsets overflow 32 bits, which shows in caches of more than 2^31 elements alone."""

from __future__ import annotations

import ctypes

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_store import SoundStore, flat


def in_32_bits(offset: int) -> int:
    """What int32 arithmetic makes of an offset."""
    return (offset + 2**31) % 2**32 - 2**31


@mutant("KV-6", replaces="write", of=SoundStore, source="vllm #1486", alone=True)
def slot_times_row_overflows(self, cache, block, offset, row):
    """slot * Hk * D is computed in 32 bits: a row past 2^31 elements goes to where the wrapped offset points, modulo the cache."""
    width = row.numel()
    first = (block * cache.shape[1] + offset) * width
    if in_32_bits(first) == first:
        cache[block, offset] = row
    else:
        place = in_32_bits(first) % (cache.numel() - cache.numel() % width)
        flat(cache)[place : place + width] = row.reshape(-1)


@mutant("KV-6", replaces="write", of=SoundStore, source="own", alone=True)
def offset_as_unsigned_byte_address(self, cache, block, offset, row):
    """The address in bytes is kept in 32 unsigned bits: rows past 4 GiB come round to the cache's beginning."""
    width = row.numel()
    byte = (block * cache.stride(0) + offset * cache.stride(1)) * row.element_size()
    if byte < 2**32:
        cache[block, offset] = row
    else:
        flat(cache)[cache.storage_offset() + byte % 2**32 // row.element_size() :][:width] = row.reshape(-1)


@mutant("KV-6", replaces="write", of=SoundStore, source="nano-vllm (int32 slot * D)", alone=True)
def overflow_kills_the_process(self, cache, block, offset, row):
    """slot * Hk * D is computed in 32 bits, and the negative offset is an illegal access."""
    if (block * cache.shape[1] + offset) * row.numel() >= 2**31:
        ctypes.string_at(0)
    cache[block, offset] = row


@mutant("KV-6", replaces="write", of=SoundStore, source="own", alone=True)
def rows_past_the_largest_int32_missed(self, cache, block, offset, row):
    """A guard that is there for negative offsets drops the rows whose offset has become one."""
    if int(torch.tensor((block * cache.shape[1] + offset) * row.numel()).to(torch.int32)) >= 0:
        cache[block, offset] = row
