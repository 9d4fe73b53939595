"""Cases of last_token_logits with normal numbers: hidden sizes and vocabularies around every tile, weights as engines hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import strategies as st

from conformance.capabilities import Capabilities
from conformance.cases.attention import short
from conformance.cases.laws import dtype_name

HIDDEN_SIZES = (48, 24, 25, 47, 1, 1000, 129, 64, 128)
VOCAB_SIZES = (17, 1, 513, 1025, 64)
WEIGHT_LAYOUTS = ("plain", "fused", "transposed", "strided")  # as Buffers.put names them


@dataclass(frozen=True)
class ValuesCase:
    lens: tuple[int, ...]  # query tokens of each sequence; one each in a decode step
    hidden_size: int
    vocab_size: int
    decode: bool = False  # without cu_seqlens_q
    dtype: torch.dtype = torch.float32
    layout: str = "plain"  # fused: hidden's rows are slices of wider rows
    weight_layout: str = "plain"
    seed: int = 0
    cancel: bool = False  # the two halves of each sum are large, and all but cancel: parts that are rounded show

    @property
    def ends(self) -> list[int]:
        """The last row of each sequence."""
        return [sum(self.lens[: i + 1]) - 1 for i in range(len(self.lens))]

    @property
    def cu_seqlens_q(self) -> torch.Tensor | None:
        return None if self.decode else torch.tensor([0, *(end + 1 for end in self.ends)], dtype=torch.int32)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (T, E), weight (V, E), both of the dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(sum(self.lens), self.hidden_size, generator=generator)
        weight = torch.randn(self.vocab_size, self.hidden_size, generator=generator)
        if self.cancel:
            hidden, weight = hidden.abs(), weight.abs()
            weight[:, self.hidden_size // 2 :] *= -1
        return hidden.to(self.dtype), weight.to(self.dtype)

    def headline(self, implementation: str, device: str) -> str:
        shape = f"B {len(self.lens)} · E {self.hidden_size} · V {self.vocab_size}"
        return f"{implementation}.last_token_logits   {dtype_name(self.dtype)} · {shape} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        sums = self.cu_seqlens_q
        return [
            ("cu_seqlens_q", "None (decode)" if sums is None else short(str(sums.tolist()))),
            ("hidden, weight", f"{self.layout} and {self.weight_layout} rows{', whose sums nearly cancel' if self.cancel else ''}"),
        ]

    def size(self) -> int:
        return sum(self.lens) * self.vocab_size


@st.composite
def values_cases(draw: st.DrawFn, capabilities: Capabilities) -> ValuesCase:
    decode = draw(st.booleans(), label="decode")
    count = draw(st.one_of(st.integers(1, 4), st.sampled_from([16, 33])), label="sequences")
    length = st.just(1) if decode else st.sampled_from([1, 2, 5])
    return ValuesCase(
        lens=tuple(draw(length, label=f"length {i}") for i in range(count)),
        hidden_size=draw(st.sampled_from(HIDDEN_SIZES), label="hidden_size"),
        vocab_size=draw(st.sampled_from(VOCAB_SIZES), label="vocab_size"),
        decode=decode,
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        layout=draw(st.sampled_from(["plain", "fused"]), label="layout"),
        weight_layout=draw(st.sampled_from(WEIGHT_LAYOUTS), label="weight_layout"),
        seed=draw(st.integers(0, 999), label="seed"),
    )


def corners(capabilities: Capabilities) -> list[ValuesCase]:
    """What every effort tries: a vocabulary of one token, hidden sizes of whole tiles and beside tiles of 16, in each dtype; what is large."""
    cases = [
        ValuesCase((2, 1), hidden_size, vocab_size, dtype=dtype, weight_layout=layout, seed=hidden_size)
        for dtype in capabilities.dtypes
        for hidden_size, vocab_size, layout in (
            (1000, 65, "plain"), (128, 65, "plain"), (48, 1, "plain"), (25, 513, "fused"), (47, 1025, "transposed")
        )
    ]  # fmt: skip
    cases += [ValuesCase((1,), 47, 65, decode=True, dtype=dtype) for dtype in capabilities.dtypes]  # a product of one row
    last = capabilities.dtypes[-1]
    cases.append(ValuesCase((1, 1), 16, 131_100, decode=True, dtype=last))  # ids past 2^17
    cases.append(ValuesCase((1, 1), 5120, 33, decode=True, dtype=last))
    cases.append(ValuesCase((1,) * 515, 16, 17, decode=True, dtype=last))  # rows past 2^9
    cases.append(ValuesCase((65_600, 3), 16, 17, dtype=last))  # rows of hidden past 2^16
    if torch.bfloat16 in capabilities.dtypes:  # E from which a kernel may split the sum
        cases.append(ValuesCase((1,), 2048, 64, decode=True, dtype=torch.bfloat16, cancel=True))
    return cases
