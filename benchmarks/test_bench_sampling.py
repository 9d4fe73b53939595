"""sample: one token a row. Bytes moved: the logits, read once, so that 100 % of the roof is the time to read them at the rate of a copy.

What is timed draws its own noise; it is judged with and without. `gpu_impl` takes its seed from torch's generator, which costs a graph one
more launch, `gpu_impl, seed on device` from a tensor that the kernel itself advances. `torch, reading once` is the largest logit of each
row: no token comes from it, it is what reading the logits costs in a kernel of torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import gpu_impl.sampling
from benchmarks.cases import on_this_machine, randn, seeded, short
from benchmarks.contenders import DEVICE, ON_GPU, Contender, pairs, takes
from benchmarks.judge import assert_distribution, assert_output, assert_race_won, unless_refused
from benchmarks.timing import sets_needed

TOKENS_JUDGED = 256 if ON_GPU else 64  # in the interpreter a draw takes a fifth of a second
MOST_EXTRA_MEMORY = 0.01  # of the logits, for gpu_impl


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
STATE = torch.zeros(1, dtype=torch.int64, device=DEVICE)
OTHERS = [
    Contender(
        "gpu_impl, seed on device",
        SimpleNamespace(sample=lambda logits, temperatures: gpu_impl.sampling.sample(logits, temperatures, seed=STATE)),
    ),
    Contender("torch.compile, a race", SimpleNamespace(sample=gpu_impl.sampling.sample_compiled)),
]
PAIRS = [*pairs("sample", CASES), *(pytest.param(case, other, id=f"{case.name}-{other.name}") for case in CASES for other in OTHERS)]


@pytest.mark.parametrize("case, contender", PAIRS)
def test_sample(case: SampleCase, contender: Contender, timed):
    generator = seeded()
    bytes_moved = case.num_sequences * case.vocabulary * case.dtype.itemsize
    sets = [3 * randn((case.num_sequences, case.vocabulary), case.dtype, generator) for _ in range(sets_needed(bytes_moved))]
    temperatures = torch.linspace(0.6, 1.2, case.num_sequences, device=DEVICE)

    def call_on(logits: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: contender.functions.sample(logits, temperatures)

    logits, call = sets[0], call_on(sets[0])
    torch.manual_seed(0)
    draws = [unless_refused(call) for _ in range(-(-TOKENS_JUDGED // case.num_sequences))]
    assert_output(draws[0], (case.num_sequences,), torch.int64, contender.name)
    assert_distribution(draws, logits, temperatures, contender.name)
    if takes(contender.functions.sample, "noise"):
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator)
        tokens = contender.functions.sample(logits, temperatures, noise=noise)
        assert_race_won(tokens, logits, temperatures, noise, contender.name)
    if ON_GPU and case.real_size and contender.name.startswith("gpu_impl"):
        assert extra_memory_bytes(call) < MOST_EXTRA_MEMORY * bytes_moved
    calls = [call_on(each) for each in sets]
    timed(calls, group=f"sample {case.name}", contender=contender.name, bytes_moved=bytes_moved)


@pytest.mark.skipif(not ON_GPU, reason="a bound for a GPU's figures")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reading_the_logits_once(case: SampleCase, timed):
    bytes_moved = case.num_sequences * case.vocabulary * case.dtype.itemsize
    sets = [randn((case.num_sequences, case.vocabulary), case.dtype, seeded(i)) for i in range(sets_needed(bytes_moved))]
    calls = [lambda logits=logits: logits.amax(dim=1) for logits in sets]
    timed(calls, group=f"sample {case.name}", contender="torch, reading once", bytes_moved=bytes_moved)


def extra_memory_bytes(call: Callable[[], torch.Tensor]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before
