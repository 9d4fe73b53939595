"""sample: one token a row. Bytes moved: the logits, read once. What is timed draws its own noise; it is judged with and without."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from benchmarks.cases import on_this_machine, randn, seeded, short
from benchmarks.contenders import DEVICE, Contender, pairs, takes
from benchmarks.judge import assert_distribution, assert_output, assert_race_won, unless_refused

TOKENS_JUDGED = 256


class SampleCase(NamedTuple):
    num_sequences: int
    vocabulary: int
    dtype: torch.dtype
    real_size: bool

    @property
    def name(self) -> str:
        return f"{self.num_sequences}-V{self.vocabulary}-{short(self.dtype)}"


CASES = on_this_machine(
    SampleCase(4, 1_000, torch.float32, real_size=False),
    SampleCase(1, 151_936, torch.float32, real_size=True),
    SampleCase(64, 151_936, torch.float32, real_size=True),
    SampleCase(256, 151_936, torch.float32, real_size=True),
    SampleCase(256, 151_936, torch.bfloat16, real_size=True),
)


@pytest.mark.parametrize("case, contender", pairs("sample", CASES))
def test_sample(case: SampleCase, contender: Contender, timed):
    generator = seeded()
    logits = 3 * randn((case.num_sequences, case.vocabulary), case.dtype, generator)
    temperatures = torch.linspace(0.6, 1.2, case.num_sequences, device=DEVICE)

    def call() -> torch.Tensor:
        return contender.functions.sample(logits, temperatures)

    torch.manual_seed(0)
    draws = [unless_refused(call) for _ in range(-(-TOKENS_JUDGED // case.num_sequences))]
    assert_output(draws[0], (case.num_sequences,), torch.int64, contender.name)
    assert_distribution(draws, logits, temperatures, contender.name)
    if takes(contender.functions.sample, "noise"):
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator)
        tokens = contender.functions.sample(logits, temperatures, noise=noise)
        assert_race_won(tokens, logits, temperatures, noise, contender.name)
    bytes_moved = logits.numel() * logits.element_size()
    timed(call, group=f"sample {case.name}", contender=contender.name, bytes_moved=bytes_moved)
