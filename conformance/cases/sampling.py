"""Cases of sample: laws to draw from, and races whose noise is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import strategies as st

from conformance.cases.attention import short

# in one batch, in an order in which neighbours are far apart; the next row's is at least 1.6 times as high or as low
TEMPERATURES = (0.05, 1.0, 0.3, 10.0, 0.8, 2.0, 0.1, 5.0, 0.5, 1.5, 0.2, 3.0)
NOISES = ("exponential", "one zero", "one -0.0", "two zeros", "one denormal", "tiny", "huge", "some inf", "large everywhere", "all equal")
VOCAB_SIZES = (2, 17, 1, 16, 33, 64, 100, 127, 128, 129, 257, 1000)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Law:
    """Equal rows of one distribution: `draws` tokens are drawn from it, in calls of `batches` rows."""

    shape: str  # flat, peaked, two-level, or top-only
    vocab_size: int
    temperature: float
    draws: int
    dtype: torch.dtype = torch.float32
    offset: float = 0.0  # added to every logit: it changes no probability, and what is rounded does not survive it
    grid: float = 0.0  # logits are multiples of it, so that every dtype holds the same values; 0: any
    largest_call: int = 2**31  # logits that one call may hold

    @cached_property
    def logits(self) -> torch.Tensor:
        """(V,) of the dtype. Which id has which probability is shuffled, so that a shift of the ids shows."""
        v = self.vocab_size
        ranks = torch.arange(v, dtype=torch.float64)
        if self.shape == "flat":
            log_p = torch.zeros(v, dtype=torch.float64)
        elif self.shape == "peaked":  # a few tokens with 1 / 2 of the mass, and six nats between the first and the last
            log_p = -torch.log(ranks + 1) if v >= 100 else torch.where(ranks == 0, 0.0, -(1.2 + 4.8 * ranks / v))
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
        """Rows of each call, `draws` * `times` in all: one row, 32 rows, a quarter, the rest; no call above `largest_call`."""
        most = max(1, self.largest_call // self.vocab_size)
        total = self.draws * times
        sizes = [n for n in (1, 32, total // 4) if n <= most]
        rest = total - sum(sizes)
        return [*sizes, *[most] * (rest // most), *([rest % most] if rest % most else [])]

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   {dtype_name(self.dtype)} · V {self.vocab_size} · T {self.temperature:g} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        largest, smallest = float(self.logits.max()), float(self.logits.min())
        return [
            ("law", f"{self.shape}, logits from {smallest:.6g} to {largest:.6g}, each row alike"),
            ("draws", f"{self.draws}, then {4 * self.draws} fresh ones"),
        ]

    def size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class RaceCase:
    """Rows whose noise is given."""

    num_rows: int
    vocab_size: int
    noise: str = "exponential"  # one of NOISES
    temperature: float = 1.0
    spread: float = 2.0  # standard deviation of logits / T
    offset: float = 0.0
    ties: bool = False  # logits and noise of few values, so that the best ratio is often shared
    layout: str = "plain"  # plain, fused (rows are slices of wider rows) or transposed
    dtype: torch.dtype = torch.float32
    temperatures: tuple[float, ...] = ()  # of the rows in turn, in place of the one temperature
    seed: int = 0

    @cached_property
    def row_temperatures(self) -> torch.Tensor:
        """(B,) float32"""
        cycle = self.temperatures or (self.temperature,)
        return torch.tensor([cycle[row % len(cycle)] for row in range(self.num_rows)], dtype=torch.float32)

    @cached_property
    def logits(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * self.seed)
        normal = torch.randn((self.num_rows, self.vocab_size), generator=generator) * self.spread
        if self.ties:
            normal = normal.sign()
        return (normal * self.row_temperatures[:, None] + self.offset).to(self.dtype)

    @cached_property
    def noises(self) -> torch.Tensor:
        """(B, V) float32, at least 0."""
        generator = torch.Generator().manual_seed(2 * self.seed + 1)
        shape = self.num_rows, self.vocab_size
        noise = torch.empty(shape, dtype=torch.float64).exponential_(generator=generator).clamp_min(1e-20).float()
        if self.ties:
            noise = torch.where(noise < 0.5, 0.5, 2.0)
        places = torch.rand(shape, generator=generator).argsort(dim=1)  # a random order of each row's ids
        first, second = places == 0, places == 1
        some = places % 3 == 1
        size = torch.rand(shape, generator=generator)
        if self.noise == "one zero":
            noise[first] = 0.0
        elif self.noise == "one -0.0":
            noise[first] = -0.0
        elif self.noise == "two zeros":
            noise[first], noise[second] = 0.0, -0.0
        elif self.noise == "one denormal":
            noise[first] = 2.0**-149
        elif self.noise == "tiny":  # what float32 cannot tell from 0 once 1 - noise or exp(-noise) has been taken
            noise = 10.0 ** (-8.0 - 6.0 * size)
        elif self.noise == "huge":
            noise[some] = 1e38
        elif self.noise == "some inf":
            noise[some] = math.inf
        elif self.noise == "large everywhere":  # exp(-noise) is 0 in float32
            noise = 10.0 ** (2.5 + 6.0 * size)
        elif self.noise == "all equal":
            noise = torch.ones(shape)
        return noise

    def headline(self, implementation: str, device: str) -> str:
        temperature = "a row's own" if self.temperatures else f"{self.temperature:g}"
        return f"{implementation}.sample   {dtype_name(self.dtype)} · B {self.num_rows} · V {self.vocab_size} · T {temperature} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        told = [("noise", f"given: {self.noise}" + (", few values" if self.ties else "")), ("layout", self.layout)]
        if self.temperatures:
            told.insert(0, ("temperatures", short(str(list(self.temperatures)))))
        return told

    def size(self) -> int:
        return self.num_rows * self.vocab_size


@st.composite
def races(draw: st.DrawFn, dtype: torch.dtype) -> RaceCase:
    """One temperature for all rows, no logit of -inf: rows' own temperatures are SAMPLE-2's, forbidden tokens SAMPLE-7's."""
    vocab_size = draw(st.sampled_from(VOCAB_SIZES), label="vocab_size")
    return RaceCase(
        num_rows=draw(st.sampled_from([1, 2, 3, 8, 0] if vocab_size > 200 else [1, 2, 5, 33, 0]), label="rows"),
        vocab_size=vocab_size,
        noise=draw(st.sampled_from(NOISES), label="noise"),
        temperature=draw(st.sampled_from([1.0, 0.5, 0.05, 0.7, 10.0]), label="temperature"),
        spread=draw(st.sampled_from([2.0, 0.0, 8.0]), label="spread"),
        offset=draw(st.sampled_from([0.0, -20.0, 30.0]), label="offset"),
        ties=draw(st.booleans(), label="ties"),
        layout=draw(st.sampled_from(["plain", "fused", "transposed"]), label="layout"),
        dtype=dtype,
        seed=draw(st.integers(0, 999), label="seed"),
    )


