"""Tests of hypothesis on drawn tokens: two stages, pooled Pearson chi-squared, and what a rejected sample looks like.

A sampler is held broken only if a first test rejects at STAGE_ONE and a second one, on fresh draws and MORE times as many, at STAGE_TWO.
Both reject a sound sampler with probability FALSE_ALARM = 1e-9. Every verdict notes how many such tests it holds and what they add up to.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import bdtr, bdtrc, chdtrc, softmax  # scipy.stats takes longer to import than most tests to judge

STAGE_ONE = 1e-3
STAGE_TWO = 1e-6
FALSE_ALARM = STAGE_ONE * STAGE_TWO  # of one test on a sound sampler
MORE = 4  # times as many draws in the second stage
MIN_EXPECTED = 25.0  # of every cell, so that the statistic has the chi-squared distribution far into its tail
IMPOSSIBLE = 1e-9  # so many draws, or fewer, are expected of all tokens that count as impossible
LOOKS_LIKE = 1e-4  # a p-value above this: the alternative explains the draws


def rejected(p_value: Callable[[int], float]) -> bool:
    """Both stages. `p_value(times)` draws afresh, `times` as many as the first stage does."""
    return p_value(1) < STAGE_ONE and p_value(MORE) < STAGE_TWO


def of_several(p_values: np.ndarray) -> float:
    """The p-value of the smallest of several (Sidak): again uniform on (0, 1) if they are, and independent."""
    return float(-np.expm1(len(p_values) * np.log1p(-min(p_values.min(), 1 - 1e-16))))


def pearson(counts: np.ndarray, probabilities: np.ndarray, by_rank: bool = False) -> float:
    """p-value of Pearson's chi-squared. Tokens that are expected less than MIN_EXPECTED times are pooled with their neighbours, in id or in rank."""
    total = counts.sum()
    expected = probabilities * total
    order = np.argsort(expected, kind="stable")
    impossible = order[np.cumsum(expected[order]) < IMPOSSIBLE]
    if counts[impossible].sum() > 0:
        return 0.0
    cell = cells(expected, by_rank)
    pooled_expected, pooled = np.bincount(cell, expected), np.bincount(cell, counts)
    if len(pooled) < 2:
        return 1.0
    if len(pooled) == 2:  # one count: no need for a distribution that it nearly has
        return of_count(float(pooled[0]), float(total), pooled_expected[0] / total)
    return float(chdtrc(len(pooled) - 1, ((pooled - pooled_expected) ** 2 / pooled_expected).sum()))


def of_count(count: float, draws: float, probability: float) -> float:
    """Two-sided p-value of a binomial count, exact: too large rather than too small."""
    return min(1.0, 2 * min(at_most(count, draws, probability), at_least(count, draws, probability)))


def at_most(count: float, draws: float, probability: float) -> float:
    """Probability of a binomial number of at most `count`."""
    return float(bdtr(count, int(draws), probability))


def at_least(count: float, draws: float, probability: float) -> float:
    return float(bdtrc(count - 1, int(draws), probability))


def cells(expected: np.ndarray, by_rank: bool = False) -> np.ndarray:
    """The cell of each token: its own if it is full enough, else one that it shares with the next such tokens, by id or the likeliest first."""
    cell = np.empty(len(expected), dtype=np.int64)
    full = expected >= MIN_EXPECTED
    cell[full] = np.arange(full.sum())
    number, open_cell, mass = int(full.sum()), [], 0.0
    rare = np.flatnonzero(~full)
    for token in rare[np.argsort(-expected[rare], kind="stable")] if by_rank else rare:
        open_cell.append(token)
        mass += expected[token]
        if mass >= MIN_EXPECTED:
            cell[open_cell] = number
            number, open_cell, mass = number + 1, [], 0.0
    if open_cell:  # what is left over joins the last cell
        cell[open_cell] = max(number - 1, 0)
    return cell


