"""A bad call to the reference gets a ValueError with one sentence that names the values (clauses ERR-*)."""

import math

import pytest
import torch

from reference import (
    SequenceState,
    allocate_kv_cache,
    compute_slot_mapping,
    decode_attention,
    last_token_logits,
    layer_views,
    prefill_attention,
    prepare_decode,
    prepare_prefill,
    sample,
    store_kvcache,
)
from reference.sampling import race_winner
from reference.slots import slot_of_position, slots_block_by_block

t = torch.tensor
FINE = SequenceState([1, 2, 3, 4, 5], 4, 1, [6, 7])


def prefill(*sequences, block_size=4):
    return lambda: prepare_prefill(sequences, block_size)


def decode(*sequences, block_size=4):
    return lambda: prepare_decode(sequences, block_size)


def slot_mapping(positions, cu_seqlens_q, block_tables, block_size=4, dtype=torch.int64):
    return lambda: compute_slot_mapping(t(positions, dtype=dtype), t(cu_seqlens_q), t(block_tables), block_size)


def store(key=(2, 2, 3), value=None, k_cache=(5, 4, 2, 3), v_cache=None, slots=(0, 1), dtype=torch.float32):
    key, value, k_cache, v_cache = (torch.zeros(shape) for shape in (key, value or key, k_cache, v_cache or k_cache))
    return lambda: store_kvcache(key.to(dtype), value, k_cache, v_cache, t(slots))


def attend_prefill(cu_q, cu_k, q=(3, 4, 8), k=(5, 2, 8), v=None, block_tables=None, max_q=9, max_k=9):
    tensors = torch.zeros(q), torch.zeros(k), torch.zeros(v or k)
    lengths = dict(cu_seqlens_q=t(cu_q), cu_seqlens_k=t(cu_k), max_seqlen_q=max_q, max_seqlen_k=max_k)
    return lambda: prefill_attention(*tensors, scale=1.0, block_tables=block_tables, **lengths)


def attend_decode(context_lens, block_tables, q=(2, 4, 8), cache=(10, 4, 2, 8), v_cache=None):
    tensors = torch.zeros(q), torch.zeros(cache), torch.zeros(v_cache or cache)
    return lambda: decode_attention(*tensors, context_lens=t(context_lens), block_tables=t(block_tables), scale=1.0)


def logits(cu_seqlens_q, hidden=(5, 8), weight=(7, 8)):
    return lambda: last_token_logits(torch.zeros(hidden), torch.zeros(weight), t(cu_seqlens_q))


def draw(temperatures, logits=(2, 3), dtype=torch.float32, **how):
    return lambda: sample(torch.zeros(logits), t(temperatures, dtype=dtype), **how)


