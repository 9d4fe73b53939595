"""Which rows a program of the Hopper prefill takes next: the plan that one program writes before it, from the lengths on the device."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_SORTED, MOST_SORTED = 64, 1024  # sequences at once: two sizes are compiled


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads", "group_size", "stride_cq", "stride_ck"])
def plan_kernel(
    plan, cu_seqlens_q, cu_seqlens_k, num_seqs, num_kv_heads, group_size, stride_cq, stride_ck, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """plan (2 * num_seqs + 2): how many items were taken by asking (0), each sequence's first item and behind them how many there are, sequences.

    An item is ROWS rows of one kv head. Sequences with the most keys come first, since the last items to be taken should be short ones; of
    more than BLOCK the order is theirs within each BLOCK.
    """
    if EARLY:  # the kernel that takes the items may set itself up meanwhile
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(plan, 0)
    before = 0
    for start in range(0, num_seqs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < num_seqs
        key_len = tl.load(cu_seqlens_k + (place + 1) * stride_ck, mask=there, other=0) - tl.load(
            cu_seqlens_k + place * stride_ck, mask=there, other=0
        )
        last_first = ((2147483647 - key_len.to(tl.int64)) << 32) + place
        ordered = (tl.sort(tl.where(there, last_first, 9223372036854775807)) & 0x7FFFFFFF).to(tl.int32)
        query_len = tl.load(cu_seqlens_q + (ordered + 1) * stride_cq, mask=there, other=0) - tl.load(
            cu_seqlens_q + ordered * stride_cq, mask=there, other=0
        )
        items = (query_len.to(tl.int32) * group_size + ROWS - 1) // ROWS * num_kv_heads
        tl.store(plan + 1 + place, before + tl.cumsum(items, 0) - items, mask=there)
        tl.store(plan + 2 + num_seqs + place, ordered, mask=there)
        before += tl.sum(items, 0)
    tl.store(plan + 1 + num_seqs, before)
