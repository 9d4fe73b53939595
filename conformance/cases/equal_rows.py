"""Cases of sample: rows that are all alike, for independence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conformance.cases.laws import dtype_name


@dataclass(frozen=True)
class EqualRows:
    """Calls of equal rows, of a distribution with few tokens: pairs of draws fill a small table."""

    num_calls: int
    num_rows: int
    dtype: torch.dtype = torch.float32
    logits: tuple[float, ...] = (0.0, 0.5, -0.3, 0.8, 0.2)

    def headline(self, implementation: str, device: str) -> str:
        return f"{implementation}.sample   {dtype_name(self.dtype)} · B {self.num_rows} · V {len(self.logits)} · T 1 · {device}"

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
