"""The Triton kernels of a decode step: a batch's tiles of keys are shared out among a fixed number of programs, and what they cut is joined."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_impl.attention_kernels import attend


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
