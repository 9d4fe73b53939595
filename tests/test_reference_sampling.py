"""Sampling of the reference: the race by hand, and its distribution (clauses SAMPLE-1...7, SAMPLE-9)."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import softmax

from reference import sample
from reference.sampling import probabilities, race_winner

ALPHA = 1e-6  # seeds are fixed, so a test that passes once passes always; this is how bad a p-value it would take
LOGITS = [2.0, 1.0, 0.5, 0.0, -0.25, 1.5, -0.5]  # every token is expected 25 times or more in 8,000 draws at T 0.5 to 2


def p_value(tokens, logits, temperature):
    """Pearson's chi-squared of the drawn tokens against softmax(logits / T) in float64; 0 if a token is outside the vocabulary."""
    if int(tokens.min()) < 0 or int(tokens.max()) >= len(logits):
        return 0.0
    expected = softmax(np.asarray(logits) / temperature) * len(tokens)
    assert expected.min() >= 25, "the chi-squared distribution needs fuller cells"
    return stats.chisquare(np.bincount(tokens.numpy(), minlength=len(logits)), expected).pvalue


def exponential(*shape, seed):
    return torch.empty(shape, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("p", "noise", "winner"),
    [
        ([0.5, 0.25, 0.25], [1.0, 1.0, 1.0], 0),
        ([0.5, 0.25, 0.25], [4.0, 1.0, 1.5], 1),
        ([0.25, 0.25, 0.5], [1.0, 1.0, 2.0], 0),
        ([0.2, 0.4, 0.4], [1.0, 1.0, 1.0], 1),
        ([0.5, 0.25, 0.25], [1.0, 0.0, 1.0], 1),
        ([0.5, 0.25, 0.25], [1.0, 1.0, -0.0], 2),
        ([0.5, 0.25, 0.25], [1.0, -0.0, 0.0], 1),
        ([0.0, 0.5, 0.5], [0.0, 3.0, 2.0], 2),
        ([0.0, 0.0, 1.0], [0.0, -0.0, 1e30], 2),
        ([0.0, 1.0], [0.0, math.inf], 1),
        ([1e-38, 1.0], [1e-45, 1.0], 0),
        ([1.0], [5.0], 0),
    ],
    ids=["equal noise", "a slow favourite", "three tie", "two tie", "noise 0", "noise -0.0", "0 and -0.0 tie", "p 0 never arrives",
         "p 0 at once", "noise inf", "tiny noise in float32", "V = 1"],
)  # fmt: skip
def test_race_winner_by_hand(p, noise, winner):
    assert race_winner(torch.tensor(p), torch.tensor(noise)) == winner


def test_sample_by_hand():
    """Arrival times noise / p. Row 0 at T = 1, p = 1/4, 3/4: 4 and 8/3. Row 1 the same logits at T = 1/2, p = 1/10, 9/10: 2 and 20/9."""
    logits = torch.log(torch.tensor([[1.0, 3.0], [1.0, 3.0]]))
    tokens = sample(logits, torch.tensor([1.0, 0.5]), noise=torch.tensor([[1.0, 2.0], [0.2, 2.0]]))
    assert tokens.dtype == torch.int64 and tokens.tolist() == [1, 0]
    assert sample(logits.flip(0), torch.tensor([1.0, 1.0]), noise=torch.tensor([[1.0, 2.0], [0.2, 2.0]])).tolist() == [1, 0]
    assert probabilities(logits, torch.tensor([1.0, 0.5])).tolist() == pytest.approx(np.array([[0.25, 0.75], [0.1, 0.9]]), abs=1e-6)


@pytest.mark.parametrize("path", ["multinomial", "race"])
def test_distribution_with_a_temperature_per_row(path):
    temperatures = torch.tensor([0.5, 1.0, 2.0]).repeat(10_000)
    logits = torch.tensor(LOGITS).expand(30_000, -1)
    how = {"seed": 1} if path == "multinomial" else {"noise": exponential(30_000, len(LOGITS), seed=2)}
    tokens = sample(logits, temperatures, **how)
    for i, temperature in enumerate([0.5, 1.0, 2.0]):
        assert p_value(tokens[i::3], LOGITS, temperature) > ALPHA, f"T {temperature}"
        assert p_value(tokens[i::3], LOGITS, temperature * 1.3) < ALPHA, "negative control: a temperature 30 % off is told"
        assert p_value((tokens[i::3] + 1) % len(LOGITS), LOGITS, temperature) < ALPHA, "negative control: ids off by one are told"


@pytest.mark.parametrize("path", ["multinomial", "race"])
def test_rows_are_independent_of_each_other(path):
    logits = torch.tensor(LOGITS).expand(16_000, -1)
    how = {"seed": 3} if path == "multinomial" else {"noise": exponential(16_000, len(LOGITS), seed=4)}
    tokens = sample(logits, torch.ones(16_000), **how).numpy()

    def contingency(first, second):
        return stats.chi2_contingency(np.histogram2d(first, second, bins=range(len(LOGITS) + 1))[0]).pvalue

    assert contingency(tokens[0::2], tokens[1::2]) > ALPHA
    assert contingency(tokens[0::2], tokens[0::2]) < ALPHA, "negative control: equal rows are told"