def notable_races(dtype: torch.dtype) -> list[RaceCase]:
    """Every kind of noise once, and a row of more than one tile of any size."""
    kinds = [RaceCase(64, 33, noise=noise, temperature=0.7, dtype=dtype, seed=i) for i, noise in enumerate(NOISES)]
    return [
        *kinds,
        RaceCase(0, 33, dtype=dtype),
        RaceCase(1, 1, dtype=dtype),
        RaceCase(64, 33, ties=True, dtype=dtype),
        RaceCase(2, 65_539, dtype=dtype, spread=0.0),
    ]


@dataclass(frozen=True)
class CornerRows:
    """Rows of which most logits are -inf, and rows without any distribution between them."""

    kind: str
    vocab_size: int
    num_rows: int
    temperature: float = 1.0
    level: float = 0.0  # of the logits that are allowed
    dead: str = ""  # nan, -inf or inf: every third row holds nothing else
    seed: int = 0

    @cached_property
    def allowed(self) -> torch.Tensor:
        """(B, V) bool: what may be drawn."""
        v, rows = self.vocab_size, self.num_rows
        token = torch.arange(v).expand(rows, v)
        row = torch.arange(rows)[:, None]
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == "half":
            allowed = torch.rand((rows, v), generator=generator) < 0.5
        elif self.kind == "one":
            allowed = torch.zeros((rows, v), dtype=torch.bool)
        elif self.kind == "last ids":
            return token >= v - 3
        elif self.kind == "first ids":
            return token < 3
        elif self.kind == "one tile of 64":
            return token // 64 == row % -(-v // 64)
        else:  # all equal
            return torch.ones((rows, v), dtype=torch.bool)
        return allowed | (token == torch.randint(0, v, (rows, 1), generator=generator))

    @cached_property
    def logits(self) -> torch.Tensor:
        logits = torch.where(self.allowed, self.level, -math.inf)
        if self.dead:
            logits[1::3] = float(self.dead)
        return logits

    @cached_property
    def good_rows(self) -> torch.Tensor:
        rows = torch.arange(self.num_rows)
        return rows % 3 != 1 if self.dead else torch.ones(self.num_rows, dtype=torch.bool)

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   float32 · B {self.num_rows} · V {self.vocab_size} · T {self.temperature:g} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        told = [("allowed", f"{self.kind}: logits {self.level:g}, all others -inf")]
        return [*told, ("rows 1, 4, 7 ...", f"are {self.dead} throughout")] if self.dead else told

    def size(self) -> int:
        return self.num_rows * self.vocab_size


