"""Triton kernels behind `gpu_impl.attention`: prefill, and `attend`, the loop over tiles of keys and values that decode has too.

WIDEN is set in the interpreter alone, for bfloat16, of which it has no arithmetic: the operands come in as int16 bits, the high half of a
float32, and are shifted into one when they are loaded. A call of a jit function costs the interpreter about as much as ten operations
(`tl.zeros`, `tl.cdiv` and small helpers are such functions), hence `tl.full`, spelled-out ceilings and no helper for that shift.

PAGES: "none", no cache; "tiles", a tile of keys lies in one block; "shift", a block size that is a power of two; "any". Numbers that change from
batch to batch are not specialized, so that no batch waits for the compiler because its size is 1, or a multiple of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    acc, row_max, row_sum, q, last_visible, start, end, k, v, table,
    key_start, key_len, scale_log2, block_size, block_shift,
    stride_kn, stride_ks, stride_kd, stride_vn, stride_vs, stride_vd, stride_tm,
    PAGES: tl.constexpr, MASKED: tl.constexpr, SAME_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [start, end), a tile at a time. Without MASKED each of them is visible to every row of q."""
    dim = tl.arange(0, BLOCK_D)
    for n in range(start, end, BLOCK_N):
        position = n + tl.arange(0, BLOCK_N)
        in_seq = position < key_len
        if PAGES != "none":
            if PAGES == "tiles":  # the tile lies in one block
                block = tl.load(table + (n >> block_shift) * stride_tm).to(tl.int64)
                offset = (position & (block_size - 1)).to(tl.int64)
            else:
                if PAGES == "shift":
                    column, offset = position >> block_shift, (position & (block_size - 1)).to(tl.int64)
                else:
                    column, offset = position // block_size, (position % block_size).to(tl.int64)
                if MASKED:
                    block = tl.load(table + column * stride_tm, mask=in_seq, other=0).to(tl.int64)
                else:
                    block = tl.load(table + column * stride_tm).to(tl.int64)
        else:
            block = 0
            offset = (key_start + position).to(tl.int64)
        k_element = (block * stride_kn + offset * stride_ks)[:, None] + (dim * stride_kd)[None, :]
        k_ptr = k + k_element
        if SAME_STRIDES:
            v_ptr = v + k_element
        else:
            v_ptr = v + ((block * stride_vn + offset * stride_vs)[:, None] + (dim * stride_vd)[None, :])
        # slots past the sequence may hold NaN: neither K nor V of them may be loaded, 0 * NaN is NaN
        if MASKED:
            loaded = in_seq[:, None] & (dim < HEAD_DIM)[None, :]
            k_tile = tl.load(k_ptr, mask=loaded, other=0)
            v_tile = tl.load(v_ptr, mask=loaded, other=0)
        elif HEAD_DIM == BLOCK_D:
            k_tile = tl.load(k_ptr)
            v_tile = tl.load(v_ptr)
        else:
            k_tile = tl.load(k_ptr, mask=(dim < HEAD_DIM)[None, :], other=0)
            v_tile = tl.load(v_ptr, mask=(dim < HEAD_DIM)[None, :], other=0)
        if WIDEN:
            k_tile = (k_tile.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            v_tile = (v_tile.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        if MASKED:
            scores = tl.where(position[None, :] <= last_visible[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # a row that has seen nothing yet keeps -inf, and -inf - -inf is NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - shift)
        if v_tile.dtype == tl.float16:
            # float16 has few binades under 1: weights up to 2**14 keep small ones out of its subnormals, the division at the end cancels it
            shift -= 14.0
        p = tl.exp2(scores * scale_log2 - shift[:, None])
        row_sum = row_sum * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["num_seqs", "num_heads", "group_size", "block_size", "block_shift", "stride_tb", "stride_tm", "stride_cq", "stride_ck"]
)
def prefill_kernel(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, block_tables, scale_log2,
    num_seqs, num_heads, group_size, block_size, block_shift,
    stride_qt, stride_qh, stride_qd, stride_kn, stride_ks, stride_kh, stride_kd, stride_vn, stride_vs, stride_vh, stride_vd,
    stride_ot, stride_oh, stride_tb, stride_tm, stride_cq, stride_ck,
    PAGES: tl.constexpr, PACK: tl.constexpr, SAME_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_M query rows of one head, or with PACK of all heads of a group, interleaved."""
    program = tl.program_id(0)
    # heads fastest, for the cache's sake; last rows of each sequence first, because they have the most keys
    heads = num_heads // group_size if PACK else num_heads
    head, seq, back = program % heads, (program // heads) % num_seqs, program // heads // num_seqs
    query_start = tl.load(cu_seqlens_q + seq * stride_cq).to(tl.int32)
    query_len = tl.load(cu_seqlens_q + (seq + 1) * stride_cq).to(tl.int32) - query_start
    rows_per_token = group_size if PACK else 1
    tile = (query_len * rows_per_token + BLOCK_M - 1) // BLOCK_M - 1 - back
    if tile < 0:
        return
    key_start = tl.load(cu_seqlens_k + seq * stride_ck).to(tl.int32)
    key_len = tl.load(cu_seqlens_k + (seq + 1) * stride_ck).to(tl.int32) - key_start

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACK:
        token = row // group_size
        query_head = head * group_size + row % group_size
        kv_head = head
        first_token = tile * BLOCK_M // group_size
        last_token = tl.minimum(query_len - 1, (tile * BLOCK_M + BLOCK_M - 1) // group_size)
    else:
        token = row
        query_head = head + row * 0
        kv_head = head // group_size
        first_token = tile * BLOCK_M
        last_token = tl.minimum(query_len - 1, tile * BLOCK_M + BLOCK_M - 1)
    dim = tl.arange(0, BLOCK_D)
    row_ok = (token < query_len)[:, None] & (dim < HEAD_DIM)[None, :]
    query_row = (query_start + token).to(tl.int64)
    q_ptr = q + (query_row * stride_qt + query_head.to(tl.int64) * stride_qh)[:, None] + (dim * stride_qd)[None, :]
    q_tile = tl.load(q_ptr, mask=row_ok, other=0)
    if WIDEN:
        q_tile = (q_tile.to(tl.int32) << 16).to(tl.float32, bitcast=True)

    last_visible = key_len - query_len + token
    num_keys = tl.minimum(key_len, key_len - query_len + last_token + 1)
    unmasked = tl.maximum(key_len - query_len + first_token + 1, 0) // BLOCK_N * BLOCK_N
    kv_head = kv_head.to(tl.int64)
    k_head, v_head, table = k + kv_head * stride_kh, v + kv_head * stride_vh, block_tables
    if PAGES != "none":
        table = block_tables + seq.to(tl.int64) * stride_tb
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_tile, last_visible, 0, unmasked, k_head, v_head, table,
        key_start, key_len, scale_log2, block_size, block_shift,
        stride_kn, stride_ks, stride_kd, stride_vn, stride_vs, stride_vd, stride_tm,
        PAGES, False, SAME_STRIDES, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN,
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_tile, last_visible, unmasked, num_keys, k_head, v_head, table,
        key_start, key_len, scale_log2, block_size, block_shift,
        stride_kn, stride_ks, stride_kd, stride_vn, stride_vs, stride_vd, stride_tm,
        PAGES, True, SAME_STRIDES, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN,
    )  # fmt: skip
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_ptr = out + (query_row * stride_ot + query_head.to(tl.int64) * stride_oh)[:, None] + dim[None, :]
    tl.store(out_ptr, result.to(out.dtype.element_ty), mask=row_ok)
