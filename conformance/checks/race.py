"""The tokens that may win a race whose noise is given: every one whose p / noise, in float64, is the largest within float32 rounding."""

from __future__ import annotations

import math

import torch

UNIT = 2.0**-24  # unit roundoff of float32
LOG_TINY = -126 * math.log(2)  # of the smallest normal float32; below it a float is coarse, or flushed to 0
LOG_LEAST = -149 * math.log(2)  # of the smallest float32
LOG_HUGE = math.log(torch.finfo(torch.float32).max)


def may_win(logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """(B, V) bool, for logits (B, V) of any float dtype, temperatures (B,) and noise (B, V) of at least 0.

    An evaluation in float32 moves log(p / noise) by at most
        2^-24 * (4 (|x| + |max x|) / T + 2 |log p| + 2 |log noise| + 32),
    whether it takes x / T or x - max first, the softmax or its logarithm. A p, a noise or a ratio that is no normal float32 may also have
    become 0, and a ratio above the largest one infinite. A token wins if the most that its ratio can be is at least the most that the
    others' ratios must be. Noise 0 at p > 0 is an infinite ratio, and a logit of -inf never wins. Rows must have a distribution.
    """
    x, e = logits.double(), noise.double().abs()  # abs: -0.0 is 0
    temperature = temperatures.double()[:, None]
    largest = x.amax(dim=1, keepdim=True)
    forbidden = x == -math.inf
    log_p = torch.log_softmax((x - largest) / temperature, dim=1)
    log_e = e.log()
    log_ratio = torch.where(forbidden | (e == math.inf), -math.inf, log_p - log_e)
    bound = UNIT * (4 * (x.abs() + largest.abs()) / temperature + 2 * log_p.abs() + 2 * log_e.abs() + 32)
    bound = torch.where(bound.isfinite(), bound, 0.0)
    lower, upper = log_ratio - bound, log_ratio + bound
    # p that may be 0, or rounded to a multiple of the smallest float
    small = log_p < LOG_TINY + 1
    lower = torch.where(small, -math.inf, lower)
    upper = torch.where(small & (e < math.inf), torch.logaddexp(log_p, torch.full_like(log_p, LOG_LEAST)) - log_e + bound, upper)
    # noise that may be taken for 0, and ratios that leave the floats at either end
    upper = torch.where((e > 0) & (log_e < LOG_TINY), math.inf, upper)
    upper = torch.where(upper > LOG_HUGE, math.inf, upper)
    lower = torch.where((lower > LOG_HUGE) & (e > 0), LOG_HUGE, lower)
    lower = torch.where(lower < LOG_TINY, -math.inf, lower)
    upper = torch.where(upper < LOG_TINY, LOG_TINY, upper)
    return (upper >= lower.amax(dim=1, keepdim=True)) & ~forbidden


def best(logits: torch.Tensor, temperature: float, noise: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Of one row (V,): the id of the largest p / noise, and log(p / noise) of every token, in float64."""
    x = logits.double()
    log_p = torch.log_softmax((x - x.max()) / temperature, dim=0)
    log_ratio = torch.where(x == -math.inf, -math.inf, log_p - noise.double().abs().log())
    return int(log_ratio.argmax()), log_ratio
