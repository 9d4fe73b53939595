"""Logits of the reference: the last token's row, and a vocabulary split over real processes (clauses LOGIT-1...5)."""

import itertools
import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from reference import last_token_logits, parallel_logits

WORLD_SIZES = [2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16]
JOIN_TIMEOUT_S = 90  # a rank takes a few seconds; a hang fails here


def integers(*shape, seed, low=-8, high=9):
    """Small integers as float32: every product and sum is exact, so equal means equal."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize(
    ("cu_seqlens_q", "rows"),
    [([0, 3, 4, 9], [2, 3, 8]), ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], range(9)), ([0, 9], [8]), (None, range(9))],
    ids=["ragged", "T = B", "one sequence", "decode"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_is_the_last_of_its_sequence(cu_seqlens_q, rows, dtype):
    hidden, weight = integers(9, 5, seed=1).to(dtype), integers(11, 5, seed=2).to(dtype)
    sums = None if cu_seqlens_q is None else torch.tensor(cu_seqlens_q, dtype=torch.int32)
    logits = last_token_logits(hidden, weight, sums)
    assert logits.dtype == dtype and logits.shape == (len(rows), 11)
    for logits_row, row in zip(logits, rows, strict=True):
        by_hand = [sum(h * w for h, w in zip(hidden[row].tolist(), weights, strict=True)) for weights in weight.tolist()]
        assert torch.equal(logits_row, torch.tensor(by_hand).to(dtype)), f"row {row}"


def test_products_are_summed_in_float64():
    """1e8 + 1 - 1e8 is 0 in float32, in any order but one."""
    logits = last_token_logits(torch.tensor([[1e8, 1.0, -1e8]]), torch.ones(1, 3))
    assert logits.tolist() == [[1.0]]


def test_no_row_at_all():
    logits = last_token_logits(torch.zeros(0, 4, dtype=torch.float16), torch.zeros(3, 4, dtype=torch.float16), torch.tensor([0]))
    assert logits.shape == (0, 3) and logits.dtype == torch.float16


def cases(world_size):
    """name -> (rows of each rank's shard, ranks of the group or None for all)."""
    return {
        "divisible": ([4] * world_size, None),
        "first ranks one more": ([5] + [4] * (world_size - 1), None),
        "last rank short": ([4] * (world_size - 1) + [1], None),
        "an empty shard": ([3] * (world_size - 1) + [0], None),
        "group without rank 0": ([3, 2, 4][: world_size - 1], list(range(1, world_size))),
        "group of the last rank": ([5], [world_size - 1]),
    }


def tensors(shard_rows, dtype):
    """hidden (5, 6), weight (V, 6); every logit is negative, so a zero of padding would be the largest."""
    hidden, weight = integers(5, 6, seed=3, low=1), integers(sum(shard_rows), 6, seed=4, high=0)
    return hidden.to(dtype), weight.to(dtype)


def bad_calls(here, size):
    """name -> (hidden, shard, cu_seqlens_q of member `here`, the sentence): the group's last member, or its first, calls badly."""
    hidden, shard, sums, last = torch.ones(5, 6), torch.ones(4, 6), torch.tensor([0, 2, 5]), size - 1

    def case(bad_member, sentence, hidden=hidden, shard=shard, sums=sums):
        good = torch.ones(5, 6), torch.ones(4, 6), torch.tensor([0, 2, 5])
        return *((hidden, shard, sums) if here == bad_member else good), sentence

    return {
        "rows": case(last, f"rank {last} of {size} has hidden of shape (4, 6), rank 0 (5, 6)", hidden=hidden[:4], sums=torch.tensor([0, 2, 4])),
        "size": case(last, f"rank {last} of {size} has hidden of shape (5, 3), rank 0 (5, 6)", hidden=hidden[:, :3], shard=shard[:, :3]),
        "dtype": case(last, f"rank {last} of {size} has hidden of torch.float16, rank 0 of torch.float32", hidden=hidden.half()),
        "step": case(last, f"rank {last} of {size} takes 5 rows of hidden, rank 0 takes 2", sums=None),
        "shard": case(last, f"rank {last} of {size}: hidden has hidden size 6, weight 5", shard=shard[:, :5]),
        "sums": case(last, f"rank {last} of {size}: cu_seqlens_q decreases from 5 to 2 at entry 2", sums=torch.tensor([0, 5, 2])),
        "integers": case(last, f"rank {last} of {size}: hidden is torch.int64, it must be of a float dtype", hidden=hidden.long()),
        "first rank": case(0, f"rank 0 of {size}: hidden has shape (6,), it must be (T, E)", hidden=hidden[0]),
        "first rank's rows": case(0, f"rank 1 of {size} has hidden of shape (5, 6), rank 0 (0, 6)", hidden=hidden[:0], sums=torch.tensor([0])),
    }


def sentences_of_bad_calls(here, group, device):
    """What this member's bad calls raise, name -> sentence; a good call after each must still be right."""
    sentences = {}
    for name, (hidden, shard, sums, _) in bad_calls(here, dist.get_world_size(group)).items():
        with pytest.raises(ValueError) as raised:
            parallel_logits(hidden.to(device), shard.to(device), None if sums is None else sums.to(device), group=group)
        sentences[name] = str(raised.value)
        logits = parallel_logits(torch.ones(2, 3, device=device), torch.full((2, 3), here + 1.0, device=device), group=group)
        assert (logits is None) == (here > 0)
        assert here > 0 or logits[1].tolist() == [3.0 * (1 + column // 2) for column in range(2 * dist.get_world_size(group))]
    return sentences


def run_rank(rank, world_size, backend, store, results_dir):
    """One process: every case, its result written to a file of its own."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    results = {}
    for name, (shard_rows, ranks) in cases(world_size).items():
        group = None if ranks is None else dist.new_group(ranks)
        members = list(range(world_size)) if ranks is None else ranks
        if rank not in members:
            if group is not None:
                with pytest.raises(ValueError, match=f"rank {rank} is no member of the group"):
                    parallel_logits(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device), group=group)
            continue
        if len(members) > 1 and name in ("divisible", "group without rank 0"):
            results[name, "bad calls"] = sentences_of_bad_calls(members.index(rank), group, device)
        for dtype in DTYPES:
            hidden, weight = tensors(shard_rows, dtype)
            shards = [shard.to(device) for shard in weight.split(shard_rows)]
            here = members.index(rank)
            for step, sums in (("prefill", torch.tensor([0, 2, 5], device=device)), ("decode", None)):
                logits = parallel_logits(hidden.to(device), shards[here], sums, group=group)
                results[name, dtype, step] = None if logits is None else logits.cpu()
            if name == "divisible":
                reverse = parallel_logits(hidden.to(device), shards[-1 - here], group=group)
                results["reversed shards", dtype, "decode"] = None if reverse is None else reverse.cpu()
    torch.save(results, f"{results_dir}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def backends():
    for world_size in WORLD_SIZES:
        yield pytest.param(world_size, "gloo", id=f"gloo-{world_size}")
        unfit = not (dist.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= world_size)
        skip = pytest.mark.skipif(unfit, reason=f"needs NCCL and {world_size} GPUs")
        yield pytest.param(world_size, "nccl", id=f"nccl-{world_size}", marks=skip)


def results_of_ranks(world_size, backend, folder):
    """Start the processes, wait for them with a limit, and read what each has written.

    The ranks are forked from a clean server process that has imported torch once: a fifth of the time of importing it in each.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
    arguments = (world_size, backend, folder / "store", folder)
    context = mp.start_processes(run_rank, arguments, nprocs=world_size, join=False, start_method="forkserver")
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not context.join(timeout=max(0.0, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"{world_size} ranks over {backend} still run after {JOIN_TIMEOUT_S} s")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


def whole_logits(shard_rows, dtype, step):
    """The whole product of integers, by an independent formulation."""
    hidden, weight = tensors(shard_rows, torch.float64)
    rows = hidden[[1, 4]] if step == "prefill" else hidden
    return (rows @ weight.T).to(dtype)


@pytest.mark.parametrize(("world_size", "backend"), list(backends()))
def test_parallel_logits_are_the_whole_product_on_the_first_rank_of_the_group(world_size, backend, tmp_path):
    """One start of the processes runs every case: it is most of what this test costs."""
    results = results_of_ranks(world_size, backend, tmp_path)
    for (name, (shard_rows, members)), dtype, step in itertools.product(cases(world_size).items(), DTYPES, ("prefill", "decode")):
        case = f"{name}, {dtype}, {step}"
        first, *others = members or range(world_size)
        logits = results[first][name, dtype, step]
        assert logits.dtype == dtype and torch.equal(logits, whole_logits(shard_rows, dtype, step)), case
        assert torch.all(logits < 0), f"{case}: padding has leaked"
        assert all(results[rank][name, dtype, step] is None for rank in others), f"{case}: a result on another rank"

    for members in [list(range(world_size)), list(range(1, world_size))]:
        if len(members) > 1:
            name = "divisible" if 0 in members else "group without rank 0"
            expected = {call: sentence for call, (*_, sentence) in bad_calls(0, len(members)).items()}
            assert [results[rank][name, "bad calls"] for rank in members] == [expected] * len(members)

    # negative control: the same shards on the wrong ranks give other logits
    in_order, in_reverse = (results[0][name, torch.float32, "decode"] for name in ("divisible", "reversed shards"))
    assert in_order.shape == in_reverse.shape and not torch.equal(in_order, in_reverse)