def test_a_seed_repeats_and_leaves_the_global_state_alone():
    logits, temperatures = torch.zeros(64, 1000), torch.ones(64)
    state = torch.get_rng_state()
    first = sample(logits, temperatures, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, sample(logits, temperatures, seed=7))
    assert not torch.equal(first, sample(logits, temperatures, seed=8))
    assert len(first.unique()) > 32, "the rows of a batch draw one after the other"


def test_with_noise_the_seed_is_ignored():
    logits, temperatures, noise = torch.zeros(64, 10), torch.ones(64), exponential(64, 10, seed=16)
    state = torch.get_rng_state()
    assert torch.equal(sample(logits, temperatures, noise=noise), sample(logits, temperatures, noise=noise, seed=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_consecutive_calls_differ():
    logits, temperatures = torch.zeros(64, 1000), torch.ones(64)
    assert not torch.equal(sample(logits, temperatures), sample(logits, temperatures))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-42])
def test_a_small_temperature_is_the_argmax(temperature):
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(5)) * 5
    top, second = logits.topk(2).values.T
    decided = top - second > 0.03  # at T = 1e-3 the runner-up has exp(-30) left
    temperatures = torch.full((200,), temperature)
    assert decided.sum() > 150
    for how in ({"seed": 6}, {"noise": exponential(200, 50, seed=7)}):
        assert torch.equal(sample(logits, temperatures, **how)[decided], logits.argmax(dim=1)[decided])


def test_minus_infinity_is_never_sampled():
    logits = torch.full((3000, 6), -math.inf)
    logits[:, 2], logits[:, 5] = 0.0, -3.0
    temperatures = torch.full((3000,), 1.5)
    noise = exponential(3000, 6, seed=8)
    noise[::2, [0, 1, 3, 4]] = 0.0
    for how in ({"seed": 9}, {"noise": noise}):
        tokens = sample(logits, temperatures, **how)
        assert set(tokens.tolist()) == {2, 5}
        assert p_value((tokens == 5).long(), [0.0, -3.0], 1.5) > ALPHA


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 60_000.0), (torch.bfloat16, 3e38)], ids=["float16", "bfloat16"])
def test_half_logits_are_divided_in_float32(dtype, large):
    """60,000 / 0.5 overflows fp16, 3e38 / 0.5 overflows bf16 and float32 too: the row's largest logit is taken off before."""
    logits = torch.tensor([[large, large, -large, 0.0], [1.0, 1.0078125, -2.0, 0.3]]).to(dtype)
    temperatures = torch.tensor([0.5, 0.8])
    p = probabilities(logits, temperatures)
    assert p.dtype == torch.float32 and torch.equal(p, probabilities(logits.float(), temperatures))
    assert p[0].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert p[1].tolist() == pytest.approx(softmax(logits[1].double().numpy() / 0.8), rel=1e-6)
    noise = exponential(2, 4, seed=10)
    assert torch.equal(sample(logits, temperatures, noise=noise), sample(logits.float(), temperatures, noise=noise))


@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [math.inf, 0.0, 0.0], [-math.inf] * 3], ids=["NaN", "+inf", "only -inf"])
def test_a_row_without_a_distribution_disturbs_no_neighbour(bad):
    good = torch.randn(6, 3, generator=torch.Generator().manual_seed(11))
    mixed = torch.stack([good[0], good[1], torch.tensor(bad), good[2], torch.tensor(bad), good[3]])
    keep = [0, 1, 3, 5]
    assert torch.equal(probabilities(mixed, torch.ones(6))[keep], probabilities(good[:4], torch.ones(4)))
    noise = exponential(6, 3, seed=12)
    tokens = sample(mixed, torch.ones(6), noise=noise)
    assert torch.equal(tokens[keep], sample(good[:4], torch.ones(4), noise=noise[keep]))
    assert tokens[[2, 4]].tolist() == [0, 0]
    many = torch.tensor(LOGITS).repeat(8000, 1)
    many[::2, : len(bad)] = torch.tensor(bad)
    many[::2, len(bad) :] = -math.inf
    tokens = sample(many, torch.ones(8000), seed=13)
    assert torch.all(tokens[::2] == 0) and p_value(tokens[1::2], LOGITS, 1.0) > ALPHA


def test_inputs_are_unchanged():
    inputs = [torch.randn(5, 4), torch.rand(5) + 0.5, exponential(5, 4, seed=14)]
    before = [x.clone() for x in inputs]
    sample(inputs[0], inputs[1], noise=inputs[2])
    sample(inputs[0], inputs[1], seed=15)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
