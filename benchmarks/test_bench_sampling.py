"""sample: one token a row. Bytes moved: the logits, read once, so that 100 % of the roof is the time to read them at the rate of a copy.

On a GPU the calls of real size are timed as replays of a CUDA graph, as engines run them, with the L2 cache flushed before each. What is
timed draws its own noise; it is judged with and without. `gpu_impl` takes its seed from torch's generator, which costs a graph one more
launch, `gpu_impl, seed on device` from a tensor that the kernel itself advances.
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

TOKENS_JUDGED = 256
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
    graphed = ON_GPU and case.real_size
    if graphed and contender.name.startswith("gpu_impl"):
        assert extra_memory_bytes(call) < MOST_EXTRA_MEMORY * bytes_moved
    replay = graph_replay(call) if graphed else call
    timed(replay, group=f"sample {case.name}{', graph replay' if graphed else ''}", contender=contender.name, bytes_moved=bytes_moved)


def extra_memory_bytes(call: Callable[[], torch.Tensor]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def graph_replay(call: Callable[[], torch.Tensor]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
