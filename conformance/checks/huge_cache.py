"""Calls on caches of more than 2^31 elements, and a look at the slots that were written, or read, and at those that an overflow would hit.

Copied as text into replay scripts, so it imports torch alone.
"""

from __future__ import annotations

import torch

HUGE = 2**31
PATTERN = 0x2A2A  # what lies in slots that are looked at and must stay


def store_and_look(store_kvcache, shape, dtype_name, slots, index_dtype_name, device) -> str:
    """Write one row to each of `slots` (-1: skipped) of two caches (N, S, Hk, D). Returns what is wrong in one sentence, or nothing."""
    num_blocks, block_size, num_kv_heads, head_dim = shape
    width, num_slots = num_kv_heads * head_dim, num_blocks * block_size
    caches = [torch.empty(shape, dtype=getattr(torch, dtype_name), device=device) for _ in range(2)]
    integer = {2: torch.int16, 4: torch.int32}[caches[0].element_size()]
    flat = [cache.view(integer).view(num_slots, width) for cache in caches]
    looked_at = sorted(places_to_look(slots, num_slots, width))
    for cache in flat:
        cache[looked_at] = PATTERN
    rows = []
    for first in (1, 7):  # of key, of value: every row another, every element of it too up to 16 bits
        numbers = torch.arange(len(slots) * width, device=device).view(len(slots), width) * 5 + first
        rows.append((numbers % 30011).to(integer))
    key, value = (row.view(getattr(torch, dtype_name)).view(len(slots), num_kv_heads, head_dim) for row in rows)
    store_kvcache(key, value, *caches, torch.tensor(slots, dtype=getattr(torch, index_dtype_name), device=device))
    for name, cache, written in zip(("k_cache", "v_cache"), flat, rows, strict=True):
        for slot in looked_at:
            row = slots.index(slot) if slot in slots else None
            must = written[row] if row is not None else torch.full_like(written[0], PATTERN)
            wrong = (cache[slot] != must).nonzero().flatten()
            if len(wrong):
                element = int(wrong[0])
                where = f"{name} slot {slot} = elements {slot * width} ... {(slot + 1) * width - 1}"
                what = f"row {row} must be here, and is not" if row is not None else "no row is mapped here, and it was written"
                bits = f"element {element} is 0x{int(cache[slot, element]) & 0xFFFF:04x}, it must be 0x{int(must[element]) & 0xFFFF:04x}"
                return f"{where}: {what} ({bits})"
    return ""


def places_to_look(slots: list[int], num_slots: int, width: int) -> set[int]:
    """The mapped slots, their neighbours, and where a row would go if its offset, or its address, were taken modulo 2^31 or 2^32."""
    looked_at = set()
    for slot in slots:
        if slot >= 0:
            aliases = {slot * width % modulus // width for modulus in (2**30, HUGE, 2 * HUGE)}
            looked_at |= {near for place in {slot, *aliases} for near in (place - 1, place, place + 1)}
    return {slot for slot in looked_at if 0 <= slot < num_slots}


def tables_and_lens(shape, longest) -> tuple[list[list[int]], list[int]]:
    """The block tables of two sequences of at most `longest` keys: blocks at both ends of the caches, and around 2^31; and their keys."""
    num_blocks, block_size, num_kv_heads, head_dim = shape
    edge = -(-HUGE // (block_size * num_kv_heads * head_dim))
    tables = [[num_blocks - 1, 0, edge], [edge - 1, num_blocks - 2, -1]]
    return tables, [min(2 * block_size + 1, head_dim, longest), min(2 * block_size - 1, head_dim - 1, longest)]


def attend_and_look(attention, decode, shape, dtype_name, group_size, longest, device) -> str:
    """Two sequences whose blocks lie at both ends of two caches (N, S, Hk, D) and around 2^31. Returns what is wrong, or nothing.

    q = 0, and V of position p is 1 in dimension p: the output is 1 / n in the first n dimensions. What else might be read is loud.
    """
    num_blocks, block_size, num_kv_heads, head_dim = shape
    width, dtype = num_kv_heads * head_dim, getattr(torch, dtype_name)
    k_cache, v_cache = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    tables, lens = tables_and_lens(shape, longest)
    used = {block for table in tables for block in table if block >= 0}
    aliases = {block * block_size * width % modulus // (block_size * width) for block in used for modulus in (2**30, HUGE, 2 * HUGE)}
    for block in {near for place in used | aliases for near in (place - 1, place, place + 1) if 0 <= near < num_blocks}:
        k_cache[block], v_cache[block] = 30000.0, 30000.0
    for table, n in zip(tables, lens, strict=True):
        for position in range(n):
            block, offset = table[position // block_size], position % block_size
            k_cache[block, offset], v_cache[block, offset] = 0.0, 0.0
            v_cache[block, offset, :, position] = 1.0
    q = torch.zeros(2, num_kv_heads * group_size, head_dim, dtype=dtype, device=device)
    metadata = {"scale": 0.25, "block_tables": torch.tensor(tables, dtype=torch.int32, device=device)}
    if decode:
        metadata["context_lens"] = torch.tensor(lens, dtype=torch.int32, device=device)
    else:
        metadata["cu_seqlens_q"] = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
        metadata["cu_seqlens_k"] = torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32, device=device)
        metadata["max_seqlen_q"], metadata["max_seqlen_k"] = 1, max(lens)
    out = attention(q, k_cache, v_cache, **metadata).double().cpu()
    for i, n in enumerate(lens):
        want = (torch.arange(head_dim) < n).double() / n
        # three roundings of bfloat16; one position more or less moves every element by 1 / n
        wrong = (~((out[i] - want).abs() <= want * 2.0**-7 * 1.5)).nonzero()
        if len(wrong):
            head, dim = (int(x) for x in wrong[0])
            told = f"out[{i}, {head}, {dim}] is {float(out[i, head, dim]):.5g}, it must be {float(want[dim]):.5g}"
            if dim >= n:
                return f"{told}: a slot is read that is none of sequence {i}'s"
            block = tables[i][dim // block_size]
            first = (block * block_size + dim % block_size) * width
            return f"{told}: position {dim} of sequence {i} lies in physical block {block}, at element {first} of the caches"
    return ""