PAST_INT32 = 2**31 // 4  # at block size 4 this block's first slot is 2**31
PAGED = dict(k=(10, 4, 2, 8), q=(1, 4, 8))
BAD_CALLS = {
    # prepare_prefill
    prefill(FINE, FINE, FINE, SequenceState([0] * 300, 0, 257, range(16)), block_size=16):
        "sequence 3 needs 17 blocks for 257 tokens at block size 16, its table has 16",
    prefill(FINE, SequenceState([1, 2], 0, 2)): "sequence 1 needs 1 block for 2 tokens at block size 4, its table has 0",
    prefill(FINE, SequenceState([1], 0, 1)): "sequence 1 needs 1 block for 1 token at block size 4, its table has 0",
    prefill(FINE, SequenceState([1] * 9, 4, 4, [3, -1, 2])): "sequence 1 has block id -1 in column 1 of its table, ids start at 0",
    prefill(FINE, SequenceState([1], 1, 0, [3])): "sequence 1 schedules 0 tokens, a prefill needs at least 1 of each sequence",
    prefill(FINE, SequenceState([1], 1, -1, [3])): "sequence 1 schedules -1 tokens, a prefill needs at least 1 of each sequence",
    prefill(FINE, SequenceState([1, 2, 3], 2, 2, [3])): "sequence 1 has 3 tokens, num_cached_tokens 2 and num_scheduled_tokens 2 end at 4",
    prefill(FINE, SequenceState([1], 0, 2, [3])): "sequence 1 has 1 token, num_cached_tokens 0 and num_scheduled_tokens 2 end at 2",
    prefill(FINE, SequenceState([1, 2, 3], -1, 2, [3])): "sequence 1 has num_cached_tokens -1, it must be at least 0",
    prefill(SequenceState([1, 2], 0, 2), SequenceState([1, 2, 3], 1, 2)): "sequence 1 has 1 cached token and no block table",
    prefill(SequenceState([1, 2], 0, 2), SequenceState([1, 2, 3], 2, 1)): "sequence 1 has 2 cached tokens and no block table",
    prefill(FINE, SequenceState([1], 0, 1, [PAST_INT32])): "sequence 1 has slot 2147483648 at position 0, it does not fit int32",
    prefill(FINE, SequenceState([1] * 9, 4, 4, [3, 2**31 // 4 + 1])): "sequence 1 has slot 2147483652 at position 4, it does not fit int32",
    prefill(FINE, SequenceState([1], 0, 1, [3, 2**31])):
        "sequence 1 has block id 2147483648 in column 1 of its table, it does not fit int32",
    prefill(): "a prefill needs at least one sequence, the batch is empty",
    prefill(FINE, block_size=0): "block_size is 0, it must be at least 1",
    # prepare_decode
    decode(FINE, SequenceState([1] * 9, 8, 1, [4, 5])): "sequence 1 needs 3 blocks for 9 tokens at block size 4, its table has 2",
    decode(FINE, SequenceState([1] * 9, 8, 1, [4, -2, 5])): "sequence 1 has block id -2 in column 1 of its table, ids start at 0",
    decode(FINE, SequenceState([], 0, 0, [4])): "sequence 1 has no token to decode from",
    decode(FINE, SequenceState([1, 2], 1, 1, [PAST_INT32])): "sequence 1 has slot 2147483649 at position 1, it does not fit int32",
    decode(FINE, SequenceState([1, 2], 1, 1, [3, 2**40])):
        "sequence 1 has block id 1099511627776 in column 1 of its table, it does not fit int32",
    decode(): "a decode step needs at least one sequence, the batch is empty",
    decode(FINE, block_size=-4): "block_size is -4, it must be at least 1",
    # slots
    slot_mapping([0, 1, 8], [0, 1, 3], [[7, 9], [3, 4]]): "sequence 1 needs 3 blocks for 9 tokens at block size 4, its table has 2",
    slot_mapping([0, 1, 4], [0, 1, 3], [[7, 9], [3, -1]]): "sequence 1 has block id -1 in column 1 of its table, ids start at 0",
    slot_mapping([0, 1, 2], [0, 2, 1], [[7], [9]]): "cu_seqlens_q decreases from 2 to 1 at entry 2",
    slot_mapping([0, 1, 2], [1, 3], [[7]]): "cu_seqlens_q starts at 1, it must start at 0",
    slot_mapping([0, 1, 2], [0, 2], [[7]]): "cu_seqlens_q ends at 2, it must end at the number of tokens, 3",
    slot_mapping([0], [[0, 1]], [[7]]): "cu_seqlens_q has shape (1, 2), it must be (B+1,)",
    slot_mapping([0, 1], [0, 1, 2], [[7]]): "block_tables has 1 row, cu_seqlens_q tells of 2 sequences",
    slot_mapping([0, 1], [0, 2], [[7], [9]]): "block_tables has 2 rows, cu_seqlens_q tells of 1 sequence",
    slot_mapping([0, 1], [0, 2], [7]): "block_tables has shape (1,), it must be (B, M)",
    slot_mapping([0, 1], [0, 2], [[[7]]]): "block_tables has shape (1, 1, 1), it must be (B, M)",
    slot_mapping([0, 1], [0, 2], [[7.0]]): "block_tables is torch.float32, it must be int32 or int64",
    slot_mapping([[0, 1]], [0, 1], [[7]]): "positions has shape (1, 2), it must be (T,)",
    slot_mapping([0, 1], [0, 2], [[7]], dtype=torch.float32): "positions is torch.float32, it must be int32 or int64",
    slot_mapping([0, 1], [0.0, 2.0], [[7]]): "cu_seqlens_q is torch.float32, it must be int32 or int64",
    slot_mapping([0], 0, [[7]]): "cu_seqlens_q has shape (), it must be (B+1,)",
    slot_mapping([0, -1], [0, 1, 2], [[7], [9]]): "sequence 1 has position -1, it must be at least 0",
    slot_mapping([0], [0, 1], [[7]], block_size=0): "block_size is 0, it must be at least 1",
    slot_mapping([0, 1], [0, 1, 2], [[7], [PAST_INT32]]): "sequence 1 has slot 2147483649 at position 1, it does not fit int32",
    lambda: slot_of_position([7, 9], -1, 4): "the sequence has position -1, it must be at least 0",
    lambda: slot_of_position([7, 9], 8, 4): "the sequence needs 3 blocks for 9 tokens at block size 4, its table has 2",
    lambda: slot_of_position([7, 9], 1, 0): "block_size is 0, it must be at least 1",
    lambda: slots_block_by_block([7, -9], 0, 5, 4): "the sequence has block id -9 in column 1 of its table, ids start at 0",
    lambda: slots_block_by_block([7, 9], 3, 2, 4): "positions [3, 2) are no range from 0 on",
    lambda: slots_block_by_block([7, 9], -1, 2, 4): "positions [-1, 2) are no range from 0 on",
    # the cache
    lambda: allocate_kv_cache(2, 0, 4, 2, 8): "a cache of shape (2, 2, 0, 4, 2, 8) has an empty dimension",
    lambda: layer_views(torch.zeros(2, 3, 1, 1, 1, 1), 3): "layer 3 of a cache with 3 layers",
    lambda: layer_views(torch.zeros(2, 1, 1, 1, 1, 1), -1): "layer -1 of a cache with 1 layer",
    lambda: layer_views(torch.zeros(1, 3, 1, 1, 1, 1), 0):
        "a KV cache has 6 dimensions (2, layers, N, S, Hk, D), this one has shape (1, 3, 1, 1, 1, 1)",
    lambda: layer_views(torch.zeros(2, 3, 1, 1, 1), 0):
        "a KV cache has 6 dimensions (2, layers, N, S, Hk, D), this one has shape (2, 3, 1, 1, 1)",
    store(slots=(0, 20)): "row 1 goes to slot 20, the cache has slots 0 to 19 (and -1 for none)",
    store(slots=(-2, 0)): "row 0 goes to slot -2, the cache has slots 0 to 19 (and -1 for none)",
    store(slots=(0, 1, 2)): "slot_mapping has 3 entries for the 2 rows of key and value",
    store(slots=(0,)): "slot_mapping has 1 entry for the 2 rows of key and value",
    store(key=(1, 2, 3)): "slot_mapping has 2 entries for the 1 row of key and value",
    store(slots=((0, 1),)): "slot_mapping has shape (1, 2), it must be (T,)",
    store(slots=(0.0, 1.0)): "slot_mapping is torch.float32, it must be int32 or int64",
    store(slots=0): "slot_mapping has shape (), it must be (T,)",
    store(slots=(3, 3)): "rows 0 and 1 both go to slot 3",
    store(key=(6, 2, 3), slots=(3, -1, 7, -1, 4, 7)): "rows 2 and 5 both go to slot 7",
    store(k_cache=(60,)): "k_cache has shape (60,), it must be (N, S, Hk, D)",
    store(k_cache=(20, 2, 3)): "k_cache has shape (20, 2, 3), it must be (N, S, Hk, D)",
    store(v_cache=(20, 2, 3)): "k_cache has shape (5, 4, 2, 3), v_cache (20, 2, 3)",
    store(value=(3, 2, 3)): "key has shape (2, 2, 3), value (3, 2, 3)",
    store(v_cache=(6, 4, 2, 3)): "k_cache has shape (5, 4, 2, 3), v_cache (6, 4, 2, 3)",
    store(key=(2, 3, 2)): "a row of key has shape (3, 2), a slot of the cache (2, 3)",
    store(dtype=torch.float16):
        "key is torch.float16 and value torch.float32, the caches are torch.float32 and torch.float32",
    # prefill_attention
    attend_prefill([0, 2, 1], [0, 3, 5]): "cu_seqlens_q decreases from 2 to 1 at entry 2",
    attend_prefill([0, 1, 3], [0, 6, 5]): "cu_seqlens_k decreases from 6 to 5 at entry 2",
    attend_prefill([1, 3], [0, 5]): "cu_seqlens_q starts at 1, it must start at 0",
    attend_prefill([0, 2], [0, 5]): "cu_seqlens_q ends at 2, it must end at the number of tokens, 3",
    attend_prefill([0, 3], [0, 4]): "cu_seqlens_k ends at 4, it must end at the number of tokens, 5",
    attend_prefill([0, 3], [0, 2, 5]): "cu_seqlens_q has 2 entries, cu_seqlens_k 3",
    attend_prefill([0], [0, 5], q=(0, 4, 8)): "cu_seqlens_q has 1 entry, cu_seqlens_k 2",
    attend_prefill([0, 3], [0, 5], max_q=2): "sequence 0 has 3 query tokens, max_seqlen_q is 2",
    attend_prefill([0, 1], [0, 1], q=(1, 4, 8), k=(1, 2, 8), max_q=0): "sequence 0 has 1 query token, max_seqlen_q is 0",
    attend_prefill([0, 1], [0, 1], q=(1, 4, 8), k=(1, 2, 8), max_k=0): "sequence 0 has 1 key, max_seqlen_k is 0",
    attend_prefill([0, 3], [0, 5], max_k=4): "sequence 0 has 5 keys, max_seqlen_k is 4",
    attend_prefill([0, 3], [0, 5], q=(3, 5, 8)): "q has 5 query heads, no multiple of the 2 key/value heads",
    attend_prefill([0, 3], [0, 5], q=(3, 1, 8)): "q has 1 query head, no multiple of the 2 key/value heads",
    attend_prefill([0, 3], [0, 5], k=(5, 0, 8)): "k has shape (5, 0, 8), it must have at least 1 key/value head",
    attend_prefill([0, 3], [0, 5], q=(3, 8)): "q has shape (3, 8), it must be (T, Hq, D)",
    attend_prefill([0, 3], [0, 5], k=(5, 8)): "k has shape (5, 8), without block_tables it must be (T_k, Hk, D)",
    attend_prefill([0, 3], [0, 5], k=(5, 1, 2, 8)): "k has shape (5, 1, 2, 8), without block_tables it must be (T_k, Hk, D)",
    attend_prefill([0, 3], [0, 5], v=(4, 2, 8)): "k has shape (5, 2, 8), v (4, 2, 8)",
    attend_prefill([0, 3], [0, 5], v=(6, 2, 8)): "k has shape (5, 2, 8), v (6, 2, 8)",
    attend_prefill([0, 3], [0, 5], v=(5, 2, 6)): "k has shape (5, 2, 8), v (5, 2, 6)",
    attend_prefill([0, 3], [0, 5], v=(5, 1, 8)): "k has shape (5, 2, 8), v (5, 1, 8)",
    attend_prefill([0, 1], [0, 5], k=(5, 2, 8), q=(1, 4, 8), block_tables=t([[3, 9]])):
        "k has shape (5, 2, 8), with block_tables it must be (N, S, Hk, D)",
    attend_prefill([0, 1], [0, 5], v=(10, 4, 1, 8), block_tables=t([[3, 9]]), **PAGED): "k has shape (10, 4, 2, 8), v (10, 4, 1, 8)",
    attend_prefill([0, 1], [0, 5], v=(9, 4, 2, 8), block_tables=t([[3, 9]]), **PAGED): "k has shape (10, 4, 2, 8), v (9, 4, 2, 8)",
    attend_prefill([0, 1], [0, 5], k=(10, 0, 2, 8), q=(1, 4, 8), block_tables=t([[3, 9]])): "block_size is 0, it must be at least 1",
    attend_prefill([0, 1], [0, 5], block_tables=t([3, 9]), **PAGED): "block_tables has shape (2,), it must be (B, M)",
    attend_prefill([0, 1], [0, 5], block_tables=t([[3.0, 9.0]]), **PAGED): "block_tables is torch.float32, it must be int32 or int64",
    attend_prefill([0, 1], [0, 5], block_tables=t([[3, 9], [4, 5]]), **PAGED):
        "block_tables has 2 rows, cu_seqlens_q tells of 1 sequence",
    attend_prefill([0, 0, 1], [0, 0, 5], block_tables=t([[3, 9]]), **PAGED): "block_tables has 1 row, cu_seqlens_q tells of 2 sequences",
    attend_prefill([0, 3], [0, 5], q=(3, 4, 6)): "q has head dimension 6, k has 8",
    attend_prefill([0, 1], [0, 5], block_tables=t([[9]]), **PAGED):
        "sequence 0 needs 2 blocks for 5 tokens at block size 4, its table has 1",
    attend_prefill([0, 1], [0, 5], block_tables=t([[9, -1]]), **PAGED):
        "sequence 0 has block id -1 in column 1 of its table, ids start at 0",
    attend_prefill([0, 1], [0, 5], block_tables=t([[9, 10]]), **PAGED):
        "sequence 0 has block id 10 in column 1 of its table, the cache has blocks 0 to 9",
    # decode_attention
    attend_decode([1, 9], [[1, -1], [3, 4]]): "sequence 1 needs 3 blocks for 9 tokens at block size 4, its table has 2",
    attend_decode([1, 5], [[1, -1], [3, -1]]): "sequence 1 has block id -1 in column 1 of its table, ids start at 0",
    attend_decode([1, 5], [[1, -1], [3, 12]]): "sequence 1 has block id 12 in column 1 of its table, the cache has blocks 0 to 9",
    attend_decode([1, -1], [[1], [3]]): "sequence 1 has context length -1, it must be at least 0",
    attend_decode([1, 2, 3], [[1], [2]]): "q has 2 rows, context_lens 3, block_tables 2",
    attend_decode([1], [[1]], q=(2, 4, 8)): "q has 2 rows, context_lens 1, block_tables 1",
    attend_decode([1, 2], [[1], [2]], q=(1, 4, 8)): "q has 1 row, context_lens 2, block_tables 2",
    attend_decode([1, 2], [1, 2]): "block_tables has shape (2,), it must be (B, M)",
    attend_decode([1, 2], [[[1], [2]]]): "block_tables has shape (1, 2, 1), it must be (B, M)",
    attend_decode([1, 2], [[1.0], [2.0]]): "block_tables is torch.float32, it must be int32 or int64",
    attend_decode([[1, 2]], [[1], [2]]): "context_lens has shape (1, 2), it must be (B,)",
    attend_decode([1.0, 2.0], [[1], [2]]): "context_lens is torch.float32, it must be int32 or int64",
    attend_decode([1, 2], [[1], [2]], q=(4, 8)): "q has shape (4, 8), it must be (B, Hq, D)",
    attend_decode([1, 2], [[1], [2]], cache=(40, 2, 8)): "k_cache has shape (40, 2, 8), it must be (N, S, Hk, D)",
    attend_decode([1, 2], [[1], [2]], v_cache=(10, 4, 3, 8)): "k_cache has shape (10, 4, 2, 8), v_cache (10, 4, 3, 8)",
    attend_decode([1, 2], [[1], [2]], v_cache=(10, 4, 2, 6)): "k_cache has shape (10, 4, 2, 8), v_cache (10, 4, 2, 6)",
    attend_decode([1, 2], [[1], [2]], cache=(10, 4, 0, 8)): "k_cache has shape (10, 4, 0, 8), it must have at least 1 key/value head",
    attend_decode([1, 2], [[1], [2]], cache=(10, 0, 2, 8)): "block_size is 0, it must be at least 1",
    attend_decode([1, 2], [[1], [2]], q=(2, 4, 6)): "q has head dimension 6, k_cache has 8",
    attend_decode([1, 2], [[1], [2]], q=(2, 3, 8)): "q has 3 query heads, no multiple of the 2 key/value heads",
    # logits
    logits([0, 3, 2]): "cu_seqlens_q decreases from 3 to 2 at entry 2",
    logits([0, 3, 4]): "cu_seqlens_q ends at 4, it must end at the number of tokens, 5",
    logits([2, 5]): "cu_seqlens_q starts at 2, it must start at 0",
    logits([0, 3, 3, 5]): "sequence 1 has no query token, so it has no last one",
    logits([0, 5], weight=(7, 6)): "hidden has hidden size 8, weight 6",
    logits([0, 5], hidden=(8,)): "hidden has shape (8,), it must be (T, E)",
    logits([0, 5], hidden=(1, 5, 8)): "hidden has shape (1, 5, 8), it must be (T, E)",
    logits([0, 5], weight=(8,)): "weight has shape (8,), it must be (V, E)",
    lambda: last_token_logits(torch.zeros(8), torch.zeros(7, 8)): "hidden has shape (8,), it must be (T, E)",
    lambda: last_token_logits(torch.zeros(5, 8), torch.zeros(7, 8, device="meta")): "hidden is on cpu, weight on meta",
    # sampling
    draw([1.0, 0.0]): "row 1 has temperature 0.0, it must be finite and above 0 in float32",
    draw([-0.5, 1.0]): "row 0 has temperature -0.5, it must be finite and above 0 in float32",
    draw([1.0, math.nan]): "row 1 has temperature nan, it must be finite and above 0 in float32",
    draw([1.0, math.inf]): "row 1 has temperature inf, it must be finite and above 0 in float32",
    draw([1.0, 1e-50], dtype=torch.float64): "row 1 has temperature 1e-50, it must be finite and above 0 in float32",
    draw([1e300, 1.0], dtype=torch.float64): "row 0 has temperature 1e+300, it must be finite and above 0 in float32",
    draw([1.0]): "logits have 2 rows, temperatures 1",
    draw([1.0, 1.0], logits=(1, 3)): "logits have 1 row, temperatures 2",
    draw([[1.0], [1.0]]): "temperatures have shape (2, 1), they must be (B,)",
    draw(1.0): "temperatures have shape (), they must be (B,)",
    draw([1.0, 1.0, 1.0], logits=(3,)): "logits have shape (3,), they must be (B, V) with V at least 1",
    draw([1.0, 1.0], logits=(2, 0)): "logits have shape (2, 0), they must be (B, V) with V at least 1",
    draw([], logits=(0, 0)): "logits have shape (0, 0), they must be (B, V) with V at least 1",
    draw([1.0, 1.0], noise=torch.ones(2, 4)): "noise has shape (2, 4), logits (2, 3)",
    draw([1.0, 1.0], noise=-torch.ones(2, 3)): "noise has the value -1.0, a draw of Exp(1) is at least 0",
    lambda: race_winner(t([0.5, 0.5]), t([1.0, math.nan])): "noise has the value nan, a draw of Exp(1) is at least 0",
}  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), [pytest.param(call, sentence, id=sentence) for call, sentence in BAD_CALLS.items()])
def test_a_bad_call_gets_one_sentence_that_names_the_values(call, sentence):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == sentence


def test_a_store_that_is_refused_has_written_nothing():
    cache = torch.zeros(5, 4, 2, 3)
    with pytest.raises(ValueError, match="row 1 goes to slot 20"):
        store_kvcache(torch.ones(2, 2, 3), torch.ones(2, 2, 3), cache, cache.clone(), t([0, 20]))
    assert torch.all(cache == 0)
    with pytest.raises(ValueError, match="rows 0 and 1 both go to slot 7"):
        store_kvcache(torch.ones(2, 2, 3), torch.ones(2, 2, 3), cache, cache.clone(), t([7, 7]))
    assert torch.all(cache == 0)


def test_the_nearest_good_calls_raise_nothing():
    """Negative control: the bad calls above are bad by one."""
    prefill(FINE, SequenceState([0] * 300, 0, 256, range(16)), block_size=16)()
    prefill(FINE, SequenceState([1, 2, 3, 4], 2, 2, [3, -1]))()
    decode(FINE, SequenceState([1] * 8, 7, 1, [4, 5]))()
    slot_mapping([0, 1, 7], [0, 1, 3], [[7, 9], [3, 4]])()
    slot_mapping([3], [0, 1], [[PAST_INT32 - 1]])()
    prefill(FINE, SequenceState([1] * 4, 0, 4, [PAST_INT32 - 1]))()
    decode(FINE, SequenceState([1] * 4, 3, 1, [PAST_INT32 - 1, 2**31 - 1]))()
    store(slots=(-1, 19))()
    store(slots=(-1, -1))()
    attend_prefill([0, 3], [0, 5], max_q=3, max_k=5)()
    attend_prefill([0, 1], [0, 4], block_tables=t([[9, 10]]), **PAGED)()
    attend_prefill([0, 0, 1], [0, 0, 5], block_tables=t([[-1, -1], [3, 9]]), **PAGED)()
    attend_decode([0, 5], [[-1, -1], [3, 9]])()
    logits([0, 3, 5])()
    draw([1e-6, 1.0], noise=torch.zeros(2, 3))()
    draw([1e-40, 3e38], dtype=torch.float64)()
    draw([1.0, 1.0], logits=(2, 1))()
    draw([], logits=(0, 3))()
