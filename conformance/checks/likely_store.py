"""A likely cause for a slot that does not hold its row: what lies there in its place, or what of the row arrived."""

from __future__ import annotations

import torch

from conformance.buffers import Buffers, bits
from conformance.cases.stores import StoreCase

MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}


def likely_of_row(buffers: Buffers, cache_name: str, row: int, slot: int, case: StoreCase) -> str:
    """`row` must lie in `slot` of this cache, and does not."""
    named = {buffer.name: buffer for buffer in buffers.all}
    rows_name, others_name = ("key", "value") if cache_name == "k_cache" else ("value", "key")
    rows, others = bits(named[rows_name].view), bits(named[others_name].view)
    cache = named[cache_name]
    place = slot // case.block_size, slot % case.block_size
    stored, before, must = bits(cache.view)[place], cache.image(cache.before)[place], rows[row]
    if must.numel() > 1 and torch.equal(stored, others[row]):
        return "key and value are swapped"
    if torch.equal(stored, before):
        return not_written(buffers, cache_name, must, slot, case)
    if must.numel() > 1:
        for source, name in ((rows, rows_name), (others, others_name)):
            same = (source == stored).flatten(1).all(dim=1).nonzero().flatten().tolist()
            if same:
                return f"another row lies here: row {same[0]} of {name}, {its_slot(case, same[0])}"
        if torch.equal(stored, must.T.reshape(must.shape)):
            return "heads are transposed: the row lies here head dimension first, (D, Hk) in place of (Hk, D)"
    inexact = lost_bits(stored, must, case)
    if inexact:
        return inexact
    if not named[rows_name].view.is_contiguous() and torch.equal(stored, packed_row(named[rows_name].view, row)):
        return f"rows of {rows_name} are read Hk * D = {must.numel()} elements apart, whatever their strides"
    return in_part(stored.flatten(), must.flatten(), before.flatten())


def its_slot(case: StoreCase, row: int) -> str:
    return f"whose slot is {case.slots[row]}" if case.slots[row] >= 0 else "which is to be skipped (-1)"


def not_written(buffers: Buffers, cache_name: str, must: torch.Tensor, slot: int, case: StoreCase) -> str:
    """Whether the row went to another slot."""
    cache = next(buffer for buffer in buffers.all if buffer.name == cache_name)
    now, before = bits(cache.view).flatten(0, 1), cache.image(cache.before).flatten(0, 1)
    here = (now == must).flatten(1).all(dim=1) & (now != before).flatten(1).any(dim=1)
    found = [other for other in here.nonzero().flatten().tolist() if other != slot] if must.numel() > 1 else []
    if not found:
        return "the row was not written: the last row, tile or the row's mapping is missed"
    other, size = found[0], case.block_size
    told = f"the row lies in slot {other} in place of slot {slot}"
    if other == slot % 256 or other == slot % 65536:
        return f"{told}: slots are kept in {8 if other == slot % 256 else 16} bits"
    if other % size == slot % size:
        return f"{told}: the right offset, another block"
    if other // size == slot // size:
        return f"{told}: the right block, another offset"
    return told


def lost_bits(stored: torch.Tensor, must: torch.Tensor, case: StoreCase) -> str:
    """All that differ are NaN, zeros or subnormals: the row went through arithmetic."""
    mantissa = MANTISSA_BITS[case.dtype]
    exponent = (1 << (8 * case.dtype.itemsize - 1)) - (1 << mantissa)
    wrong = stored != must
    fraction, high = must[wrong] & ((1 << mantissa) - 1), must[wrong] & exponent
    nan, zero, subnormal = (high == exponent) & (fraction != 0), (high == 0) & (fraction == 0), (high == 0) & (fraction != 0)
    if not bool((nan | zero | subnormal).all()):
        low = bool((stored[wrong] >> (mantissa - 3) == must[wrong] >> (mantissa - 3)).all())
        return "bits are not exact: the last ones of the mantissa are lost, as in a conversion to fewer bits" if low else ""
    kinds = [name for name, those in (("NaN payloads", nan), ("-0.0", zero), ("subnormals", subnormal)) if bool(those.any())]
    return f"bits are not exact: {' and '.join(kinds)} are lost, as when a row goes through a conversion or a sum"


def packed_row(rows: torch.Tensor, row: int) -> torch.Tensor:
    """Row `row` (Hk, D) to who takes rows to lie end to end; bits."""
    heads, dim = rows.shape[1:]
    return bits(rows.as_strided((heads, dim), (dim, 1), rows.storage_offset() + row * heads * dim))


def in_part(stored: torch.Tensor, must: torch.Tensor, before: torch.Tensor) -> str:
    """One run of the row's elements arrived, and the rest holds what the slot held."""
    arrived, count = stored == must, len(must)
    first = int((~arrived).nonzero()[0])
    if first and torch.equal(stored[first:], before[first:]):
        return f"only the first {first} of {count} elements of the row arrived: a tile, or a width rounded down"
    last = int((~arrived).nonzero()[-1]) + 1
    if last < count and torch.equal(stored[:last], before[:last]):
        return f"only the last {count - last} of {count} elements of the row arrived"
    return "the row was written in part, or with another stride than its tensor has"
