"""Cases of sample: races whose noise is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import strategies as st

from conformance.cases.attention import short
from conformance.cases.laws import dtype_name

NOISES = ("exponential", "one zero", "one -0.0", "two zeros", "one denormal", "tiny", "huge", "some inf", "large everywhere", "all equal")
LAYOUTS = ("plain", "fused", "transposed")
VOCAB_SIZES = (2, 17, 1, 16, 33, 64, 100, 127, 128, 129, 257, 1000)


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
    layout: str = "plain"  # of the logits: plain, fused (rows are slices of wider rows) or transposed
    noise_layout: str = "plain"
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
        few = ", few values" if self.ties else ""
        told = [("noise", f"given: {self.noise}{few}"), ("layout", f"{self.layout} logits, {self.noise_layout} noise")]
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
        temperature=draw(st.sampled_from([1.0, 0.5, 0.05, 0.7, 10.0, 100.0]), label="temperature"),
        spread=draw(st.sampled_from([2.0, 0.0, 8.0]), label="spread"),
        offset=draw(st.sampled_from([0.0, -20.0, 30.0]), label="offset"),
        ties=draw(st.booleans(), label="ties"),
        layout=draw(st.sampled_from(LAYOUTS), label="layout"),
        noise_layout=draw(st.sampled_from(LAYOUTS), label="noise_layout"),
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
        RaceCase(64, 33, layout="fused", dtype=dtype),
        RaceCase(64, 33, noise_layout="fused", dtype=dtype),
        RaceCase(2, 65_539, dtype=dtype, spread=0.0),
    ]
