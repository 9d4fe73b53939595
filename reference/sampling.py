"""One token a row from softmax(logits / T): by torch.multinomial, or, with the noise given, as the winner of the exponential race.

The race: token v arrives at time noise[v] / p[v] with noise ~ Exp(1), the first to arrive wins. Arrival times are independent
exponentials with rates p[v], so v wins with probability p[v]. (The same is argmax of p / noise, or of log p + Gumbel.)
"""

from __future__ import annotations

import math

import torch

from reference.preconditions import count, require


def probabilities(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """(B, V) float32: softmax(logits / T) row by row, after the upcast to float32.

    The row's largest logit is subtracted before the division, so that a small T overflows nothing.
    A row with no distribution (a NaN, a +inf, or nothing but -inf) is NaN throughout.
    """
    require(
        logits.dim() == 2 and logits.shape[1] >= 1,
        f"logits have shape {tuple(logits.shape)}, they must be (B, V) with V at least 1",
    )
    require(temperatures.dim() == 1, f"temperatures have shape {tuple(temperatures.shape)}, they must be (B,)")
    require(len(logits) == len(temperatures), f"logits have {count(len(logits), 'row')}, temperatures {len(temperatures)}")
    logits, given, temperatures = logits.float(), temperatures.tolist(), temperatures.float()
    for row, temperature in enumerate(temperatures.tolist()):
        require(0 < temperature < math.inf, f"row {row} has temperature {given[row]}, it must be finite and above 0 in float32")
    below_largest = logits - logits.max(dim=1, keepdim=True).values
    return torch.softmax(below_largest / temperatures[:, None], dim=1)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, *, noise: torch.Tensor | None = None, seed: int | None = None
) -> torch.Tensor:
    """(B,) int64: one token a row, distributed as softmax(logits / T) in float32 (clauses SAMPLE-1...9).

    logits: (B, V) of any float dtype, V at least 1; temperatures: (B,), finite and above 0 as float32; noise: (B, V) of Exp(1) draws,
    then the result is exactly the race's winner and seed is ignored; seed: makes the draw without noise repeatable.
    A row with no distribution gives token 0. Raises ValueError for any other T, for negative noise, and for shapes that do not fit.

    >>> sample(torch.tensor([[0.0, 0.0]]), torch.tensor([1.0]), noise=torch.tensor([[0.5, 0.25]])).tolist()
    [1]
    """
    p = probabilities(logits, temperatures)
    tokens = torch.zeros(len(p), dtype=torch.int64, device=logits.device)
    if noise is not None:
        require(noise.shape == p.shape, f"noise has shape {tuple(noise.shape)}, logits {tuple(p.shape)}")
    generator = None if seed is None else torch.Generator(logits.device).manual_seed(seed)
    for row in range(len(p)):
        if torch.isnan(p[row]).any():
            continue
        if noise is None:
            tokens[row] = torch.multinomial(p[row], 1, generator=generator)[0]
        else:
            tokens[row] = race_winner(p[row], noise[row])
    return tokens


def race_winner(p: torch.Tensor, noise: torch.Tensor) -> int:
    """argmax of p / noise, in float64. Noise 0 (and -0.0) arrives at once; p = 0 never arrives; a tie goes to the lowest id.

    >>> race_winner(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, -0.0, 0.0]))
    1
    """
    require(bool((noise >= 0).all()), f"noise has the value {noise.min().item()}, a draw of Exp(1) is at least 0")
    winner, best = 0, -math.inf
    for token, (weight, time) in enumerate(zip(p.tolist(), noise.tolist(), strict=True)):
        if weight == 0.0:
            continue
        ratio = math.inf if time == 0.0 else weight / time
        if ratio > best:
            winner, best = token, ratio
    return winner
