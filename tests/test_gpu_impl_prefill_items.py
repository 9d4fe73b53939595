"""The plan of gpu_impl's Hopper prefill: every row is in one item, sequences with the most keys come first."""

import itertools

import pytest
import torch

from gpu_impl.launch import INTERPRET
from gpu_impl.prefill_items import LEAST_SORTED, plan_kernel

DEVICE = torch.device("cpu" if INTERPRET else "cuda")


def planned(query_lens, key_lens, *, kv_heads=2, group_size=3, stride=1):
    """(taken by asking, first items and how many there are, sequences in their order) of the kernel."""
    sums = [torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (query_lens, key_lens)]
    sums = [each.repeat_interleave(stride).to(DEVICE)[::stride] for each in sums]
    num_seqs = len(query_lens)
    plan = torch.full((2 * num_seqs + 3,), -9, dtype=torch.int32, device=DEVICE)
    strides = [each.stride(0) for each in sums]
    plan_kernel[(1,)](plan, *sums, num_seqs, kv_heads, group_size, *strides, ROWS=128, BLOCK=LEAST_SORTED, EARLY=False)
    taken, *rest = plan.tolist()
    assert rest.pop() == -9, "past the plan's end"
    return taken, rest[: num_seqs + 1], rest[num_seqs + 1 :]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "query_lens, key_lens",
    [([1], [1]), ([43, 1, 0, 200, 42], [43, 900, 7, 201, 42]), ([5] * 64, list(range(5, 69))), ([1, 90] * 100, [2, 90] * 50 + [700, 91] * 50)],
)
def test_every_row_is_in_one_item(query_lens, key_lens, stride):
    taken, first, order = planned(query_lens, key_lens, stride=stride)
    assert taken == 0
    assert sorted(order) == list(range(len(query_lens)))
    assert first[0] == 0
    items = [-(-query_lens[seq] * 3 // 128) * 2 for seq in order]
    assert [b - a for a, b in itertools.pairwise(first)] == items
    for start in range(0, len(order), LEAST_SORTED):
        keys = [key_lens[seq] for seq in order[start : start + LEAST_SORTED]]
        assert keys == sorted(keys, reverse=True)
