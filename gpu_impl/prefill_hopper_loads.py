"""What a Hopper prefill program loads: tiles of keys and values by TMA, box by box, and queries by cp.async.

A head of 128 lies in shared memory as two halves of 64, the width of a swizzled row, so that a page of 16 tokens is a box of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from gpu_impl.prefill_hopper_ring import (
    KEY_LEN,
    KEY_START,
    KV_HEAD,
    ONE_A_WARP,
    ONE_A_WARPGROUP,
    SEQ,
    field,
    leave_item,
    rows_told,
    wait_for_item,
)

FLAT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 rows of 64 to a warpgroup, 16 bytes a thread


@gluon.jit
def load_tiles(
    pages, ring, boxes_smem, smem, full, left, LAG: gl.constexpr, PAGED: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A loading warp: of each item the tiles of keys, or (LAG: they are used a tile later) of values, from the last to the first."""
    desc, block_tables, stride_tb, stride_tm, block_size, block_shift = pages
    _item_smem, _item_full, _item_empty, wanted = ring
    BOXES: gl.constexpr = BLOCK_N // BOX
    places = smem._reinterpret(smem.dtype, [STAGES * HALVES * BOXES, BOX, 64], smem.layout)
    first_rows = boxes_smem._reinterpret(gl.int32, [2, BOXES], gl.SwizzledSharedLayout(1, 1, 1, [0])).index(LAG)
    in_tile = gl.arange(0, BOXES, ONE_A_WARP) * BOX
    num_boxes = gl.maximum(BLOCK_N >> block_shift, 1)  # BOXES, but not known to a compiler that would unroll the loop over them
    number, loaded = 0, 0
    num_tiles = wait_for_item(ring, 0, ONE_A_WARP)
    while num_tiles > 0:
        kv_head, seq = field(ring, number, KV_HEAD, ONE_A_WARP), field(ring, number, SEQ, ONE_A_WARP)
        key_start, key_len = field(ring, number, KEY_START, ONE_A_WARP), field(ring, number, KEY_LEN, ONE_A_WARP)
        leave_item(ring, number)
        if LAG == 0:
            mbarrier.arrive(wanted.index(0), pred=num_tiles <= STAGES)
        table = block_tables + seq.to(gl.int64) * stride_tb
        position = (num_tiles - 1) * BLOCK_N + in_tile
        block = block_of(table, position, key_len, stride_tm, block_shift, PAGED)
        for i in range(num_tiles):
            tile, before = loaded + i, loaded + i - STAGES + LAG
            if PAGED:
                row = (block << block_shift) + (position & (block_size - 1))
            else:
                row = key_start + position
            position -= BLOCK_N
            block = block_of(table, position, key_len, stride_tm, block_shift, PAGED)  # of the next tile, on its way meanwhile
            if BOXES > 1:
                first_rows.store(row)
                gl.thread_barrier()
            mbarrier.wait(left.index(gl.maximum(before, 0) % STAGES), gl.maximum(before, 0) // STAGES & 1, pred=tile >= STAGES)
            mbarrier.expect(full.index(tile % STAGES), BLOCK_N * HALVES * 128)
            if BOXES > 1:
                for b in range(num_boxes):
                    box_row = gl.sum(boxes_smem.index(LAG * BOXES + b).load(ONE_A_WARP), 0)
                    for h in gl.static_range(HALVES):
                        place = places.index((tile % STAGES * HALVES + h) * BOXES + b)
                        tma.async_copy_global_to_shared(desc, [box_row, (kv_head * HALVES + h) * 64], full.index(tile % STAGES), place)
            else:
                for h in gl.static_range(HALVES):
                    place = places.index(tile % STAGES * HALVES + h)
                    tma.async_copy_global_to_shared(desc, [gl.sum(row, 0), (kv_head * HALVES + h) * 64], full.index(tile % STAGES), place)
        if LAG == 0:
            mbarrier.arrive(wanted.index(0), pred=num_tiles > STAGES)
        loaded += num_tiles
        number += 1
        num_tiles = wait_for_item(ring, number, ONE_A_WARP)


@gluon.jit
def block_of(table, position, key_len, stride_tm, block_shift, PAGED: gl.constexpr):
    """The blocks of positions; -1, which lies outside the cache and comes as zeros, past the sequence."""
    if PAGED:
        there = (position >= 0) & (position < key_len)
        return gl.load(table + (position >> block_shift) * stride_tm, mask=there, other=-1).to(gl.int32)
    else:
        return position


@gluon.jit
def erase_values(v_smem, stage, first, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    """Zeros in a tile of values, from row `first` on."""
    parts = v_smem._reinterpret(v_smem.dtype, [STAGES * (HEAD_DIM // 64) * BLOCK_N // 16, 16, 64], v_smem.layout)
    for part in range(first // 16, BLOCK_N // 16):
        there = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, FLAT)) < first
        for h in gl.static_range(HEAD_DIM // 64):
            place = parts.index((stage * (HEAD_DIM // 64) + h) * (BLOCK_N // 16) + part)
            place.store(gl.where(there[:, None], place.load(FLAT), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def load_queries(rows, ring, number, PART: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Send for the half of an item's queries that this warpgroup attends with; past the last item for nothing."""
    q, _out, q_strides, _out_strides, _scale_log2, q_smem, group = rows
    num_tiles = wait_for_item(ring, number, ONE_A_WARPGROUP)
    item = rows_told(ring, number)
    rows_left = gl.where(num_tiles > 0, item[3], 0)
    dim = gl.arange(0, 64, gl.SliceLayout(0, FLAT))
    parts = q_smem._reinterpret(q_smem.dtype, [q_smem.shape[0] * HEAD_DIM // 16, 16, 64], q_smem.layout)
    gl.thread_barrier()  # all of the warpgroup have done with the queries that are there
    for n in range(gl.where(group[0] > 0, 4, 0)):  # 4, but not known to a compiler that would unroll the loop
        row = PART * 64 + n * 16 + gl.arange(0, 16, gl.SliceLayout(1, FLAT))
        q_at = rows_at(q, row, item, q_strides, group)[:, None] + dim[None, :]
        for h in gl.static_range(HEAD_DIM // 64):
            place = parts.index((PART * (HEAD_DIM // 64) + h) * 4 + n)
            async_copy.async_copy_global_to_shared(place, q_at + h * 64, mask=(row < rows_left)[:, None])
    async_copy.commit_group()
    return num_tiles


@gluon.jit
def rows_at(base, row, item, strides, group):
    """Where the item's rows begin, as pointers like `row`, their numbers in it."""
    first_token, first_row, kv_head, _rows_left = item
    stride_t, stride_h = strides
    group_size, of_row = group
    token = ((first_row + row) * of_row) >> 16
    head = first_row + row - token * group_size
    return base + first_token.to(gl.int64) * stride_t + kv_head.to(gl.int64) * (group_size * stride_h) + (token * stride_t + head * stride_h)
