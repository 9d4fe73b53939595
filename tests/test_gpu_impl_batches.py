"""gpu_impl's batch preparation: what a GPU expands from tables is what the host does, and tokens may be arrays."""

import numpy as np
import pytest
import torch

import gpu_impl
import reference
from gpu_impl.batches import _prefix_sums, expanded, expanded_on_device
from gpu_impl.launch import INTERPRET
from reference import SequenceState

DEVICE = torch.device("cpu" if INTERPRET else "cuda")


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("seed", range(6))
def test_the_device_expands_a_table_as_the_host_does(block_size, seed):
    draw = np.random.default_rng(seed)
    starts = draw.integers(0, 70, 5) * draw.integers(0, 2, 5)
    ends = starts + np.array([1, block_size, 1500, 1024, *draw.integers(1, 90, 1)])
    columns = int(-(-ends.max() // block_size)) + seed % 2
    tables = draw.integers(0, 2**31 // block_size - 1, (5, columns)).astype(np.int32)
    positions, slots = expanded(tables, starts, ends, block_size)
    lens = ends - starts
    expected = [(p, int(table[p // block_size]) * block_size + p % block_size) for table, a, b in zip(tables, starts, ends) for p in range(a, b)]
    assert list(zip(positions.tolist(), slots.tolist(), strict=True)) == expected
    tensors = (torch.from_numpy(array).to(DEVICE) for array in (_prefix_sums(lens), _prefix_sums(ends), tables))
    on_device = expanded_on_device(*tensors, block_size, int(lens.sum()), int(lens.max()))
    assert [t.tolist() for t in on_device] == [positions.tolist(), slots.tolist()]
    assert [t.dtype for t in on_device] == [torch.int64, torch.int32]


def test_a_warm_up_has_positions_and_no_slots():
    tables = np.empty((2, 0), dtype=np.int32)
    starts, ends = np.array([0, 0]), np.array([3, 1])
    assert [a.tolist() for a in expanded(tables, starts, ends, 16)] == [[0, 1, 2, 0], []]
    tensors = (torch.from_numpy(array).to(DEVICE) for array in (_prefix_sums(ends), _prefix_sums(ends), tables))
    assert [t.tolist() for t in expanded_on_device(*tensors, 16, 4, 3)] == [[0, 1, 2, 0], []]


@pytest.mark.parametrize("prepare", ["prepare_prefill", "prepare_decode"])
@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: np.array(tokens, dtype=np.int64)])
def test_tokens_of_any_kind(prepare, kind):
    states = [SequenceState(list(range(100, 140)), 8, 32, (3, 1, 7)), SequenceState([5, 6, 151_935], 0, 3, [0])]
    asked = [state._replace(token_ids=kind(state.token_ids)) for state in states]
    got = getattr(gpu_impl, prepare)(asked, 16, device=DEVICE)
    for have, want in zip(got, getattr(reference, prepare)(states, 16), strict=True):
        assert have.tolist() == want.tolist() and have.dtype == want.dtype if isinstance(want, torch.Tensor) else have == want


def test_the_largest_slot_that_int32_holds():
    state = SequenceState([1] * 6, 4, 2)  # its tokens lie in the first two slots of the second block
    assert gpu_impl.prepare_prefill([state._replace(block_table=[0, 2**29 - 1])], 4).slot_mapping.tolist() == [2**31 - 4, 2**31 - 3]
    with pytest.raises(ValueError, match="slot 2147483649 does not fit the int32 slot_mapping"):
        gpu_impl.prepare_prefill([state._replace(block_table=[0, 2**29])], 4)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_block_id_beyond_int32_is_named(kind):
    with pytest.raises(ValueError, match="sequence 0 has block id 2147483648 in column 1 of its table, it does not fit int32"):
        gpu_impl.prepare_decode([SequenceState([1] * 6, 5, 1, kind([0, 2**31]))], 4)
