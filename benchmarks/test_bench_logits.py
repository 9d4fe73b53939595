"""last_token_logits: the last row of each sequence times the vocabulary's weight. Bytes moved: those rows, the weight and the logits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from benchmarks.cases import SMALL_DTYPE, cumulative, on_this_machine, randn, seeded, short
from benchmarks.contenders import Contender, pairs
from benchmarks.judge import assert_logits, assert_output, unless_refused


class LogitsCase(NamedTuple):
    """B sequences of q_len tokens; q_len None is a decode step, which takes every row."""

    num_sequences: int
    q_len: int | None
    hidden_size: int
    vocabulary: int
    dtype: torch.dtype
    real_size: bool

    @property
    def name(self) -> str:
        rows = f"prefill-{self.num_sequences}x{self.q_len}" if self.q_len else f"decode-{self.num_sequences}"
        return f"{rows}-E{self.hidden_size}-V{self.vocabulary}-{short(self.dtype)}"


CASES = on_this_machine(
    LogitsCase(3, 7, 64, 1_000, SMALL_DTYPE, real_size=False),
    LogitsCase(3, None, 64, 1_000, SMALL_DTYPE, real_size=False),
    LogitsCase(16, 2_048, 4_096, 151_936, torch.bfloat16, real_size=True),
    LogitsCase(256, None, 4_096, 151_936, torch.bfloat16, real_size=True),
)


@pytest.mark.parametrize("case, contender", pairs("last_token_logits", CASES))
def test_last_token_logits(case: LogitsCase, contender: Contender, timed):
    generator = seeded()
    hidden = randn((case.num_sequences * (case.q_len or 1), case.hidden_size), case.dtype, generator)
    weight = randn((case.vocabulary, case.hidden_size), case.dtype, generator)
    cu_seqlens_q = cumulative(case.q_len, case.num_sequences) if case.q_len else None

    def call() -> torch.Tensor:
        return contender.functions.last_token_logits(hidden, weight, cu_seqlens_q)

    out = unless_refused(call)
    last_rows = hidden[(case.q_len or 1) - 1 :: case.q_len or 1]
    assert_output(out, (case.num_sequences, case.vocabulary), case.dtype, contender.name)
    assert_logits(out, last_rows, weight, contender.name)
    elements = last_rows.numel() + weight.numel() + out.numel()
    timed(
        [call],
        group=f"last_token_logits {case.name}",
        contender=contender.name,
        bytes_moved=elements * case.dtype.itemsize,
        flops=2 * case.num_sequences * weight.numel(),
    )
