"""The batches of the reference: hand-worked fields of a prefill and of a decode step, warm-up, chunks (clauses BATCH-1...7, SLOT-2)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import SequenceState, prepare_decode, prepare_prefill

TABLE, SLOTS = [7, 9, 2], [28, 29, 30, 31, 36, 37, 38, 39, 8, 9, 10, 11]  # the 12 slots of a three-block table at block size 4


def assert_batch(batch, **expected):
    """Every field, in its dtype, and no field more. An integer type stands for a tensor's, int for a Python int."""
    assert set(batch._fields) == set(expected)
    for name, (dtype, values) in expected.items():
        field = getattr(batch, name)
        if values is None:
            assert field is None, f"{name} is {field}, None is expected"
        elif dtype is int:
            assert type(field) is int and field == values, f"{name} is {field!r}, {values} is expected"
        else:
            assert field.dtype == dtype, f"{name} is {field.dtype}, {dtype} is expected"
            assert field.tolist() == values, f"{name} is {field.tolist()}, {values} is expected"


def test_prefill_with_a_chunk_a_hit_and_a_single_token():
    """Block size 4: a whole prompt of 5, a middle chunk of 9 tokens (4 cached, 3 of the other 5 scheduled), a prompt of 1."""
    batch = prepare_prefill(
        [
            SequenceState([10, 11, 12, 13, 14], 0, 5, [6, 2]),
            SequenceState([20, 21, 22, 23, 24, 25, 26, 27, 28], 4, 3, [1, 9, 3]),
            SequenceState([30], 0, 1, [5]),
        ],
        4,
    )
    assert_batch(
        batch,
        input_ids=(torch.int64, [10, 11, 12, 13, 14, 24, 25, 26, 30]),
        positions=(torch.int64, [0, 1, 2, 3, 4, 4, 5, 6, 0]),
        cu_seqlens_q=(torch.int32, [0, 5, 8, 9]),
        cu_seqlens_k=(torch.int32, [0, 5, 12, 13]),
        max_seqlen_q=(int, 5),
        max_seqlen_k=(int, 7),
        slot_mapping=(torch.int32, [24, 25, 26, 27, 8, 36, 37, 38, 20]),
        block_tables=(torch.int32, [[6, 2, -1], [1, 9, 3], [5, -1, -1]]),
    )


def test_prefill_without_cached_tokens_has_no_block_tables():
    batch = prepare_prefill([SequenceState([1, 2, 3], 0, 2, [4]), SequenceState([9] * 5, 0, 5, [0, 3])], 4)
    assert_batch(
        batch,
        input_ids=(torch.int64, [1, 2, 9, 9, 9, 9, 9]),
        positions=(torch.int64, [0, 1, 0, 1, 2, 3, 4]),
        cu_seqlens_q=(torch.int32, [0, 2, 7]),
        cu_seqlens_k=(torch.int32, [0, 2, 7]),
        max_seqlen_q=(int, 5),
        max_seqlen_k=(int, 5),
        slot_mapping=(torch.int32, [16, 17, 0, 1, 2, 3, 12]),
        block_tables=(None, None),
    )


def test_warm_up_has_no_slots_and_no_block_tables():
    batch = prepare_prefill([SequenceState([0, 0, 0], 0, 3), SequenceState([0], 0, 1)], 256)
    assert_batch(
        batch,
        input_ids=(torch.int64, [0, 0, 0, 0]),
        positions=(torch.int64, [0, 1, 2, 0]),
        cu_seqlens_q=(torch.int32, [0, 3, 4]),
        cu_seqlens_k=(torch.int32, [0, 3, 4]),
        max_seqlen_q=(int, 3),
        max_seqlen_k=(int, 3),
        slot_mapping=(torch.int32, []),
        block_tables=(None, None),
    )


def test_decode():
    """Block size 4: the last token fills a block, opens one, and is the only one."""
    batch = prepare_decode(
        [SequenceState([1, 2, 3, 4], 3, 1, [6]), SequenceState([5, 6, 7, 8, 9], 4, 1, [2, 0]), SequenceState([8], 0, 1, [3])], 4
    )
    assert_batch(
        batch,
        input_ids=(torch.int64, [4, 9, 8]),
        positions=(torch.int64, [3, 4, 0]),
        slot_mapping=(torch.int32, [27, 0, 12]),
        context_lens=(torch.int32, [4, 5, 1]),
        block_tables=(torch.int32, [[6, -1], [2, 0], [3, -1]]),
    )


@pytest.mark.parametrize("cached", [1, 3, 4, 5, 7, 8, 9, 11])
def test_cached_tokens_on_and_around_a_block_boundary(cached):
    batch = prepare_prefill([SequenceState(range(100, 112), cached, 12 - cached, TABLE)], 4)
    assert batch.slot_mapping.tolist() == SLOTS[cached:]
    assert batch.positions.tolist() == list(range(12))[cached:]
    assert batch.input_ids.tolist() == list(range(100, 112))[cached:]
    assert (batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.tolist()) == ([0, 12 - cached], [0, 12])


