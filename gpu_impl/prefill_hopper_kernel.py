"""Prefill on Hopper, in Gluon: two warps load tiles of keys and of values, two warpgroups of 64 query rows each attend to them.

While a warpgroup's tensor core multiplies one tile's weights with its values, its threads take the softmax of the next tile's scores
(FlashAttention-3, arXiv 2407.08608). Tiles come from the last to the first: only the first of them are masked. Programs stay, and take one item
after the other; what comes of one is written while the first tile of the next is multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from gpu_impl.prefill_hopper_loads import erase_values, load_queries, load_tiles, rows_at
from gpu_impl.prefill_hopper_ring import FIELDS, KEY_LEN, ONE_A_WARPGROUP, SLOTS, VISIBLE, field, hand_out, leave_item, rows_told

# a row's four sums, of what each thread of a quad has of it
SUMS = gl.constexpr(gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]))


@gluon.jit(do_not_specialize=[
    "num_seqs", "group_size", "of_row", "block_size", "block_shift", "stride_tb", "stride_tm", "stride_cq", "stride_ck",
])
def prefill_kernel(
    q, k_desc, v_desc, out, plan, cu_seqlens_q, cu_seqlens_k, block_tables, scale_log2, num_seqs, group_size, of_row,
    block_size, block_shift, stride_qt, stride_qh, stride_ot, stride_oh, stride_tb, stride_tm, stride_cq, stride_ck,
    PAGED: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, PEEL: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once share out the plan's items. k_desc, v_desc: slots as rows (slots, Hk * D), boxes (BOX, 64).

    of_row: ceil(65536 / group_size), which makes n * of_row >> 16 the same as n // group_size for the rows of an item.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    HALVES: gl.constexpr = HEAD_DIM // 64
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    item_smem = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    boxes_smem = gl.allocate_shared_memory(gl.int32, [2 * (BLOCK_N // BOX), 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    item_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    wanted = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(left.index(stage), count=2)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(item_full.index(slot), count=1)
        mbarrier.init(item_empty.index(slot), count=4)
    mbarrier.init(wanted.index(0), count=1)
    fence_async_shared()
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)  # for the plan
    gl.thread_barrier()

    lengths = (num_seqs, group_size, cu_seqlens_q, cu_seqlens_k, stride_cq, stride_ck)
    ring = (item_smem, item_full, item_empty, wanted)
    rows = (q, out, (stride_qt, stride_qh), (stride_ot, stride_oh), scale_log2, q_smem, (group_size, of_row))
    tiles = (k_smem, v_smem, k_full, v_full, left)
    k_pages = (k_desc, block_tables, stride_tb, stride_tm, block_size, block_shift)
    v_pages = (v_desc, block_tables, stride_tb, stride_tm, block_size, block_shift)
    gl.warp_specialize(
        [
            (attend_rows, (rows, ring, tiles, 0, PEEL, BLOCK_N, HEAD_DIM, STAGES)),
            (attend_rows, (rows, ring, tiles, 1, PEEL, BLOCK_N, HEAD_DIM, STAGES)),
            (load_tiles, (k_pages, ring, boxes_smem, k_smem, k_full, left, 0, PAGED, BOX, BLOCK_N, HALVES, STAGES)),
            (load_tiles, (v_pages, ring, boxes_smem, v_smem, v_full, left, 1, PAGED, BOX, BLOCK_N, HALVES, STAGES)),
            (hand_out, (plan, lengths, ring, BLOCK_N)),
        ],
        [4, 1, 1, 1],
        [240, 32, 32, 32],
    )


@gluon.jit
def attend_rows(
    rows, ring, tiles, PART: gl.constexpr, PEEL: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A warpgroup: of each item one half of the rows, 64, and all the tiles that the item's last row sees."""
    _q, _out, _q_strides, _out_strides, _scale_log2, _q_smem, group = rows
    _k_smem, _v_smem, k_full, _v_full, _left = tiles
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p, p2 = no_weights(BLOCK_N, S_LAYOUT)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.full([64, 4], 0.0, gl.float32, SUMS)
    before = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))  # the rows of the item before: none
    number, done = 0, 0
    num_tiles = load_queries(rows, ring, 0, PART, HEAD_DIM)
    while num_tiles > 0:
        item, key_len = rows_told(ring, number), field(ring, number, KEY_LEN, ONE_A_WARPGROUP)
        visible = field(ring, number, VISIBLE, ONE_A_WARPGROUP)
        leave_item(ring, number)
        num_masked = num_tiles - gl.maximum(visible + 1, 0) // BLOCK_N
        row = item[1] + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        last_visible = visible + ((row * group[1]) >> 16)
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
        number += 1
        next_tiles = gl.to_tensor(0)
        if PEEL:
            next_tiles, p, p2, acc, row_max, row_sum = next_tile(
                0, True, done, num_tiles, num_masked, next_tiles, p, p2, acc, row_max, row_sum, rows, before, ring, number, tiles, key_len,
                last_visible, PART, BLOCK_N, HEAD_DIM, STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        for i in range(1 if PEEL else 0, num_tiles):
            next_tiles, p, p2, acc, row_max, row_sum = next_tile(
                i, False if PEEL else i == 0, done, num_tiles, num_masked, next_tiles, p, p2, acc, row_max, row_sum, rows, before, ring, number,
                tiles, key_len, last_visible, PART, BLOCK_N, HEAD_DIM, STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        before = item
        done += num_tiles
        num_tiles = next_tiles
    acc = weighted_values(p, p2, acc, tiles, (done + STAGES - 1) % STAGES, BLOCK_N, O_LAYOUT)
    acc = warpgroup_mma_wait(0, deps=[acc])
    write_rows(acc, row_sum, rows, before, PART, HEAD_DIM, O_LAYOUT)


@gluon.jit
def next_tile(
    i, is_first, done, num_tiles, num_masked, next_tiles, p, p2, acc, row_max, row_sum, rows, before, ring, number, tiles, key_len, last_visible,
    PART: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The scores and weights of an item's tile number i, whose keys are there, while the tile before is multiplied with its values.

    The tile before the first is the last of the item before, which is written here, and before the last tile's weights the next item's
    queries are sent for. Half of the exponentials come before the wait for the product and half behind it, where what else is to be done hides
    them: alone, a warp's exponential takes 8 cycles. The waits for what is loaded end a block, so that the assembler leaves each in its place.
    """
    _q, _out, _q_strides, _out_strides, scale_log2, q_smem, _group = rows
    k_smem, v_smem, k_full, v_full, left = tiles
    tile, first = done + i, (num_tiles - 1 - i) * BLOCK_N
    stage = tile % STAGES
    s = scores_of(q_smem, k_smem, PART, stage, BLOCK_N, S_LAYOUT)
    acc = weighted_values(p, p2, acc, tiles, (tile + STAGES - 1) % STAGES, BLOCK_N, O_LAYOUT)
    s = warpgroup_mma_wait(1, deps=[s])
    if (i < num_masked) | (i == num_tiles - 1):
        if i < num_masked:
            s = masked(s, first, last_visible, BLOCK_N, S_LAYOUT)
        if i == num_tiles - 1:
            next_tiles = load_queries(rows, ring, number, PART, HEAD_DIM)
    if is_first:
        row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_max, shift, decay = shift_of(s, row_max, scale_log2, BLOCK_N, S_LAYOUT, q_smem.dtype)
    s, s2 = s.reshape([64, 2, BLOCK_N // 2]).permute(0, 2, 1).split()
    new_p, new_sum = weights_of(s, shift, scale_log2, BLOCK_N // 2, q_smem.dtype)
    mbarrier.wait(v_full.index(stage), tile // STAGES & 1)
    mbarrier.wait(k_full.index((tile + 1) % STAGES), (tile + 1) // STAGES & 1, pred=i < num_tiles - 1)
    if is_first:
        if key_len < first + BLOCK_N:  # slots past the sequence may hold NaN, and 0 * NaN is NaN
            erase_values(v_smem, stage, gl.maximum(key_len - first, 0), BLOCK_N, HEAD_DIM, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(left.index(stage))  # these keys, and the values of the tile before
    if is_first:
        write_rows(acc, row_sum, rows, before, PART, HEAD_DIM, O_LAYOUT)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
        row_sum = gl.full([64, 4], 0.0, gl.float32, SUMS)
    new_p2, new_sum2 = weights_of(s2, shift, scale_log2, BLOCK_N // 2, q_smem.dtype)
    row_sum = row_sum * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None] + new_sum + new_sum2
    return next_tiles, new_p, new_p2, acc * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None], row_max, row_sum


@gluon.jit
def write_rows(acc, row_sum, rows, item, PART: gl.constexpr, HEAD_DIM: gl.constexpr, O_LAYOUT: gl.constexpr):
    """An item's half of the output, of weighted sums and sums of weights."""
    _q, out, _q_strides, out_strides, _scale_log2, _q_smem, group = rows
    # 8 bytes a thread, and of the rows that its quad has of the products
    STORED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32]] + ([[0, 64]] if HEAD_DIM == 128 else []) + [[8, 0]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, HEAD_DIM],
    )  # fmt: skip
    total = gl.sum(row_sum, 1)
    scale = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, O_LAYOUT))
    row = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORED))
    out_at = rows_at(out, row, item, out_strides, group)[:, None] + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORED))[None, :]
    gl.store(out_at, gl.convert_layout((acc * scale[:, None]).to(out.dtype.element_ty), STORED), mask=(row < item[3])[:, None])


