"""Cases of last_token_logits and parallel_logits: small integers, so that every product is exact and a wrong row shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import strategies as st

from conformance.capabilities import Capabilities
from conformance.cases.attention import short
from conformance.cases.laws import dtype_name

DIGITS = 3  # a row's code has so many digits
BASE = 8
MATCH = 40  # what a digit in common adds to a logit: three are more than two and all the rest
DENSE = 24  # columns of -1, 0 and 1 besides, so that no column of hidden is without meaning


@dataclass(frozen=True)
class LogitsCase:
    """|logits| <= 144: exact in float32, tf32, float16 and bfloat16, whatever the order of the sum. Each row has its own argmax."""

    lens: tuple[int, ...]  # query tokens of each sequence; one each in a decode step
    vocab_size: int
    decode: bool = False  # without cu_seqlens_q
    dtype: torch.dtype = torch.float32
    layout: str = "plain"  # fused: hidden's rows are slices of wider rows
    sums_layout: str = "plain"  # of cu_seqlens_q
    poison: float = 0.0  # nan or inf: what the rows that must not matter hold (LOGIT-3)
    seed: int = 0
    negative: bool = False  # all logits are negative
    shards: tuple[int, ...] = ()  # rows of the weight on each rank of the group
    ranks: tuple[int, ...] | None = None  # the group, None: all ranks

    @property
    def ends(self) -> list[int]:
        """The last row of each sequence."""
        return [sum(self.lens[: i + 1]) - 1 for i in range(len(self.lens))]

    @property
    def cu_seqlens_q(self) -> torch.Tensor | None:
        return None if self.decode else torch.tensor([0, *(end + 1 for end in self.ends)], dtype=torch.int32)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (T, E), weight (V, E), both of the dtype. Token order[j] of the vocabulary is aimed at row target[j]."""
        generator = torch.Generator().manual_seed(self.seed)
        num_rows, v = sum(self.lens), self.vocab_size
        others = torch.randperm(num_rows, generator=generator).tolist()
        targets = ([*self.ends, *others] * (1 + v))[:v] if num_rows else [0] * v
        order = torch.randperm(v, generator=generator)
        hidden = torch.cat([codes(list(range(num_rows))), small(num_rows, generator)], dim=1)
        weight = torch.empty((v, hidden.shape[1]))
        weight[order] = torch.cat([MATCH * codes(targets), small(v, generator)], dim=1)
        if self.negative:  # the last column is 1 in every row of hidden
            hidden[:, -1], weight[:, -1] = 1, -150
        columns = torch.randperm(hidden.shape[1], generator=generator)
        return hidden[:, columns].to(self.dtype), weight[:, columns].to(self.dtype)

    @cached_property
    def all_logits(self) -> torch.Tensor:
        """(T, V) float64: of every row of hidden."""
        hidden, weight = self.tensors
        return hidden.double() @ weight.double().T

    @property
    def want(self) -> torch.Tensor:
        """(B, V) float64"""
        return self.all_logits[self.ends]

    def row_name(self, row: int) -> str:
        """Which sequence and position a row of hidden is of."""
        if self.decode:
            return f"hidden row {row} of {len(self.lens)}"
        sequence = next(i for i, end in enumerate(self.ends) if row <= end)
        position = row - (self.ends[sequence] + 1 - self.lens[sequence])
        return f"hidden row {row} = token {position} of {self.lens[sequence]} of sequence {sequence}"

    def headline(self, implementation: str, device: str) -> str:
        function = "parallel_logits" if self.shards else "last_token_logits"
        shape = f"B {len(self.lens)} · E {DIGITS * BASE + DENSE} · V {self.vocab_size}"
        return f"{implementation}.{function}   {dtype_name(self.dtype)} · {shape} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        sums = self.cu_seqlens_q
        told = [("cu_seqlens_q", "None (decode)" if sums is None else short(str(sums.tolist()))), ("hidden", f"{self.layout} layout")]
        if self.sums_layout != "plain":
            told.append(("cu_seqlens_q", f"{self.sums_layout} layout"))
        if self.shards:
            group = "all ranks" if self.ranks is None else f"global ranks {list(self.ranks)}"
            told.append(("shards", f"of {list(self.shards)} tokens on {group}{', all logits negative' if self.negative else ''}"))
        return told

    def size(self) -> int:
        return sum(self.lens) * self.vocab_size


