"""store_kvcache: the whole image of both caches, and of everything around them, compared bit for bit (clauses KV-1...6)."""

from __future__ import annotations

import torch

from conformance.buffers import Buffer, Buffers, bits, first_difference, index_in_view
from conformance.cases.stores import StoreCase
from conformance.checks.likely_store import likely_of_row
from conformance.findings import Broken, Call
from conformance.judge import Judge


def check_store(judge: Judge, case: StoreCase) -> None:
    """Holds the case to the judge's clause. A stray write is KV-2's, a missing row KV-1's, also when the other one is being judged."""
    buffers = Buffers(judge.device)
    cache_shape = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    row_shape = (case.num_rows, case.num_kv_heads, case.head_dim)
    key = buffers.put("key", case.random_bits(row_shape, 4 * case.data_seed), case.row_layout)
    value = buffers.put("value", case.random_bits(row_shape, 4 * case.data_seed + 1), case.value_layout)
    k_cache, v_cache = buffers.put_caches(
        case.random_bits(cache_shape, 4 * case.data_seed + 2), case.random_bits(cache_shape, 4 * case.data_seed + 3), case.cache_layout
    )
    slot_mapping = buffers.put("slot_mapping", torch.tensor(case.slots, dtype=case.index_dtype), "strided" if case.strided_mapping else "plain")
    buffers.freeze()
    written_by = {"k_cache": key, "v_cache": value}
    expected: dict[int, torch.Tensor] = {}  # the whole storage that each cache lies in, as it must look afterwards
    for buffer in buffers.all:
        if buffer.name in written_by:
            image = expected.setdefault(buffer.storage.data_ptr(), buffer.before.clone())
            write_rows(buffer.image(image), bits(written_by[buffer.name]), case)
    result = judge.call("store_kvcache", key, value, k_cache, v_cache, slot_mapping)
    if result is not None:
        raise Broken(("returned", f"a {type(result).__name__}, the contract says None: the caches are written in place"))
    before = {buffer.storage.data_ptr(): buffer.before for buffer in buffers.all}
    call = Call("store_kvcache", (key, value, k_cache, v_cache, slot_mapping), {}, before=before)
    for buffer in buffers.all:
        want = expected.get(buffer.storage.data_ptr(), buffer.before)
        place = first_difference(bits(buffer.storage), want)
        if place is not None:
            broken = wrong_byte(buffers, buffer, place, want, case, call)
            owner = broken.finding.clause
            if owner != judge.clause.id and {owner, judge.clause.id} == {"KV-1", "KV-2"}:
                judge.note_beside(owner, str(broken))
                continue
            broken.finding.clause = judge.clause.id
            raise broken


def write_rows(image: torch.Tensor, rows: torch.Tensor, case: StoreCase) -> None:
    for row, slot in enumerate(case.slots):
        if slot >= 0:
            image[slot // case.block_size, slot % case.block_size] = rows[row]


def wrong_byte(buffers: Buffers, buffer: Buffer, element: int, want: torch.Tensor, case: StoreCase, call: Call) -> Broken:
    """Name the first wrong element: a mapped slot, another slot, or a place around the tensors. KV-1 or KV-2 is what it breaks."""
    got_bits, want_bits = int(bits(buffer.storage)[element]), int(want[element])
    digits = 2 * buffer.storage.element_size()
    mask = 16**digits - 1
    values = ("bits", f"are 0x{got_bits & mask:0{digits}x}, they must be 0x{want_bits & mask:0{digits}x}")
    for other in buffers.all:
        if other.storage.data_ptr() != buffer.storage.data_ptr() or not other.name.endswith("_cache"):
            continue
        index = index_in_view(other.view, element)
        if index is None:
            continue
        block, offset, head, dim = index
        slot = block * case.block_size + offset
        where = f"slot {slot} (physical block {block}, offset {offset}), kv head {head}, dimension {dim}"
        if slot in case.slots:
            row = case.slots.index(slot)
            return Broken(
                (other.name, f"{where}: row {row} of {case.num_rows} must be here, and is not"), values,
                likely=likely_of_row(buffers, other.name, row, slot, case), call=call, clause="KV-1",
            )  # fmt: skip
        skipped = [row for row, mapped in enumerate(case.slots) if mapped == -1]
        return Broken(
            (other.name, f"{where}: no row is mapped here, and it was written"), values,
            likely=likely_of_stray(slot, skipped, case), call=call, clause="KV-2",
        )  # fmt: skip
    return Broken((buffer.name, f"was written {buffers.where(buffer, element)}"), values, call=call, clause="KV-2")


def likely_of_stray(slot: int, skipped: list[int], case: StoreCase) -> str:
    if skipped and slot in (0, case.num_blocks * case.block_size - 1):
        return "-1 is not skipped: it is used as an index, or clamped to 0"
    return "another slot than the mapped one was written"
