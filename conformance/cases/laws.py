"""Cases of sample: laws to draw from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

# in one batch, in an order in which neighbours are far apart; the next row's is at least 1.6 times as high or as low
TEMPERATURES = (0.05, 1.0, 0.3, 10.0, 0.8, 2.0, 0.1, 5.0, 0.5, 1.5, 0.2, 3.0)

RARE = 0.0009  # of the mass: what a top-p of 0.999, left on, takes away


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def widest(dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """What most cases hold."""
    return torch.float32 if torch.float32 in dtypes else dtypes[0]


@dataclass(frozen=True)
class Law:
    """Equal rows of one distribution: `draws` tokens are drawn from it, in calls of `batches` rows."""

    shape: str  # flat, peaked, two-level, top-only, steps, or rare
    vocab_size: int
    temperature: float
    draws: int
    dtype: torch.dtype = torch.float32
    offset: float = 0.0  # added to every logit: it changes no probability, and what is rounded does not survive it
    grid: float = 0.0  # logits are multiples of it, so that every dtype holds the same values; 0: any
    largest_call: int = 2**31  # logits that one call may hold
    by_rank: bool = False  # rare tokens are pooled with others as rare, so that a cut tail shows, not with neighbours, so that a tile does
    seeded: bool = False  # every call is given a seed of its own
    rows_per_call: int = 0  # of every call; as many are drawn as half a second allows, and 50 at least. 0: a few calls, most of many rows
    few_calls: bool = False  # two instead of four

    @cached_property
    def logits(self) -> torch.Tensor:
        """(V,) of the dtype. Which id has which probability is shuffled, so that a shift of the ids shows."""
        v = self.vocab_size
        ranks = torch.arange(v, dtype=torch.float64)
        if self.shape == "flat":
            log_p = torch.zeros(v, dtype=torch.float64)
        elif self.shape == "peaked":  # a few tokens with 1 / 2 of the mass, and six nats between the first and the last
            log_p = -torch.log(ranks + 1) if v >= 100 else torch.where(ranks == 0, 0.0, -(1.2 + 4.8 * ranks / v))
        elif self.shape == "steps":  # each token a nat under the one before
            log_p = -ranks
        elif self.shape == "rare":  # all tokens but the first share 0.0009 of the mass
            log_p = torch.where(ranks == 0, 0.0, math.log(RARE / (1 - RARE) / max(1, v - 1)))
        else:  # two-level: a few tokens share half of the mass, all others the other half; top-only: the others are out of reach
            few = max(1, v // 250) if self.shape == "two-level" else (v + 1) // 2
            gap = math.log(max(2.0, (v - few) / few)) if self.shape == "two-level" else 256.0 / self.temperature
            log_p = torch.where(ranks < few, 0.0, -gap)
        logits = log_p[torch.randperm(v, generator=torch.Generator().manual_seed(v))] * self.temperature + self.offset
        if self.grid:
            logits = torch.round(logits / self.grid) * self.grid
        return logits.to(self.dtype)

    @cached_property
    def probabilities(self) -> torch.Tensor:
        """(V,) float64: softmax of the logits that are handed over, divided by the temperature as float32 has it."""
        return torch.softmax(self.logits.double() / float(torch.tensor(self.temperature, dtype=torch.float32)), dim=0)

    def batches(self, times: int = 1) -> list[int]:
        """Rows of each call, `draws` * `times` in all: one row, 32 rows, a quarter, the rest, or 32 and the rest; no call above `largest_call`."""
        most = max(1, self.largest_call // self.vocab_size)
        total = self.draws * times
        if self.rows_per_call:
            return [self.rows_per_call] * -(-total // self.rows_per_call)
        sizes = [n for n in ((32,) if self.few_calls else (1, 32, total // 4)) if n <= most]
        rest = total - sum(sizes)
        return [*sizes, *[most] * (rest // most), *([rest % most] if rest % most else [])]

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   {dtype_name(self.dtype)} · V {self.vocab_size} · T {self.temperature:g} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        largest, smallest = float(self.logits.max()), float(self.logits.min())
        return [
            ("law", f"{self.shape}, logits from {smallest:.6g} to {largest:.6g}, each row alike"),
            ("draws", f"{self.draws}, then {4 * self.draws} fresh ones{', each call with another seed' if self.seeded else ''}"),
            *([("rows of a call", str(self.rows_per_call))] if self.rows_per_call else []),
        ]

    def size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class RowTemperatures:
    """One batch with a temperature for each row. Logits grow with it: all rows have the same distribution, and no other T gives it."""

    draws: int  # of each temperature
    layout: str = "plain"  # fused: temperatures are a column of a wider tensor
    dtype: torch.dtype = torch.float32  # of the logits

    @property
    def law(self) -> Law:
        return Law("peaked", 17, 1.0, self.draws)

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """logits (count, V), temperatures (count,), which go through TEMPERATURES in turn."""
        temperatures = torch.tensor(TEMPERATURES, dtype=torch.float32).repeat(-(-count // len(TEMPERATURES)))[:count]
        return (self.law.logits * temperatures[:, None]).to(self.dtype), temperatures

    def batches(self, times: int) -> list[int]:
        return [5, 25, len(TEMPERATURES) * self.draws * times - 30]

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   {dtype_name(self.dtype)} · V 17 · {device}"

    def literals(self) -> list[tuple[str, str]]:
        told = [("temperatures", f"{', '.join(f'{t:g}' for t in TEMPERATURES)}, and from the start again")]
        return [*told, ("logits", "of a row: its temperature times the same logits"), ("layout", f"{self.layout} temperatures")]

    def size(self) -> int:
        return self.draws


@dataclass(frozen=True)
class Tail:
    """One top token, and many equal ones so far under it that each is drawn less than once in a million draws."""

    nats: float  # under the top
    tail_tokens: int
    draws: int
    dtype: torch.dtype = torch.float32
    largest_call: int = 2**22  # logits that one call may hold

    @property
    def vocab_size(self) -> int:
        return self.tail_tokens + 16  # the top, and 15 forbidden tokens after the tail, so that rows begin at aligned addresses

    @property
    def top(self) -> int:
        return self.tail_tokens // 3

    @cached_property
    def logits(self) -> torch.Tensor:
        """(V,) of the dtype."""
        logits = torch.full((self.vocab_size,), -self.nats)
        logits[self.tail_tokens + 1 :] = -math.inf
        logits[self.top] = 0.0
        return logits.to(self.dtype)

    @property
    def probability(self) -> float:
        """That a draw is of the tail."""
        mass = self.tail_tokens * math.exp(float(self.logits[0]))
        return mass / (1 + mass)

    def batches(self, times: int) -> list[int]:
        most, total = max(1, self.largest_call // self.vocab_size), self.draws * times
        return [most] * (total // most) + ([total % most] if total % most else [])

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   {dtype_name(self.dtype)} · V {self.vocab_size} · T 1 · {device}"

    def literals(self) -> list[tuple[str, str]]:
        told = [("law", f"{self.tail_tokens} equal tokens, each {self.nats:g} nats under token {self.top}, and 15 forbidden ones")]
        return [*told, ("draws", f"{self.draws}, then {4 * self.draws} fresh ones")]

    def size(self) -> int:
        return self.vocab_size