def codes(rows: list[int]) -> torch.Tensor:
    """(len(rows), DIGITS * BASE): one 1 for each digit of the row's number."""
    code = torch.zeros((len(rows), DIGITS * BASE))
    for i, row in enumerate(rows):
        for digit in range(DIGITS):
            code[i, digit * BASE + row // BASE**digit % BASE] = 1
    return code


def small(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1, 2, (rows, DENSE), generator=generator).float()


PAST_2048 = (2052, 949)  # tokens: the last ones' rows are no numbers of float16
RAGGED = ((3, 1, 2), (17,), (5,), (1, 1, 1, 1), (2, 3), (129, 1, 64), (1, 7, 1, 30, 2), (64, 64), (1,))


@st.composite
def prefills(draw: st.DrawFn, capabilities: Capabilities) -> LogitsCase:
    length = st.one_of(st.integers(1, 4), st.sampled_from([15, 16, 17, 64, 65]))
    return LogitsCase(
        lens=draw(st.one_of(st.sampled_from(RAGGED), st.lists(length, min_size=1, max_size=6).map(tuple)), label="lens"),
        vocab_size=draw(st.sampled_from([50, 17, 64, 129, 300]), label="vocab_size"),
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        layout=draw(st.sampled_from(["plain", "fused"]), label="layout"),
        seed=draw(st.integers(0, 999), label="seed"),
    )


@st.composite
def decodes(draw: st.DrawFn, capabilities: Capabilities, rows: tuple[int, ...]) -> LogitsCase:
    return LogitsCase(
        lens=(1,) * draw(st.sampled_from(rows), label="rows"),
        vocab_size=draw(st.sampled_from([160, 257, 300]), label="vocab_size"),
        decode=True,
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        layout=draw(st.sampled_from(["plain", "fused"]), label="layout"),
        seed=draw(st.integers(0, 999), label="seed"),
    )


@st.composite
def poisoned(draw: st.DrawFn, capabilities: Capabilities) -> LogitsCase:
    """One token a sequence, so that only the influence of other rows is judged: which is the last is LOGIT-1's, many are LOGIT-2's."""
    return LogitsCase(
        lens=(1,) * draw(st.integers(2, 8), label="rows"),
        vocab_size=draw(st.sampled_from([50, 17, 64]), label="vocab_size"),
        decode=draw(st.booleans(), label="decode"),
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        poison=draw(st.sampled_from([float("nan"), float("inf")]), label="poison"),
        seed=draw(st.integers(0, 999), label="seed"),
    )


def parallel_cases(world_size: int, dtype: torch.dtype) -> list[LogitsCase]:
    """The vocabulary divides evenly, over all ranks and over groups without global rank 0."""
    n = world_size
    by_world: dict[int, list[tuple[int, ...]]] = {2: [(1,)], 3: [(1, 2)], 4: [(1, 3), (1, 2, 3)]}
    groups = by_world.get(n, [])
    cases = [
        LogitsCase((3, 1, 2), 16 * n, dtype=dtype, shards=(16,) * n, seed=1),
        LogitsCase((1,) * 5, 7 * n, decode=True, dtype=dtype, shards=(7,) * n, seed=2),
        LogitsCase((4,), 16 * n, dtype=dtype, shards=(16,) * n, seed=3, negative=True),
    ]
    for seed, ranks in enumerate(groups, start=4):
        cases.append(LogitsCase((2, 5), 12 * len(ranks), dtype=dtype, shards=(12,) * len(ranks), ranks=ranks, seed=seed))
    return cases


def uneven_cases(world_size: int, dtype: torch.dtype) -> list[LogitsCase]:
    """The last shard is smaller, as torch.chunk cuts it; an inner one is; all logits negative, so that padding of 0 would win."""
    n = world_size
    smaller_last = (11,) * (n - 1) + (8,)
    smaller_first = (5,) + (9,) * (n - 1)
    return [
        LogitsCase((3, 1, 2), sum(smaller_last), dtype=dtype, shards=smaller_last, seed=1, negative=True),
        LogitsCase((1,) * 4, sum(smaller_last), decode=True, dtype=dtype, shards=smaller_last, seed=2, negative=True),
        LogitsCase((2, 2), sum(smaller_first), dtype=dtype, shards=smaller_first, seed=3, negative=True),
    ]
