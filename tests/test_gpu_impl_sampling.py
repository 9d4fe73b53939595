"""gpu_impl.sample beyond the contract: seeds on the device, graphs, streams, memory. What needs a GPU is left out without one."""

import math

import pytest
import torch

from conformance.checks.distribution import pearson
from gpu_impl import sample, sampling
from gpu_impl.launch import ceil_div
from gpu_impl.sampling_kernels import UNROLL
from gpu_impl.sampling_state import counters_for, halves, mixed, seed_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALPHA = 1e-6
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="a CUDA graph, stream or allocator")


def flat(rows, vocab_size=4096):
    return torch.zeros((rows, vocab_size), device=DEVICE), torch.ones(rows, device=DEVICE)


def test_a_seed_on_the_device_is_read_and_advanced():
    logits, temperatures = flat(8)
    state = torch.tensor([41], device=DEVICE)
    drawn = [sample(logits, temperatures, seed=state).tolist() for _ in range(3)]
    assert state.item() == 44
    assert drawn == [sample(logits, temperatures, seed=seed).tolist() for seed in (41, 42, 43)]
    with pytest.raises(ValueError, match=r"it must be \(1,\) int64"):
        sample(logits, temperatures, seed=torch.tensor(1.0))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 12345678901234567890])
def test_a_seed_is_handed_over_in_two_signed_halves(seed):
    given = halves(seed)
    assert -(2**31) <= given.low < 2**31 and -(2**31) <= given.high < 2**31
    assert ((given.high << 32) + (given.low & 0xFFFFFFFF)) % 2**64 == seed % 2**64


def test_neighbouring_calls_have_keys_with_nothing_in_common():
    bits = [bin(mixed(seed, offset) ^ mixed(seed, offset + 4)).count("1") for seed in range(20) for offset in range(0, 400, 4)]
    assert 30 < sum(bits) / len(bits) < 34 and len({mixed(s, o) for s in range(50) for o in range(50)}) == 2500


@pytest.mark.parametrize("num_rows", [1, 3, 64, 256, 5000])
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 1000, 4096, 4097, 151_936, 262_160])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_plan_covers_every_token(num_rows, vocab_size, itemsize):
    plan = sampling.plan(num_rows, vocab_size, itemsize, DEVICE)
    steps = ceil_div(vocab_size, plan.lanes * plan.width * UNROLL.value)
    assert 1 <= plan.splits <= steps
    assert plan.lane_tokens >= ceil_div(steps, plan.splits) * UNROLL.value * plan.width
    for size in (plan.rows, plan.lanes, plan.width, plan.lane_tokens):
        assert size & (size - 1) == 0


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("vocab_size", [96, 97, 129])
def test_any_number_of_splits_draws_from_the_same_distribution(monkeypatch, splits, vocab_size):
    """V just past a step's end, steps that are all -inf, and rows that share a program."""
    plan = sampling.Plan(2048 if DEVICE.type == "cpu" else 16, 2, 4, splits, 128, 1, 2, early=False, registers=0)
    monkeypatch.setattr(sampling, "plan", lambda *_: plan)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(DEVICE)
    logits[32:64] = -math.inf
    torch.manual_seed(splits)
    tokens = sample(logits.expand(2000, -1), torch.full((2000,), 0.9, device=DEVICE))
    counts = torch.bincount(tokens, minlength=vocab_size).double().cpu().numpy()
    assert pearson(counts, torch.softmax(logits.double() / 0.9, dim=0).cpu().numpy()) > ALPHA


def captured(call):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@needs_gpu
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 151_936), (64, 1000), (5, 40_000)])
def test_replays_differ_and_repeat_once_reseeded(num_rows, vocab_size):
    logits, temperatures = flat(num_rows, vocab_size)
    state = torch.tensor([5], device=DEVICE)
    for seed, reseed in ((None, lambda: torch.manual_seed(3)), (state, lambda: state.fill_(5))):
        graph, tokens = captured(lambda seed=seed: sample(logits, temperatures, seed=seed))
        drawn = []
        for _ in range(2):
            reseed()
            for _ in range(3):
                graph.replay()
                torch.cuda.synchronize()
                drawn.append(tokens.tolist())
        assert drawn[:3] == drawn[3:] and len({str(each) for each in drawn}) == 3


@needs_gpu
def test_counters_are_of_one_stream_and_0_afterwards():
    logits, temperatures = flat(16, 151_936)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    seen = []
    for stream in (one, other):
        with torch.cuda.stream(stream):
            tokens = [sample(logits, temperatures, seed=9) for _ in range(50)]
            seen.append(counters_for(1, DEVICE))
    torch.cuda.synchronize()
    assert seen[0].data_ptr() != seen[1].data_ptr() and not seen[0].any() and not seen[1].any()
    assert all(torch.equal(each, sample(logits, temperatures, seed=9)) for each in tokens)


@needs_gpu
def test_eager_calls_follow_torch_manual_seed_and_launch_nothing_for_it():
    logits, temperatures = flat(8)
    drawn = []
    for _ in range(2):
        torch.manual_seed(11)
        drawn.append([sample(logits, temperatures).tolist() for _ in range(3)])
    assert drawn[0] == drawn[1] and len({str(each) for each in drawn[0]}) == 3
    assert seed_for(None, DEVICE).tensor is None


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_extra_memory_is_under_a_hundredth_of_the_logits(num_rows):
    logits = torch.randn((num_rows, 151_936), device=DEVICE)
    temperatures = torch.ones(num_rows, device=DEVICE)
    sample(logits, temperatures)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample(logits, temperatures)
    assert torch.cuda.max_memory_allocated() - before < 0.01 * logits.numel() * logits.element_size()


@needs_gpu
@pytest.mark.parametrize("nats", [14.0, 16.0, 18.0, 20.0])
def test_a_tail_keeps_99_percent_of_its_mass(nats):
    """262,144 equal tokens under one, as SAMPLE-8 has them, in so many draws that one per cent shows; the share is printed with -s."""
    tail, draws = 262_144, 2**25
    logits = torch.full((1, tail + 1), -nats, device=DEVICE)
    logits[0, tail // 3] = 0.0
    rows = 2**18
    logits, temperatures = logits.expand(rows, -1), torch.ones(rows, device=DEVICE)
    torch.manual_seed(int(nats))
    drawn = sum(int((sample(logits, temperatures) != tail // 3).sum()) for _ in range(draws // rows))
    mass = tail * math.exp(-nats)
    expected = draws * mass / (1 + mass)
    share, error = drawn / expected, 1 / math.sqrt(expected)
    print(f"\ntail at {nats:g} nats: keeps {100 * share:.2f} % +- {100 * error:.2f} % (one standard error), {drawn} of {draws} draws")
    assert 0.99 - 4 * error < share < 1.0 + 4 * error
    assert share > 0.99 - error
