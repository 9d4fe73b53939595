"""Sampling with the vocabulary split over ranks: each races its own shard, and one candidate a rank and row is exchanged.

The arrival of a shard's winner is log(sum of exp(x / T)) + Gumbel, which asks nothing of the other shards: the earliest over all ranks is
distributed exactly as the winner of the unsharded race, and 16 bytes a row travel in place of the rank's logits.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from gpu_impl.launch import ceil_div, on_device_of, require
from gpu_impl.sampling import race, require_logits
from gpu_impl.sampling_kernels import first_to_arrive_kernel
from gpu_impl.sampling_state import halves, mixed

ROWS = 128  # of a program, where the winner of each row is picked among the ranks
LOG_LEAST = -103.97  # of the smallest float32: a p under it is 0, and never arrives


def parallel_sample(
    logits_shard: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    noise: torch.Tensor | None = None,
    seed: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """(B,) int64, the same on every rank of the group: one token a row of the whole vocabulary, distributed as softmax(logits / T).

    logits_shard: (B, V_r), consecutive columns in rank order, of any width from 1 on; temperatures: (B,), the same on each rank; noise:
    (B, V_r) of Exp(1) draws, the shard's columns, then the result is the unsharded race's winner; seed: repeats a draw. A rank's noise is
    mixed from the seed, or from its own generator, and its place in the group, so that ranks seeded alike do not draw alike. Raises
    ValueError as `gpu_impl.sample` does.
    """
    require_logits(logits_shard, temperatures)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    require(rank >= 0, "this process is no member of the group")
    (num_rows, width), device = logits_shard.shape, logits_shard.device
    # tokens, arrivals, and the width of the shard, from which each rank tells where the others' columns begin: four launches in all
    own = torch.full((2 * num_rows + 1,), width, dtype=torch.int64, device=device)
    tokens, arrivals = own[:num_rows], own[num_rows:-1].view(torch.float64)
    if noise is not None:
        require(noise.shape == logits_shard.shape, f"noise has shape {tuple(noise.shape)}, logits {tuple(logits_shard.shape)}")
        for part, given in zip((tokens, arrivals), given_candidates(logits_shard, temperatures, noise, group), strict=True):
            part.copy_(given)
    elif num_rows:
        drawn = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)) if seed is None else seed
        with on_device_of(logits_shard):
            race(logits_shard, temperatures, tokens, halves(mixed(drawn, rank + 1)), arrivals)
    every = torch.empty(size * len(own), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(every, own, group=group)
    winners = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows:
        with on_device_of(logits_shard):
            first_to_arrive_kernel[(ceil_div(num_rows, ROWS),)](every, every.view(torch.float64), winners, num_rows, RANKS=size, ROWS=ROWS)
    return winners


def given_candidates(
    logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, arrivals) of the shard, in float64. The largest logit and the mass of all shards settle which p are 0."""
    x = torch.nan_to_num(logits.float(), nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf).double()
    largest = x.amax(dim=1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scaled = (x - torch.where(largest == -math.inf, 0.0, largest)[:, None]) / temperatures.double()[:, None]
    mass = scaled.exp().sum(dim=1)
    dist.all_reduce(mass, group=group)
    log_p = scaled - mass.clamp_min(1.0).log()[:, None]
    time = noise.double().abs()
    arrival = torch.where(time == 0, math.inf, (log_p - time.log()).clamp_min(-1e300))
    arrival = torch.where(log_p > LOG_LEAST, arrival, -math.inf)
    arrivals, tokens = arrival.max(dim=1)
    first = (arrival == arrivals[:, None]).double().argmax(dim=1)  # the lowest id of a tie
    return torch.where(arrivals > -math.inf, first, tokens.new_zeros(())), arrivals