CORNERS = (
    CornerRows("half", 17, 1000),
    CornerRows("half", 17, 300, temperature=10.0, level=-1e30),  # any finite number in place of -inf would win
    CornerRows("half", 17, 300, temperature=2.0, level=-2e4),
    CornerRows("one", 17, 200),
    CornerRows("one", 1000, 20),
    CornerRows("all equal", 17, 200),
    CornerRows("all equal", 1, 3),
    CornerRows("one tile of 64", 1000, 48),
    CornerRows("last ids", 129, 64),
    CornerRows("first ids", 257, 64),
    CornerRows("last ids", 65_539, 2),  # a tile of 2^16 and the three ids after it
    CornerRows("first ids", 65_539, 2),
    CornerRows("half", 17, 1),
    CornerRows("half", 17, 0),
)
DEAD_ROWS = tuple(CornerRows(kind, v, 30, dead=dead) for dead in ("nan", "-inf", "inf") for kind, v in (("one", 17), ("half", 100)))


@dataclass(frozen=True)
class RowTemperatures:
    """One batch with a temperature for each row. Logits grow with it: all rows have the same distribution, and no other T gives it."""

    draws: int  # of each temperature
    layout: str = "plain"  # fused: temperatures are a column of a wider tensor

    @property
    def law(self) -> Law:
        return Law("peaked", 17, 1.0, self.draws)

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """logits (count, V), temperatures (count,), which go through TEMPERATURES in turn."""
        temperatures = torch.tensor(TEMPERATURES, dtype=torch.float32).repeat(-(-count // len(TEMPERATURES)))[:count]
        return self.law.logits * temperatures[:, None], temperatures

    def batches(self, times: int) -> list[int]:
        return [5, 25, len(TEMPERATURES) * self.draws * times - 30]

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   float32 · V 17 · {device}"

    def literals(self) -> list[tuple[str, str]]:
        told = [("temperatures", f"{', '.join(f'{t:g}' for t in TEMPERATURES)}, and from the start again")]
        return [*told, ("logits", "of a row: its temperature times the same logits"), ("layout", f"{self.layout} temperatures")]

    def size(self) -> int:
        return self.draws


@dataclass(frozen=True)
class EqualRows:
    """Calls of equal rows, of a distribution with few tokens: pairs of draws fill a small table."""

    num_calls: int
    num_rows: int
    logits: tuple[float, ...] = (0.0, 0.5, -0.3, 0.8, 0.2)

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   float32 · B {self.num_rows} · V {len(self.logits)} · T 1 · {device}"

    def literals(self) -> list[tuple[str, str]]:
        return [("calls", f"{self.num_calls}, then {4 * self.num_calls} fresh ones, each with equal rows of logits {list(self.logits)}")]

    def size(self) -> int:
        return self.num_rows


@dataclass(frozen=True)
class FlatRows:
    """Rows of V equal logits: two sound draws of all of them are the same with probability V ** -B."""

    num_rows: int
    vocab_size: int = 1000
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    layout: str = "plain"

    @property
    def logits(self) -> torch.Tensor:
        return torch.ones((self.num_rows, self.vocab_size), dtype=self.dtype)

    def headline(self, implementation: str, device: str) -> str:
        shape = f"B {self.num_rows} · V {self.vocab_size} · T {self.temperature:g}"
        return f"{implementation}.sample   {dtype_name(self.dtype)} · {shape} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        return [("logits", f"all equal, {self.layout} layout")]

    def size(self) -> int:
        return self.num_rows * self.vocab_size


@dataclass(frozen=True)
class ClearMaximum:
    """Every row has one largest logit, `gap` above all others, and T is so small that nothing else can be drawn."""

    temperature: float
    gap: float = 0.4
    num_rows: int = 64
    vocab_size: int = 500

    @cached_property
    def winners(self) -> torch.Tensor:
        return torch.randint(0, self.vocab_size, (self.num_rows,), generator=torch.Generator().manual_seed(3))

    @cached_property
    def logits(self) -> torch.Tensor:
        base = torch.linspace(-5.0, 5.0, self.num_rows)[:, None].expand(self.num_rows, self.vocab_size).clone()
        base[torch.arange(self.num_rows), self.winners] += self.gap
        return base

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   float32 · B {self.num_rows} · V {self.vocab_size} · T {self.temperature:g} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        return [("logits", f"the largest is {self.gap} above all others, which are equal")]

    def size(self) -> int:
        return self.num_rows * self.vocab_size
