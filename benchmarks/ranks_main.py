"""`torchrun --nproc-per-node 2 -m benchmarks.ranks_main`: sharded sampling beside gathering the logits and sampling on one rank.

Both end with the same tokens on every rank. Bytes are those that a rank sends, counted from the tensors that are exchanged. Medians of calls
that begin together; on GPUs over NCCL, timed by CUDA events, else over gloo by the host's clock, where only the ratio means something.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from conformance.checks.distribution import pearson
from gpu_impl.sampling import sample
from gpu_impl.sharded import parallel_sample

CALLS = 40
WARM_UP = 5
JUDGED_ROWS = 4_000
FALSE_ALARM = 1e-6


def sharded(logits_shard: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return parallel_sample(logits_shard, temperatures)


def gathered(logits_shard: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The whole logits on rank 0, which samples and tells the others."""
    tokens = torch.empty(len(logits_shard), dtype=torch.int64, device=logits_shard.device)
    if dist.get_rank() == 0:
        shards = [torch.empty_like(logits_shard) for _ in range(dist.get_world_size())]
        dist.gather(logits_shard, shards)
        tokens = sample(torch.cat(shards, dim=1), temperatures)
    else:
        dist.gather(logits_shard)
    dist.broadcast(tokens, 0)
    return tokens


class CountedBytes:
    """Counts the bytes that the wrapped collectives are handed to send."""

    NAMES = ("gather", "all_gather", "all_gather_into_tensor", "all_reduce", "broadcast")

    def __enter__(self) -> CountedBytes:
        self.sent = 0
        self.kept = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, self.counting(name))
        return self

    def counting(self, name: str) -> Callable[..., object]:
        def counted(*args: object, **keywords: object) -> object:
            sends = args[1] if name.startswith("all_gather") else args[0]
            if isinstance(sends, torch.Tensor) and not (name == "gather" and dist.get_rank() == 0):
                self.sent += sends.nbytes
            return self.kept[name](*args, **keywords)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, function in self.kept.items():
            setattr(dist, name, function)


def median_us(call: Callable[[], torch.Tensor], on_gpu: bool) -> float:
    each = []
    for i in range(WARM_UP + CALLS):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            us = start.elapsed_time(end) * 1e3
        else:
            began = time.perf_counter()
            call()
            us = (time.perf_counter() - began) * 1e6
        if i >= WARM_UP:
            each.append(us)
    return statistics.median(each)


def judged(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], device: torch.device) -> float:
    """p-value of its tokens under the law that all rows share; every rank must hold the same tokens."""
    width = 500
    whole = torch.randn(width * dist.get_world_size(), generator=torch.Generator().manual_seed(1))
    shard = whole[dist.get_rank() * width :][:width].expand(JUDGED_ROWS, -1).contiguous().to(device)
    tokens = function(shard, torch.full((JUDGED_ROWS,), 0.9, device=device))
    first = tokens.clone()
    dist.broadcast(first, 0)
    if not torch.equal(first, tokens):
        return 0.0
    counts = np.bincount(tokens.cpu().numpy(), minlength=len(whole))
    return pearson(counts, torch.softmax(whole.double() / 0.9, dim=0).numpy())


def main() -> int:
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.ranks_main", description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print("this is started by torchrun: torchrun --nproc-per-node 2 -m benchmarks.ranks_main", file=sys.stderr)
        return 4
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    machine = torch.cuda.get_device_name(device) if on_gpu else "CPU: the ratio alone means something"
    lines = [
        f"B {options.batch}, V {options.vocabulary}, {size} ranks over {dist.get_backend()}, torch {torch.__version__}, {machine}",
        f"| dtype | way | {'median µs' if on_gpu else 'times as long as sharded'} | bytes a rank sends | p of its distribution |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    failed = False
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator(device).manual_seed(rank)
        shard = (3 * torch.randn((options.batch, options.vocabulary // size), device=device, generator=generator)).to(dtype)
        temperatures = torch.linspace(0.6, 1.2, options.batch, device=device)
        unit_us = 1.0 if on_gpu else median_us(functools.partial(sharded, shard, temperatures), on_gpu)
        for function in (sharded, gathered):
            p = judged(function, device)
            failed |= p < FALSE_ALARM
            with CountedBytes() as counted:
                function(shard, temperatures)
            sent = torch.tensor([counted.sent], device=device)
            dist.all_reduce(sent, dist.ReduceOp.MAX)
            us = median_us(functools.partial(function, shard, temperatures), on_gpu)
            lines.append(f"| {str(dtype).removeprefix('torch.')} | {function.__name__} | {us / unit_us:.4g} | {int(sent)} | {p:.2g} |")
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
