"""Cases of sample: forbidden tokens, rows without a distribution, a clear maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from conformance.cases.laws import dtype_name


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
    dtype: torch.dtype = torch.float32

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
        elif self.kind == "last id":
            return token == v - 1
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
        return logits.to(self.dtype)

    @cached_property
    def good_rows(self) -> torch.Tensor:
        rows = torch.arange(self.num_rows)
        return rows % 3 != 1 if self.dead else torch.ones(self.num_rows, dtype=torch.bool)

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   {dtype_name(self.dtype)} · B {self.num_rows} · V {self.vocab_size} · T {self.temperature:g} · {device}"

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
    CornerRows("last id", 1024, 16),  # the end of whole tiles
    CornerRows("last id", 4096, 4),
    CornerRows("last ids", 129, 64),
    CornerRows("first ids", 257, 64),
    CornerRows("last ids", 65_539, 2),  # a tile of 2^16 and the three ids after it
    CornerRows("first ids", 65_539, 2),
    CornerRows("last ids", 151_936, 2),  # the vocabulary of Qwen 3
    CornerRows("half", 17, 1),
    CornerRows("half", 17, 0),
)
DEAD_ROWS = tuple(CornerRows(kind, v, 30, dead=dead) for dead in ("nan", "-inf", "inf") for kind, v in (("one", 17), ("half", 100)))


def corners_of(cases: tuple[CornerRows, ...], dtype: torch.dtype) -> list[CornerRows]:
    """The same in another dtype, at levels that it holds."""
    return [replace(case, dtype=dtype, level=max(case.level, torch.finfo(dtype).min)) for case in cases]


def half_corners(dtype: torch.dtype) -> list[CornerRows]:
    """Where a path of half precision may go wrong by itself: the lowest number in place of -inf, a NaN row, a large vocabulary."""
    lowest = torch.finfo(dtype).min
    rows = CornerRows("half", 17, 300, temperature=2.0, level=lowest), CornerRows("one", 17, 30, dead="nan"), CornerRows("last ids", 65_539, 1)
    return [replace(case, dtype=dtype) for case in rows]


@dataclass(frozen=True)
class ClearMaximum:
    """Every row has one largest logit, `gap` above all others, and T is so small that nothing else can be drawn.

    between: every second row is flat in place of that, at T = 1.
    """

    temperature: float
    gap: float = 0.4
    num_rows: int = 64
    vocab_size: int = 500
    dtype: torch.dtype = torch.float32
    between: bool = False

    @cached_property
    def flat_rows(self) -> torch.Tensor:
        """(B,) bool"""
        return (torch.arange(self.num_rows) % 2 == 1) & self.between

    @cached_property
    def temperatures(self) -> torch.Tensor:
        """(B,) float32"""
        return torch.where(self.flat_rows, 1.0, self.temperature)

    @cached_property
    def winners(self) -> torch.Tensor:
        return torch.randint(0, self.vocab_size, (self.num_rows,), generator=torch.Generator().manual_seed(3))

    @cached_property
    def logits(self) -> torch.Tensor:
        base = torch.linspace(-5.0, 5.0, self.num_rows)[:, None].expand(self.num_rows, self.vocab_size).clone()
        base[torch.arange(self.num_rows), self.winners] += self.gap
        base[self.flat_rows] = 0.0
        return base.to(self.dtype)

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   {dtype_name(self.dtype)} · B {self.num_rows} · V {self.vocab_size} · T {self.temperature:g} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        told = [("logits", f"the largest is {self.gap} above all others, which are equal")]
        return [*told, ("rows 1, 3, 5 ...", "are flat, at T = 1")] if self.between else told

    def size(self) -> int:
        return self.num_rows * self.vocab_size
