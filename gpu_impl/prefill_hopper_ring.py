"""How the warps of a Hopper prefill program learn what to do next: one of them takes an item and tells the others, through a ring of slots.

An item is ROWS rows of one kv head. Rows are a sequence's queries by token, and for each token the query heads of the group, which share their
keys. `gpu_impl.prefill_items` says how many there are and in which order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(128)  # of an item
SLOTS = gl.constexpr(4)  # items that are told and not yet left
TILES, KV_HEAD, SEQ, KEY_START, KEY_LEN, FIRST_TOKEN, FIRST_ROW, ROWS_LEFT, VISIBLE = [gl.constexpr(i) for i in range(9)]
FIELDS = gl.constexpr(9)  # of an item: tiles of keys, 0 past the last item; FIRST_TOKEN, FIRST_ROW: of its first row, and its place in the group
SEARCHED = gl.constexpr(128)  # sequences at once
ONE_A_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # one number that all threads have
ONE_A_WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def hand_out(plan, lengths, ring, BLOCK_N: gl.constexpr):
    """A warp that tells the others which item is next: the program's own number first, then whatever no program has taken.

    It asks when the tiles of the item before are on their way, so that no program takes more than it can begin soon.
    """
    num_seqs, group_size, cu_seqlens_q, cu_seqlens_k, stride_cq, stride_ck = lengths
    item_smem, item_full, item_empty, wanted = ring
    SEARCH: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    num_items = gl.load(plan + 1 + num_seqs)
    item, told, more = gl.program_id(0), 0, 1
    while more > 0:
        more = (item < num_items).to(gl.int32)
        place = gl.to_tensor(-1)
        for start in range(0, num_seqs, SEARCHED):
            at = start + gl.arange(0, SEARCHED, SEARCH)
            place += gl.sum((gl.load(plan + 1 + at, mask=at < num_seqs, other=2147483647) <= item).to(gl.int32), 0)
        number, seq = item - gl.load(plan + 1 + place), gl.load(plan + 2 + num_seqs + place)
        query_start = gl.load(cu_seqlens_q + seq * stride_cq).to(gl.int32)
        query_len = gl.load(cu_seqlens_q + (seq + 1) * stride_cq).to(gl.int32) - query_start
        key_start = gl.load(cu_seqlens_k + seq * stride_ck).to(gl.int32)
        key_len = gl.load(cu_seqlens_k + (seq + 1) * stride_ck).to(gl.int32) - key_start
        # last rows first, because they have the most keys, and a kv head's one after the other, so that all programs but one find its keys in
        # the L2 cache
        items_a_head = gl.maximum((query_len * group_size + ROWS - 1) // ROWS, 1)
        first_row = (items_a_head - 1 - number % items_a_head) * ROWS
        seen = key_len - query_len + gl.minimum(query_len, (first_row + ROWS - 1) // group_size + 1)
        token = first_row // group_size
        fields = (
            (gl.maximum(seen, 1) + BLOCK_N - 1) // BLOCK_N * more, number // items_a_head, seq, key_start, key_len,
            query_start + token, first_row - token * group_size, query_len * group_size - first_row, key_len - query_len + token,
        )  # fmt: skip
        mbarrier.wait(item_empty.index(told % SLOTS), (told // SLOTS + 1) & 1)
        for i in gl.static_range(FIELDS):
            item_smem.index(told % SLOTS * FIELDS + i).store(gl.full([1], fields[i], gl.int32, ONE_A_WARP))
        gl.thread_barrier()
        mbarrier.arrive(item_full.index(told % SLOTS))
        mbarrier.wait(wanted.index(0), told & 1, pred=more > 0)
        told += 1
        item = gl.num_programs(0) + gl.atomic_add(plan, 1, sem="relaxed")


@gluon.jit
def field(ring, number, FIELD: gl.constexpr, LAYOUT: gl.constexpr):
    item_smem, _item_full, _item_empty, _wanted = ring
    return gl.sum(item_smem.index(number % SLOTS * FIELDS + FIELD).load(LAYOUT), 0)


@gluon.jit
def wait_for_item(ring, number, LAYOUT: gl.constexpr):
    """How many tiles of keys the program's item number `number` has: 0 past the last."""
    _item_smem, item_full, _item_empty, _wanted = ring
    mbarrier.wait(item_full.index(number % SLOTS), number // SLOTS & 1)
    return field(ring, number, TILES, LAYOUT)


@gluon.jit
def leave_item(ring, number):
    _item_smem, _item_full, item_empty, _wanted = ring
    gl.thread_barrier()
    mbarrier.arrive(item_empty.index(number % SLOTS))


@gluon.jit
def rows_told(ring, number):
    """Of an item: its first row's token and place in the token's group, its kv head, and how many rows there are from there on."""
    first_token, first_row = field(ring, number, FIRST_TOKEN, ONE_A_WARPGROUP), field(ring, number, FIRST_ROW, ONE_A_WARPGROUP)
    return first_token, first_row, field(ring, number, KV_HEAD, ONE_A_WARPGROUP), field(ring, number, ROWS_LEFT, ONE_A_WARPGROUP)