@pytest.mark.parametrize("end", [1, 3, 4, 5, 7, 8, 9, 11])
def test_a_chunk_that_ends_on_and_around_a_block_boundary(end):
    """The whole prompt's table is there, the chunk counts its own keys only."""
    batch = prepare_prefill([SequenceState(range(100, 112), 0, end, TABLE)], 4)
    assert batch.slot_mapping.tolist() == SLOTS[:end]
    assert (batch.cu_seqlens_k.tolist(), batch.max_seqlen_k) == ([0, end], end)


@pytest.mark.parametrize("length", range(1, 13))
def test_the_decode_slot_is_the_prefill_slot_of_the_same_position(length):
    num_blocks = -(-length // 4)
    batch = prepare_decode([SequenceState(range(100, 100 + length), length - 1, 1, TABLE[:num_blocks])], 4)
    assert batch.slot_mapping.tolist() == [SLOTS[length - 1]]
    # as nano-vllm writes it
    last_block_num_tokens = length - (num_blocks - 1) * 4
    assert batch.slot_mapping.tolist() == [TABLE[num_blocks - 1] * 4 + last_block_num_tokens - 1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_chunks_concatenated_are_one_pass(data):
    """Each sequence is cut at its own places; step c holds chunk c of those that have one. The tables are a permutation of the pool."""
    block_size = data.draw(st.integers(1, 9), label="block_size")
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3), label="lengths")
    pool = data.draw(st.permutations(range(sum(-(-n // block_size) for n in lengths))), label="pool")
    tables = [[pool.pop() for _ in range(-(-n // block_size))] for n in lengths]
    tokens = [[1000 * i + p for p in range(n)] for i, n in enumerate(lengths)]
    cuts = [[0, *sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4) if n > 1 else st.just(set()))), n] for n in lengths]

    collected = [([], [], []) for _ in lengths]
    for step in range(max(len(c) for c in cuts) - 1):
        running = [i for i, c in enumerate(cuts) if step + 1 < len(c)]
        chunks = [SequenceState(tokens[i], cuts[i][step], cuts[i][step + 1] - cuts[i][step], tables[i]) for i in running]
        batch = prepare_prefill(chunks, block_size)
        assert (batch.block_tables is None) == (step == 0)
        for row, i in enumerate(running):
            rows = slice(batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1])
            for whole, part in zip(collected[i], (batch.input_ids, batch.positions, batch.slot_mapping), strict=True):
                whole.extend(part[rows].tolist())

    one_pass = prepare_prefill([SequenceState(t, 0, len(t), table) for t, table in zip(tokens, tables, strict=True)], block_size)
    assert [x for ids, _, _ in collected for x in ids] == one_pass.input_ids.tolist()
    assert [x for _, positions, _ in collected for x in positions] == one_pass.positions.tolist()
    assert [x for _, _, slots in collected for x in slots] == one_pass.slot_mapping.tolist()
    assert len(set(one_pass.slot_mapping.tolist())) == sum(lengths), "blocks are distinct, so slots are"


def test_a_table_cut_at_the_chunk_gives_the_slots_of_the_whole_table():
    whole = prepare_prefill([SequenceState(range(12), 4, 3, TABLE)], 4)
    cut = prepare_prefill([SequenceState(range(12), 4, 3, TABLE[:2])], 4)
    assert whole.slot_mapping.tolist() == cut.slot_mapping.tolist() == [36, 37, 38]
    assert (whole.block_tables.tolist(), cut.block_tables.tolist()) == ([TABLE], [TABLE[:2]])


def test_every_tensor_is_on_the_device_asked_for():
    sequences = [SequenceState([1, 2, 3], 1, 2, [3])]
    for batch in (prepare_prefill(sequences, 4, device="meta"), prepare_decode(sequences, 4, device="meta")):
        tensors = [field for field in batch if isinstance(field, torch.Tensor)]
        assert len(tensors) >= 5 and all(tensor.device.type == "meta" for tensor in tensors)


def test_the_check_tells_a_wrong_dtype_and_a_wrong_value():
    """Negative control of assert_batch."""
    batch = prepare_decode([SequenceState([1, 2], 1, 1, [0])], 4)
    right = dict(input_ids=(torch.int64, [2]), positions=(torch.int64, [1]), slot_mapping=(torch.int32, [1]))
    right |= dict(context_lens=(torch.int32, [2]), block_tables=(torch.int32, [[0]]))
    assert_batch(batch, **right)
    for wrong in (dict(context_lens=(torch.int64, [2])), dict(slot_mapping=(torch.int32, [2])), dict(block_tables=(None, None))):
        with pytest.raises(AssertionError, match=next(iter(wrong))):
            assert_batch(batch, **(right | wrong))