def independence(left: np.ndarray, right: np.ndarray, categories: int) -> float:
    """p-value of the chi-squared of a contingency table whose margins are taken from the draws: a wrong distribution does not show here.

    left, right: tokens drawn together, pair by pair. With the pairs of a chain (x0 x1), (x1 x2) ... it tests a Markov chain's order.
    """
    table = np.bincount(left * categories + right, minlength=categories**2).reshape(categories, categories).astype(np.float64)
    total = table.sum()
    for axis in (0, 1):  # categories that are too rare for cells of MIN_EXPECTED become one
        table = table if axis == 0 else table.T
        rare = table.sum(axis=1) < np.sqrt(MIN_EXPECTED * total)
        table = np.vstack([table[~rare], table[rare].sum(axis=0, keepdims=True)]) if rare.any() else table
        table = table[table.sum(axis=1) > 0]
        table = table if axis == 0 else table.T
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0, keepdims=True) / total
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float(chdtrc(freedom, ((table - expected) ** 2 / expected).sum())) if freedom > 0 else 1.0


def fitted_temperature(counts: np.ndarray, logits: np.ndarray) -> float:
    """The temperature under which the draws are likeliest: there the mean logit is the drawn one. 0 and inf where nothing else fits."""
    drawn = (counts * logits).sum() / counts.sum()
    if drawn >= logits[counts > 0].max() and drawn >= logits.max() - 1e-12 * abs(logits.max()):
        return 0.0
    if drawn <= logits.mean():
        return float("inf")
    low, high = -30.0, 30.0  # of log T
    for _ in range(100):
        middle = (low + high) / 2
        mean = (softmax((logits - logits.max()) / np.exp(middle)) * logits).sum()
        low, high = (middle, high) if mean > drawn else (low, middle)
    return float(np.exp((low + high) / 2))


def longest_gap(counts: np.ndarray, probabilities: np.ndarray) -> tuple[int, int, float]:
    """(first id, last id, expected draws) of the run of ids that were never drawn and should have been most."""
    expected = probabilities * counts.sum()
    best, start = (0, 0, 0.0), 0
    for end in [*np.flatnonzero(counts), len(counts)]:
        mass = float(expected[start:end].sum())
        if mass > best[2]:
            best = (start, int(end) - 1, mass)
        start = int(end) + 1
    return best


def looks_like(counts: np.ndarray, logits: np.ndarray, temperature: float) -> str:
    """What a rejected sample looks like, in words; the last resort is the token that is furthest off."""
    counts = counts.astype(np.float64)
    total = counts.sum()
    probabilities = softmax((logits - logits.max()) / temperature)
    flat = logits.max() == logits.min()  # every draw is both
    if not flat and counts[logits == logits.max()].sum() == total:
        return f"greedy: every draw is the largest logit, token {int(logits.argmax())}"
    if not flat and counts[logits == logits.min()].sum() == total:
        return f"every draw is the smallest logit, token {int(logits.argmin())}"
    for shift in (1, -1):
        if pearson(np.roll(counts, -shift), probabilities) > LOOKS_LIKE and pearson(counts, probabilities) < LOOKS_LIKE:
            return f"ids are shifted by {shift:+d}: token v is drawn as often as token v{-shift:+d} should be"
    uniform = np.full(len(counts), 1 / len(counts))
    if not flat and pearson(counts, uniform) > LOOKS_LIKE:
        return "uniform: the logits are ignored"
    ever = np.flatnonzero(counts)
    if len(ever) <= 4 and probabilities[ever].sum() < 0.9:
        return f"only {', '.join(str(v) for v in ever)} were ever drawn: rows, or calls, seem to share their noise"
    first, last, missed = longest_gap(counts, probabilities)
    if MIN_EXPECTED <= missed < total / 2 and last > first:
        return f"a missing tile: ids {first} to {last} were never drawn, {missed:.0f} draws were expected of them"
    fitted = fitted_temperature(counts, logits)
    at_fitted = uniform if np.isinf(fitted) else softmax((logits - logits.max()) / max(fitted, 1e-13))
    if pearson(counts, at_fitted) > LOOKS_LIKE:
        return f"fits T = {fitted:.3g}, asked for {temperature:.3g}"
    expected = probabilities * total
    worst = int((np.abs(counts - expected) / np.sqrt(np.maximum(expected, 1.0))).argmax())
    best = f"no temperature fits, the best is {fitted:.3g}"
    return f"token {worst} was drawn {counts[worst]:.0f} times, {expected[worst]:.1f} were expected; {best}"
