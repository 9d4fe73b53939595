"""The Triton kernels behind `gpu_impl.attention`. All of them share one loop, `attend`, over tiles of keys and values.

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


@triton.jit
def share_of(program, num_programs, context_lens, num_seqs, rows_per_seq, stride_c, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first unit, end of its units, ends of the sequences, their lengths, number of shares): a program's equal share of a batch's work.

    A unit is a tile of BLOCK_N keys of one row; a row, the query heads of one kv head in one sequence. Units are numbered sequence by
    sequence, row by row. An empty sequence has a unit a row too: somebody has to write its zeros. ends: (BLOCK_B,), in units; lens: (BLOCK_B,).
    Lengths are read on the device. There are no more shares than units, so that no share is empty; programs past them have nothing to do.
    """
    seq = tl.arange(0, BLOCK_B)
    key_len = tl.load(context_lens + seq * stride_c, mask=seq < num_seqs, other=0).to(tl.int32)
    tiles = tl.where(seq < num_seqs, tl.maximum((key_len + BLOCK_N - 1) // BLOCK_N, 1), 0)
    ends = tl.cumsum(tiles, 0) * rows_per_seq
    total = tl.max(ends, 0)
    shares = tl.minimum(num_programs, total)
    first = tl.minimum(program, shares).to(tl.int64) * total // shares
    end = tl.minimum(program + 1, shares).to(tl.int64) * total // shares
    return first.to(tl.int32), end.to(tl.int32), ends, key_len, shares


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads", "group_size", "block_size", "block_shift", "stride_tb", "stride_tm", "stride_c"])
def decode_kernel(
    q, k, v, out, partial, partial_max, partial_sum, context_lens, block_tables, scale_log2,
    num_seqs, num_kv_heads, group_size, block_size, block_shift,
    stride_qb, stride_qh, stride_qd, stride_kn, stride_ks, stride_kh, stride_kd, stride_vn, stride_vs, stride_vh, stride_vd,
    stride_ob, stride_oh, stride_tb, stride_tm, stride_c,
    NUM_SPLITS: tl.constexpr, PAGES: tl.constexpr, SAME_STRIDES: tl.constexpr, BLOCK_B: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes its share of the batch's tiles of keys, row after row; with NUM_SPLITS > 0, one of that many parts of one row.

    A row (the query heads of one kv head in one sequence, at most BLOCK_M) that a program takes whole goes to `out`, a part to the partials:
    its first part to the program's entry 1, any later one to entry 0. partial: (programs, 2, BLOCK_M, D) float32, sums of p * v;
    partial_max, partial_sum: (programs, 2, BLOCK_M) float32, maximum score and sum of p.
    """
    program = tl.program_id(0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    group_tiles = (group_size + BLOCK_M - 1) // BLOCK_M
    rows_per_seq = num_kv_heads * group_tiles
    if NUM_SPLITS > 0:
        seq, row = program // NUM_SPLITS // rows_per_seq, program // NUM_SPLITS % rows_per_seq
        key_len = tl.load(context_lens + seq * stride_c).to(tl.int32)
        row_tiles = tl.maximum((key_len + BLOCK_N - 1) // BLOCK_N, 1)
        tiles_per_split = (row_tiles + NUM_SPLITS - 1) // NUM_SPLITS
        unit = program % NUM_SPLITS * tiles_per_split
        last_unit = tl.minimum(row_tiles, unit + tiles_per_split)
    else:
        unit, last_unit, ends, lens, _ = share_of(program, tl.num_programs(0), context_lens, num_seqs, rows_per_seq, stride_c, BLOCK_B, BLOCK_N)
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    while unit < last_unit:
        if NUM_SPLITS > 0:
            tile = unit
        else:
            seq = tl.sum((ends <= unit).to(tl.int32), 0)
            key_len = tl.sum(tl.where(tl.arange(0, BLOCK_B) == seq, lens, 0), 0)
            row_tiles = tl.maximum((key_len + BLOCK_N - 1) // BLOCK_N, 1)
            unit_of_seq = unit - tl.max(tl.where(ends <= unit, ends, 0), 0)
            row, tile = unit_of_seq // row_tiles, unit_of_seq % row_tiles
        end_tile = tl.minimum(row_tiles, tile + last_unit - unit)
        unit += end_tile - tile
        kv_head, first_lane = row // group_tiles, row % group_tiles * BLOCK_M
        query_head = kv_head * group_size + first_lane + lane
        lane_ok = first_lane + lane < group_size
        ok = lane_ok[:, None] & (dim < HEAD_DIM)[None, :]
        seq64, head64 = seq.to(tl.int64), query_head.to(tl.int64)
        q_ptr = q + seq64 * stride_qb + (head64 * stride_qh)[:, None] + (dim * stride_qd)[None, :]
        q_tile = tl.load(q_ptr, mask=ok, other=0)
        if WIDEN:
            q_tile = (q_tile.to(tl.int32) << 16).to(tl.float32, bitcast=True)

        k_head, v_head = k + kv_head.to(tl.int64) * stride_kh, v + kv_head.to(tl.int64) * stride_vh
        table = block_tables + seq64 * stride_tb
        last_visible = lane * 0 + key_len - 1
        start, end = tile * BLOCK_N, tl.minimum(key_len, end_tile * BLOCK_N)
        unmasked = start + tl.maximum(end - start, 0) // BLOCK_N * BLOCK_N
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q_tile, last_visible, start, unmasked, k_head, v_head, table,
            0, key_len, scale_log2, block_size, block_shift,
            stride_kn, stride_ks, stride_kd, stride_vn, stride_vs, stride_vd, stride_tm,
            PAGES, False, SAME_STRIDES, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN,
        )  # fmt: skip
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q_tile, last_visible, unmasked, end, k_head, v_head, table,
            0, key_len, scale_log2, block_size, block_shift,
            stride_kn, stride_ks, stride_kd, stride_vn, stride_vs, stride_vd, stride_tm,
            PAGES, True, SAME_STRIDES, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN,
        )  # fmt: skip
        if (tile == 0) & (end_tile == row_tiles):
            result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
            out_ptr = out + seq64 * stride_ob + (head64 * stride_oh)[:, None] + dim[None, :]
            tl.store(out_ptr, result.to(out.dtype.element_ty), mask=ok)
        else:
            entry = (program.to(tl.int64) * 2 + (tile == 0)) * BLOCK_M + lane
            tl.store(partial + (entry * HEAD_DIM)[:, None] + dim[None, :], acc, mask=ok)
            tl.store(partial_max + entry, row_max, mask=lane_ok)
            tl.store(partial_sum + entry, row_sum, mask=lane_ok)


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads", "group_size", "num_parts", "stride_c"])
def combine_kernel(
    out, partial, partial_max, partial_sum, context_lens, num_seqs, num_kv_heads, group_size, num_parts, stride_ob, stride_oh, stride_c,
    NUM_SPLITS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_B: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part, lane) joins one query head of the row that `decode_kernel`'s program `part` began and did not end, if there is one."""
    part, lane = tl.program_id(0) % num_parts, tl.program_id(0) // num_parts
    group_tiles = (group_size + BLOCK_M - 1) // BLOCK_M
    rows_per_seq = num_kv_heads * group_tiles
    if NUM_SPLITS > 0:
        row_id = part // NUM_SPLITS
        seq, row = row_id // rows_per_seq, row_id % rows_per_seq
        row_tiles = tl.maximum((tl.load(context_lens + seq * stride_c).to(tl.int32) + BLOCK_N - 1) // BLOCK_N, 1)
        tiles_per_split = (row_tiles + NUM_SPLITS - 1) // NUM_SPLITS
        end_part = part + (row_tiles + tiles_per_split - 1) // tiles_per_split
        joins = (part % NUM_SPLITS == 0) & (end_part > part + 1)
    else:
        first_unit, end_unit, ends, lens, shares = share_of(part, num_parts, context_lens, num_seqs, rows_per_seq, stride_c, BLOCK_B, BLOCK_N)
        unit = tl.maximum(end_unit - 1, 0)  # its last
        seq = tl.sum((ends <= unit).to(tl.int32), 0)
        row_tiles = tl.maximum((tl.sum(tl.where(tl.arange(0, BLOCK_B) == seq, lens, 0), 0) + BLOCK_N - 1) // BLOCK_N, 1)
        seq_start = tl.max(tl.where(ends <= unit, ends, 0), 0)
        row = (unit - seq_start) // row_tiles
        row_start = seq_start + row * row_tiles
        joins = (first_unit < end_unit) & (row_start >= first_unit) & (row_start + row_tiles > end_unit)
        # the program that has the row's last unit u is the last p with p * total // shares <= u
        end_part = (((row_start + row_tiles).to(tl.int64) * shares - 1) // tl.max(ends, 0)).to(tl.int32) + 1
    if EARLY:
        tl.extra.cuda.gdc_wait()  # whoever comes after this kernel must find `decode_kernel` ended, so nobody leaves before
    first_lane = row % group_tiles * BLOCK_M
    if joins & (first_lane + lane < group_size):
        dim = tl.arange(0, BLOCK_D)
        largest = float("-inf")
        total_sum = 0.0
        sums = tl.full([BLOCK_D], 0.0, tl.float32)
        for first in range(part, end_part, BLOCK_PARTS):
            each = first + tl.arange(0, BLOCK_PARTS)
            there = each < end_part
            entry = (each.to(tl.int64) * 2 + (each == part)) * BLOCK_M + lane
            part_max = tl.load(partial_max + entry, mask=there, other=float("-inf"))
            part_sum = tl.load(partial_sum + entry, mask=there, other=0.0)
            parts = tl.load(partial + (entry * HEAD_DIM)[:, None] + dim[None, :], mask=there[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
            new_largest = tl.maximum(largest, tl.max(part_max, 0))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weight, decay = tl.exp2(part_max - shift), tl.exp2(largest - shift)
            total_sum = total_sum * decay + tl.sum(weight * part_sum, 0)
            sums = sums * decay + tl.sum(weight[:, None] * parts, 0)
            largest = new_largest
        query_head = row // group_tiles * group_size + first_lane + lane
        result = sums / tl.where(total_sum == 0.0, 1.0, total_sum)
        out_ptr = out + seq.to(tl.int64) * stride_ob + query_head.to(tl.int64) * stride_oh + dim
        tl.store(out_ptr, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
