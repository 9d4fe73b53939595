"""Sampling with the vocabulary split over ranks: every rank holds some columns of the logits, and all agree on one token a row.

The contract has no such function. What an implementation offers as `parallel_sample(logits_shard, temperatures, *, noise=None, seed=None,
group=None)` is held here to the unsharded race: every rank of the group runs `judge_sharded`, and all come to the same findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.cases.laws import Law
from conformance.cases.races import RaceCase
from conformance.checks.distribution import looks_like, pearson, rejected
from conformance.checks.race import may_win

ParallelSample = Callable[..., torch.Tensor]


def widths_of(vocab_size: int, size: int, even: bool) -> list[int]:
    """Columns of each rank: as torch.chunk cuts them, or the first rank's shard one column wide."""
    if even or size == 1:
        width = -(-vocab_size // size)
        return [min(width, vocab_size - rank * width) for rank in range(size)]
    rest = vocab_size - 1
    return [1, *(rest // (size - 1) + (rank < rest % (size - 1)) for rank in range(size - 1))]


def races_of(size: int) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, bool]]:
    """(name, logits, temperatures, noise, shards of one width): what a shard alone does not know is settled between the ranks."""
    cases = [
        RaceCase(64, 16 * size, noise=noise, temperature=0.7, ties=ties, offset=offset, seed=seed)
        for seed, (noise, ties, offset) in enumerate(
            [("exponential", False, 0.0), ("exponential", True, -20.0), ("one zero", False, 0.0), ("two zeros", False, 30.0), ("huge", False, 0.0)]
        )
    ]
    told = [(f"noise {case.noise}", case.logits, case.row_temperatures, case.noises, case.seed % 2 == 0) for case in cases]
    case = cases[0]
    one_shard = torch.full_like(case.logits, -math.inf)
    for row in range(len(one_shard)):  # all shards but one are -inf throughout
        one_shard[row, 16 * (row % size) : 16 * (row % size) + 1 + row % 16] = case.logits[row, : 1 + row % 16]
    tempting = torch.where(one_shard == -math.inf, 0.0, case.noises)
    return [*told, ("noise 0 at forbidden tokens", one_shard, case.row_temperatures, tempting, True)]


class ShardedChecks:
    def __init__(self, parallel_sample: ParallelSample, device: torch.device, group: Any = None) -> None:
        self.parallel_sample, self.device, self.group = parallel_sample, device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.findings: list[str] = []

    def draw(
        self, logits: torch.Tensor, temperatures: torch.Tensor, even: bool, what: str, *,
        noise: torch.Tensor | None = None, seed: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """(B,) of this rank; what the others got must be the same."""
        widths = widths_of(logits.shape[1], self.size, even)
        columns = slice(sum(widths[: self.rank]), sum(widths[: self.rank + 1]))
        given = {} if noise is None else {"noise": noise[:, columns].to(self.device)}
        tokens = self.parallel_sample(
            logits[:, columns].to(self.device), temperatures.to(self.device), seed=seed, group=self.group, **given
        )
        every = [torch.empty_like(tokens) for _ in range(self.size)]
        dist.all_gather(every, tokens, group=self.group)
        for rank, others in enumerate(every):
            if not torch.equal(others, every[0]):
                row = int((others != every[0]).nonzero()[0])
                self.findings.append(f"{what}: row {row} is token {int(every[0][row])} on rank 0, {int(others[row])} on rank {rank}")
        return every[0].cpu()

    def given_noise(self) -> None:
        for name, logits, temperatures, noise, even in races_of(self.size):
            tokens = self.draw(logits, temperatures, even, name, noise=noise)
            good = may_win(logits, temperatures, noise)[torch.arange(len(tokens)), tokens.clamp(0, logits.shape[1] - 1)]
            wrong = (~good | (tokens < 0) | (tokens >= logits.shape[1])).nonzero().flatten().tolist()
            if wrong:
                row = wrong[0]
                self.findings.append(f"{name}: {len(wrong)} rows, row {row} gave token {int(tokens[row])}, which loses the unsharded race")

    def distribution(self, draws: int) -> None:
        """A far offset, because shards that compare arrivals in float32 lose their order there; bfloat16 logits that it holds exactly."""
        laws = (
            (Law("peaked", 17, 0.8, draws), False),
            (Law("two-level", 96, 1.3, draws, offset=5000.0), True),
            (Law("peaked", 17, 0.7, draws, torch.bfloat16, offset=80.0, grid=0.5), False),
        )
        for law, even in laws:
            counts = np.zeros(law.vocab_size)

            def p_value(times: int, law: Law = law, even: bool = even, counts: np.ndarray = counts) -> float:
                counts[:] = 0
                for rows in law.batches(times):
                    logits, temperatures = law.logits.expand(rows, -1), torch.full((rows,), law.temperature)
                    tokens = self.draw(logits, temperatures, even, f"{law.shape} law").clamp(0, law.vocab_size - 1)
                    counts[:] += np.bincount(tokens.numpy(), minlength=law.vocab_size)
                return pearson(counts, law.probabilities.numpy())

            if rejected(p_value):
                self.findings.append(f"{law.shape} law: {looks_like(counts, law.logits.double().numpy(), law.temperature)}")

    def seeds_and_corners(self) -> None:
        flat, ones = torch.zeros(64, 50 * self.size), torch.ones(64)
        first, again, other = (self.draw(flat, ones, True, "seeds", seed=seed) for seed in (1, 1, 2))
        if not torch.equal(first, again):
            self.findings.append("seed 1 does not repeat")
        if torch.equal(first, other):
            self.findings.append("seeds 1 and 2 give the same tokens")
        torch.manual_seed(7)  # the same on every rank, as engines do
        tokens = self.draw(flat, ones, True, "ranks seeded alike") % 50
        if len(tokens.unique()) < 10 or torch.equal(tokens, self.draw(flat, ones, True, "calls") % 50):
            self.findings.append("consecutive calls give the same tokens")
        dead = flat.clone()
        dead[::3] = math.nan
        dead[1::3] = -math.inf
        dead[1::3, -1] = 2.0
        tokens = self.draw(dead, ones, True, "rows of NaN and of one logit")
        if not bool((tokens[1::3] == flat.shape[1] - 1).all()) or not bool(((tokens >= 0) & (tokens < flat.shape[1])).all()):
            self.findings.append("a row with one finite logit, on the last rank, gave another token")
        if tuple(self.draw(flat[:0], ones[:0], True, "no rows").shape) != (0,):
            self.findings.append("no rows must give no tokens")


def judge_sharded(
    parallel_sample: ParallelSample, device: torch.device, *,
    draws: int = 4_000, group: Any = None, tell: Callable[[str], None] = lambda what: None,
) -> list[str]:  # fmt: skip
    """One sentence for each thing that is wrong; every rank of the group calls this, and gets the same. `tell` hears what is begun."""
    checks = ShardedChecks(parallel_sample, device, group)
    torch.manual_seed(3)
    tell("sharded sampling with given noise")
    checks.given_noise()
    tell("the distribution of sharded sampling")
    checks.distribution(draws)
    tell("seeds and corners of sharded sampling")
    checks.seeds_and_corners()
    return list(dict.fromkeys(checks.findings))