@gluon.jit
def no_weights(BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr):
    """What `weights_of` gives of the two halves of a tile, but zeros."""
    half, half2 = gl.zeros([64, BLOCK_N], gl.int32, S_LAYOUT).reshape([64, 2, BLOCK_N // 2]).permute(0, 2, 1).split()
    p, _high = half.reshape([64, BLOCK_N // 4, 2]).split()
    p2, _high2 = half2.reshape([64, BLOCK_N // 4, 2]).split()
    return p, p2


@gluon.jit
def scores_of(q_smem, k_smem, PART: gl.constexpr, stage, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr):
    """(64, BLOCK_N) float32, not waited for: the rows' products with a tile of keys."""
    s = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    return warpgroup_mma(q_smem.index(PART), k_smem.index(stage).permute([1, 0]), s, use_acc=False, is_async=True)


@gluon.jit
def masked(s, first, last_visible, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr):
    position = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    return gl.where(position[None, :] <= last_visible[:, None], s, float("-inf"))


@gluon.jit
def shift_of(s, row_max, scale_log2, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Online softmax of a tile: (the rows' maximum so far, what exponents are lessened by, what older sums are worth now).

    Maxima are taken of 2, then 4, then 4 elements that a thread has, so that they do not wait for each other one by one.
    """
    pairs = gl.max(s.reshape([64, BLOCK_N // 8, 4, 2]), 3)
    of_threads = gl.max(gl.max(pairs.reshape([64, BLOCK_N // 32, 4, 4]), 2), 1)
    tile_max = gl.convert_layout(gl.max(of_threads, 1), gl.SliceLayout(1, S_LAYOUT))
    new_max = gl.maximum(row_max, tile_max * scale_log2)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet
    decay = gl.exp2(row_max - shift)
    if gl.float16 == DTYPE:
        shift -= 14.0  # as in `attention_kernels.attend`
    return new_max, shift, decay


@gluon.jit
def weights_of(s, shift, scale_log2, WIDTH: gl.constexpr, DTYPE: gl.constexpr):
    """Weights of (64, WIDTH) scores, two neighbours' halves to an int32 (a loop that carries them one by one turns and moves each), and sums."""
    p = gl.exp2(s * scale_log2 - gl.convert_layout(shift, gl.SliceLayout(1, s.type.layout))[:, None])
    pairs = gl.sum(p.reshape([64, WIDTH // 8, 4, 2]), 3)
    sums = gl.convert_layout(gl.sum(gl.sum(pairs.reshape([64, WIDTH // 32, 4, 4]), 2), 1), SUMS)
    low, high = p.reshape([64, WIDTH // 2, 2]).split()
    if gl.float16 == DTYPE:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1), sums
    else:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1), sums


@gluon.jit
def weighted_values(p, p2, acc, tiles, stage, BLOCK_N: gl.constexpr, O_LAYOUT: gl.constexpr):
    """The output so far, not waited for: a tile's weights times its values, which are there, are added to it."""
    _k_smem, v_smem, _k_full, _v_full, _left = tiles
    packed = gl.join(p, p2).permute(0, 2, 1).reshape([64, BLOCK_N // 2])
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], (gl.int16, gl.int16), True, 1)
    weights = gl.join(low, high).reshape([64, BLOCK_N]).to(v_smem.dtype, bitcast=True)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, O_LAYOUT, 2))
    return warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
