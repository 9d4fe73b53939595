"""Prefill on Hopper, in Gluon: a warp loads tiles of keys and values by TMA, page by page, two warpgroups of 64 query rows each attend to them.

While a warpgroup's tensor core multiplies one tile's weights with its values, its threads take the softmax of the next tile's scores
(FlashAttention-3, arXiv 2407.08608). A head of 128 lies in shared memory as two halves of 64, the width of a swizzled row, so that a page of
16 tokens is a box of its own. Tiles come from the last to the first: only the first of them are masked.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpu_impl.launch import ceil_div, num_multiprocessors

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
ROWS = 128  # of a program
TILE_ROWS = 128  # keys of a tile
WIDTH = 64  # of a swizzled row of half precision


@gluon.jit
def share(item, num_kv_heads, group_size, num_seqs, cu_seqlens_q, cu_seqlens_k, stride_cq, stride_ck, BLOCK_N: gl.constexpr):
    """What item number `item` is: 128 rows of one kv head, and the tiles of keys that the last of them sees. first_row < 0: nothing.

    Rows are the queries of a sequence by token, and for each token the query heads of the group, which share their keys. Last rows of each
    sequence first, because they have the most keys; within 128 tokens the items of a kv head side by side, so that its keys are read from
    the L2 cache by all but one of them.
    """
    num_heads = num_kv_heads * group_size
    kv_head, seq = item // group_size % num_kv_heads, item // num_heads % num_seqs
    back = item // num_heads // num_seqs * group_size + item % group_size
    query_start = gl.load(cu_seqlens_q + seq * stride_cq).to(gl.int32)
    query_len = gl.load(cu_seqlens_q + (seq + 1) * stride_cq).to(gl.int32) - query_start
    key_start = gl.load(cu_seqlens_k + seq * stride_ck).to(gl.int32)
    key_len = gl.load(cu_seqlens_k + (seq + 1) * stride_ck).to(gl.int32) - key_start
    first_row = ((query_len * group_size + 127) // 128 - 1 - back) * 128
    seen = gl.maximum(key_len - query_len + gl.minimum(query_len, (first_row + 127) // group_size + 1), 0)
    num_tiles = gl.where(first_row < 0, 0, (seen + BLOCK_N - 1) // BLOCK_N)
    return kv_head, seq, query_start, query_len, key_start, key_len, first_row, num_tiles


@gluon.jit
def load_tiles(
    pages, items, tiles, PAGED: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The loading warp: of each item the tiles from the last to the first, K and then V, as soon as both warpgroups have left their place."""
    k_desc, v_desc, block_tables, stride_tb, stride_tm, block_size, block_shift = pages
    num_items, num_kv_heads, group_size, num_seqs, cu_seqlens_q, cu_seqlens_k, stride_cq, stride_ck = items
    k_smem, v_smem, k_full, v_full, k_empty, v_empty = tiles
    BOXES: gl.constexpr = BLOCK_N // BOX
    loaded = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        kv_head, seq, _query_start, _query_len, key_start, key_len, _first_row, num_tiles = share(
            item, num_kv_heads, group_size, num_seqs, cu_seqlens_q, cu_seqlens_k, stride_cq, stride_ck, BLOCK_N
        )
        table = block_tables + seq.to(gl.int64) * stride_tb
        for i in range(num_tiles):
            stage, free = (loaded + i) % STAGES, ((loaded + i) // STAGES + 1) & 1
            first = (num_tiles - 1 - i) * BLOCK_N
            boxes = ()
            for b in gl.static_range(BOXES):
                if PAGED:  # a page past the sequence comes from outside the cache, as zeros
                    position = first + b * BOX
                    block = gl.load(table + (position >> block_shift) * stride_tm, mask=position < key_len, other=-1).to(gl.int32)
                    boxes = boxes + ((block << block_shift) + (position & (block_size - 1)),)
                else:
                    boxes = boxes + (key_start + first,)
            mbarrier.wait(k_empty.index(stage), free)
            load_boxes(k_desc, kv_head, boxes, k_smem, k_full.index(stage), stage, BOX, BLOCK_N, HALVES, STAGES)
            mbarrier.wait(v_empty.index(stage), free)
            load_boxes(v_desc, kv_head, boxes, v_smem, v_full.index(stage), stage, BOX, BLOCK_N, HALVES, STAGES)
        loaded += num_tiles


@gluon.jit
def load_boxes(
    desc, kv_head, boxes, smem, full, stage, BOX: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A tile of keys or values, box by box, each from its first row on."""
    BOXES: gl.constexpr = BLOCK_N // BOX
    places = smem._reinterpret(smem.dtype, [STAGES * HALVES * BOXES, BOX, 64], smem.layout)
    mbarrier.expect(full, BLOCK_N * HALVES * 128)
    for b in gl.static_range(BOXES):
        for h in gl.static_range(HALVES):
            place = places.index((stage * HALVES + h) * BOXES + b)
            tma.async_copy_global_to_shared(desc, [boxes[b], (kv_head * HALVES + h) * 64], full, place)


@gluon.jit
def attend_rows(rows, items, tiles, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """A warpgroup: of each item 64 rows, and all the tiles that the item's last row sees."""
    q, out, stride_qt, stride_qh, stride_ot, stride_oh, scale_log2, q_smem, turns = rows
    num_items, num_kv_heads, group_size, num_seqs, cu_seqlens_q, cu_seqlens_k, stride_cq, stride_ck = items
    k_smem, v_smem, k_full, v_full, k_empty, v_empty = tiles
    DTYPE: gl.constexpr = q.dtype.element_ty
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat_dim = gl.arange(0, 64, gl.SliceLayout(0, FLAT))
    done, turn = 0, GROUP  # tiles, and times that it was this warpgroup's turn, the second one's counted from 1
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        kv_head, _seq, query_start, query_len, _key_start, key_len, first_row, num_tiles = share(
            item, num_kv_heads, group_size, num_seqs, cu_seqlens_q, cu_seqlens_k, stride_cq, stride_ck, BLOCK_N
        )
        if first_row >= 0:
            num_masked = num_tiles - gl.maximum(key_len - query_len + first_row // group_size + 1, 0) // BLOCK_N
            flat_row = first_row + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, FLAT))
            flat_token = (query_start + flat_row // group_size).to(gl.int64)
            flat_head = (kv_head * group_size + flat_row % group_size).to(gl.int64)
            flat_ok = (flat_row < query_len * group_size)[:, None] & (flat_dim < 64)[None, :]
            q_at = q + (flat_token * stride_qt + flat_head * stride_qh)[:, None] + flat_dim[None, :]
            for h in gl.static_range(HALVES):
                q_smem.index(GROUP * HALVES + h).store(gl.load(q_at + h * 64, mask=flat_ok, other=0.0))
            fence_async_shared()
            gl.thread_barrier()

            row = first_row + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
            last_visible = key_len - query_len + row // group_size
            row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
            row_sum = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
            acc = gl.zeros([64, 64], gl.float32, O_LAYOUT)
            acc2 = gl.zeros([64, 64], gl.float32, O_LAYOUT)
            if num_tiles > 0:
                first = (num_tiles - 1) * BLOCK_N
                stage = done % STAGES
                mbarrier.wait(k_full.index(stage), done // STAGES & 1)
                s = scores_of(q_smem, k_smem, stage, GROUP, HALVES, BLOCK_N, S_LAYOUT)
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_empty.index(stage))
                p, row_sum, row_max, _decay = weights_of(
                    s, row_max, first, last_visible, scale_log2, True, BLOCK_N, S_LAYOUT, P_LAYOUT, DTYPE
                )  # fmt: skip
                mbarrier.wait(v_full.index(stage), done // STAGES & 1)
                if key_len < first + BLOCK_N:  # slots past the sequence may hold NaN, and 0 * NaN is NaN
                    for h in gl.static_range(HALVES):
                        there = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, FLAT)) < key_len
                        v_tile = v_smem.index(stage * HALVES + h).load(FLAT)
                        v_smem.index(stage * HALVES + h).store(gl.where(there[:, None], v_tile, 0.0))
                    fence_async_shared()
                    gl.thread_barrier()
                mbarrier.wait(k_full.index((done + 1) % STAGES), (done + 1) // STAGES & 1, pred=num_tiles > 1)
                for i in range(1, num_masked):
                    p, acc, acc2, row_max, row_sum = next_tile(
                        done + i, i + 1 < num_tiles, turn + i, p, acc, acc2, row_max, row_sum, tiles, q_smem, turns,
                        (num_tiles - 1 - i) * BLOCK_N, last_visible, scale_log2,
                        True, GROUP, BLOCK_N, HALVES, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT, DTYPE,
                    )  # fmt: skip
                for i in range(gl.maximum(num_masked, 1), num_tiles):
                    p, acc, acc2, row_max, row_sum = next_tile(
                        done + i, i + 1 < num_tiles, turn + i, p, acc, acc2, row_max, row_sum, tiles, q_smem, turns,
                        0, last_visible, scale_log2,
                        False, GROUP, BLOCK_N, HALVES, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT, DTYPE,
                    )  # fmt: skip
                done += num_tiles
                turn += num_tiles - 1
                acc, acc2 = weighted_values(done - 1, p, acc, acc2, v_smem, v_full, HALVES, STAGES)
                acc, acc2, p = warpgroup_mma_wait(0, deps=[acc, acc2, p])
                mbarrier.arrive(v_empty.index((done - 1) % STAGES))

            total = gl.convert_layout(gl.where(row_sum == 0.0, 1.0, row_sum), gl.SliceLayout(1, O_LAYOUT))
            out_at = out + (flat_token * stride_ot + flat_head * stride_oh)[:, None] + flat_dim[None, :]
            gl.store(out_at, gl.convert_layout((acc / total[:, None]).to(DTYPE), FLAT), mask=flat_ok)
            if HALVES == 2:
                gl.store(out_at + 64, gl.convert_layout((acc2 / total[:, None]).to(DTYPE), FLAT), mask=flat_ok)


@gluon.jit
def next_tile(
    tile, more, turn, p, acc, acc2, row_max, row_sum, tiles, q_smem, turns, first, last_visible, scale_log2,
    MASKED: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The scores and weights of the program's tile number `tile`, whose keys are there, while the tile before is multiplied with its values."""
    k_smem, v_smem, k_full, v_full, k_empty, v_empty = tiles
    # one warpgroup's products are queued while the other takes its softmax
    mbarrier.wait(turns.index(GROUP), turn & 1)
    s = scores_of(q_smem, k_smem, tile % STAGES, GROUP, HALVES, BLOCK_N, S_LAYOUT)
    acc, acc2 = weighted_values(tile - 1, p, acc, acc2, v_smem, v_full, HALVES, STAGES)
    mbarrier.arrive(turns.index(1 - GROUP))
    s = warpgroup_mma_wait(HALVES, deps=[s])
    mbarrier.arrive(k_empty.index(tile % STAGES))
    new_p, new_sum, row_max, decay = weights_of(s, row_max, first, last_visible, scale_log2, MASKED, BLOCK_N, S_LAYOUT, P_LAYOUT, DTYPE)
    # for the next tile; here, since the assembler moves the exponentials after the wait for the products, unless something ends the block
    mbarrier.wait(k_full.index((tile + 1) % STAGES), (tile + 1) // STAGES & 1, pred=more)
    acc, acc2, p = warpgroup_mma_wait(0, deps=[acc, acc2, p])
    mbarrier.arrive(v_empty.index((tile - 1) % STAGES))
    row_sum = row_sum * decay + new_sum
    decay = gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return new_p, acc * decay, acc2 * decay, row_max, row_sum


@gluon.jit
def scores_of(q_smem, k_smem, stage, GROUP: gl.constexpr, HALVES: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr):
    """(64, BLOCK_N) float32, not waited for: the rows' products with a tile of keys."""
    s = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_smem.index(GROUP * HALVES), k_smem.index(stage * HALVES).permute([1, 0]), s, use_acc=False, is_async=True)
    for h in gl.static_range(1, HALVES):
        s = warpgroup_mma(q_smem.index(GROUP * HALVES + h), k_smem.index(stage * HALVES + h).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def weights_of(
    s, row_max, first, last_visible, scale_log2,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Online softmax of a tile: (weights as an operand, their sums, the rows' new maximum, what older sums are worth now)."""
    if MASKED:
        position = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        s = gl.where(position[None, :] <= last_visible[:, None], s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet
    decay = gl.exp2(row_max - shift)
    if gl.float16 == DTYPE:
        shift -= 14.0  # as in `attention_kernels.attend`
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return gl.convert_layout(p.to(DTYPE), P_LAYOUT), gl.sum(p, 1), new_max, decay


@gluon.jit
def weighted_values(tile, p, acc, acc2, v_smem, v_full, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Both halves of the output, not waited for: the tile's weights times its values are added to them."""
    stage = tile % STAGES
    mbarrier.wait(v_full.index(stage), tile // STAGES & 1)
    flying = warpgroup_mma(p, v_smem.index(stage * HALVES), acc, is_async=True)
    if HALVES == 2:
        flying2 = warpgroup_mma(p, v_smem.index(stage * HALVES + 1), acc2, is_async=True)
    else:
        flying2 = warpgroup_mma_init(acc2)
    return flying, flying2


@gluon.jit(do_not_specialize=[
    "num_items", "num_seqs", "num_kv_heads", "group_size", "block_size", "block_shift", "stride_tb", "stride_tm", "stride_cq", "stride_ck",
])
def prefill_kernel(
    q, k_desc, v_desc, out, cu_seqlens_q, cu_seqlens_k, block_tables, scale_log2, num_items, num_seqs, num_kv_heads, group_size,
    block_size, block_shift, stride_qt, stride_qh, stride_ot, stride_oh, stride_tb, stride_tm, stride_cq, stride_ck,
    PAGED: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th item: 128 rows of one kv head. k_desc, v_desc: slots as rows (slots, Hk * D), boxes (BOX, 64)."""
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [2 * HALVES, 64, 64], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BLOCK_N, 64], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BLOCK_N, 64], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    gl.thread_barrier()

    items = (num_items, num_kv_heads, group_size, num_seqs, cu_seqlens_q, cu_seqlens_k, stride_cq, stride_ck)
    tiles = (k_smem, v_smem, k_full, v_full, k_empty, v_empty)
    rows = (q, out, stride_qt, stride_qh, stride_ot, stride_oh, scale_log2, q_smem, turns)
    pages = (k_desc, v_desc, block_tables, stride_tb, stride_tm, block_size, block_shift)
    gl.warp_specialize(
        [
            (attend_rows, (rows, items, tiles, 0, BLOCK_N, HALVES, STAGES)),
            (attend_rows, (rows, items, tiles, 1, BLOCK_N, HALVES, STAGES)),
            (load_tiles, (pages, items, tiles, PAGED, BOX, BLOCK_N, HALVES, STAGES)),
        ],
        [4, 1],
        [240, 32],
    )


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, paged: bool) -> bool:
    """Whether this kernel reads such tensors: half precision, heads of 64 or 128 side by side, pages in whole boxes."""
    if q.dtype not in DTYPES or q.shape[-1] not in HEAD_DIMS or q.stride(-1) != 1:
        return False
    if paged and (k.shape[1] < 16 or k.shape[1] & (k.shape[1] - 1)):
        return False
    return all(_lies_in_rows(each, paged) for each in (k, v))


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    block_tables: torch.Tensor | None,
) -> None:
    """Write `out` as `attention.prefill_attention` says, of tensors that `takes` accepts."""
    num_heads, head_dim = q.shape[1:]
    num_seqs = len(cu_seqlens_q) - 1
    block_size = TILE_ROWS if block_tables is None else k.shape[1]
    box = min(block_size, TILE_ROWS)
    num_kv_heads = k.shape[-2]
    group_size = num_heads // num_kv_heads
    num_items = ceil_div(max_seqlen_q, ROWS) * num_seqs * num_heads
    prefill_kernel[(min(num_items, num_multiprocessors(q.device)),)](
        q,
        _boxes(k, box),
        _boxes(v, box),
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_q if block_tables is None else block_tables,  # without tables the kernel does not look
        scale * math.log2(math.e),
        num_items,
        num_seqs,
        num_kv_heads,
        group_size,
        block_size,
        block_size.bit_length() - 1,
        *q.stride()[:2],
        *out.stride()[:2],
        *(block_tables.stride() if block_tables is not None else (0, 0)),
        cu_seqlens_q.stride(0),
        cu_seqlens_k.stride(0),
        PAGED=block_tables is not None,
        BOX=box,
        BLOCK_N=TILE_ROWS,
        HALVES=head_dim // WIDTH,
        STAGES=2,
        num_warps=4,
    )


def _lies_in_rows(keys: torch.Tensor, paged: bool) -> bool:
    """(slots, Hk * D), as a descriptor tells it: slots a fixed stride of whole 16 bytes apart, fewer than an int32 counts."""
    slot, head, dim = keys.stride()[-3:]
    if keys.numel() == 0 or dim != 1 or (head != keys.shape[-1] and keys.shape[-2] > 1):
        return False
    if paged and keys.stride(0) != keys.shape[1] * slot and keys.shape[0] > 1:
        return False
    return slot * keys.element_size() % 16 == 0 and keys.data_ptr() % 16 == 0 and keys.shape[:-2].numel() < 2**31


def _boxes(keys: torch.Tensor, box: int) -> TensorDescriptor:
    """Keys or values as rows (slots, Hk * D), to be loaded in boxes of (box, 64)."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape = [keys.shape[:-2].numel(), keys.shape[-2] * keys.shape[-1]]
    return TensorDescriptor(keys, shape, [keys.stride(-3), 1], [box, WIDTH], layout)
