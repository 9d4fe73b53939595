"""Sharded sampling on real processes with gloo: held to the unsharded race, and broken samplers as negative controls."""

import multiprocessing as mp
import os
import socket
import tempfile

import pytest
import torch
import torch.distributed as dist

from conformance.checks.sharded import judge_sharded, widths_of
from gpu_impl.launch import INTERPRET
from gpu_impl.sharded import parallel_sample

pytestmark = pytest.mark.skipif(not INTERPRET, reason="these ranks have tensors on the CPU; compiled kernels are judged by conformance.ranks_main")
WAIT_SECONDS = 100


def each_on_its_own(logits_shard, temperatures, *, noise=None, seed=None, group=None):
    """Every rank draws for itself (gpt-oss #270)."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    whole = widened(logits_shard, group)
    return torch.multinomial(torch.softmax(whole.nan_to_num(0.0, neginf=-1e9) / temperatures[:, None], dim=1), 1, generator=generator)[:, 0]


def without_the_offset(logits_shard, temperatures, *, noise=None, seed=None, group=None):
    """The token is told in the shard's own numbering."""
    return parallel_sample(logits_shard, temperatures, noise=noise, seed=seed, group=group) % logits_shard.shape[1]


def seeded_alike(logits_shard, temperatures, *, noise=None, seed=None, group=None):
    """Ranks draw the same noise for their shards."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**40, ())) if seed is None else seed)
    widest = torch.tensor([logits_shard.shape[1]])
    dist.all_reduce(widest, dist.ReduceOp.MAX, group=group)
    drawn = torch.empty(len(logits_shard), int(widest), dtype=torch.float64).exponential_(generator=generator)[:, : logits_shard.shape[1]]
    return parallel_sample(logits_shard, temperatures, noise=drawn if noise is None else noise, group=group)


def widened(shard, group):
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, shard, group=group)
    return torch.cat(every, dim=1)


def serve(function, rank, size, store, answer):
    torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    answer.send(judge_sharded(function, torch.device("cpu"), draws=1_000))
    dist.destroy_process_group()


def findings_of(function, size):
    """Of every rank."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=serve, args=(function, rank, size, f"{folder}/store", theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            assert all(pipe.poll(WAIT_SECONDS) for pipe in pipes), "a rank did not answer"
            return [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join(5)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_unsharded_race_is_won_by_the_same_tokens(size):
    assert findings_of(parallel_sample, size) == [[]] * size


@pytest.mark.parametrize(
    ("broken", "told"),
    [(each_on_its_own, "on rank 1"), (without_the_offset, "loses the unsharded race"), (seeded_alike, "law: ")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_sampler_is_told_by_every_rank(broken, told):
    findings = findings_of(broken, 2)
    assert findings[0] == findings[1] and any(told in sentence for sentence in findings[0])


def test_widths():
    assert widths_of(32, 2, True) == [16, 16] and widths_of(17, 3, True) == [6, 6, 5]
    assert widths_of(17, 2, False) == [1, 16] and widths_of(17, 3, False) == [1, 8, 8] and widths_of(18, 3, False) == [1, 9, 8]
