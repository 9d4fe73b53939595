"""Extreme scores with outputs that are known exactly: weights are equal, or 1 and 0 (clauses PRE-7, DEC-7)."""

from __future__ import annotations

import math

import numpy as np
import torch

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import Numbers, attend, loud_numbers
from conformance.checks.read_sets import LARGEST_COUNT, PICKED_SCORE, require_counts, value_codes
from conformance.checks.values import check_values
from conformance.judge import Judge

ORDERS = ("level", "increasing", "decreasing", "spiked")
SCALES = (0.25, 1.0, 3.0, 0.001)
LARGEST_QUERY = 4096.0  # of what normal queries are multiplied with, so that float16 holds them


def check_extremes(judge: Judge, case: AttentionCase, order: str, shift: float) -> None:
    """Scores in a given order of position, all of them shifted: the largest visible one takes all the weight, level ones share it.

    Scores step by at least 44 from rank to rank; rank r is 16 (r // 16) + r % 16, so that two key dimensions hold it exactly in every dtype.
    """
    generator = np.random.default_rng((case.data_seed, ORDERS.index(order)))
    longest = max(case.context_lens, default=0)
    window = (case.head_dim - 1) * LARGEST_COUNT[case.dtype]
    codes = value_codes(case, generator, 0, max(window, longest))
    step = 2.0 ** math.ceil(math.log2(PICKED_SCORE / case.scale))
    numbers = loud_numbers(case)
    numbers.q[:, :, :2] = step
    numbers.q[:, :, 2] = 2.0**12
    ranks = []
    for sequence, slots in enumerate(case.slots):
        rank = ranks_in_order(order, len(slots), generator)
        ranks.append(rank)
        numbers.keys[slots] = 0.0
        numbers.keys[slots, :, 0] = torch.from_numpy(16.0 * (rank // 16)).float()[:, None]
        numbers.keys[slots, :, 1] = torch.from_numpy(1.0 * (rank % 16)).float()[:, None]
        numbers.keys[slots, :, 2] = shift_key(shift, case.scale)
        numbers.values[slots] = codes[sequence]
    aim_guards(case, numbers)
    call = attend(judge, case, numbers)
    if order == "level":
        sums = [np.cumsum(code.numpy(), axis=0) for code in codes]
    else:  # the position of the largest rank so far is all that a row sees
        sums = []
        for rank, code in zip(ranks, codes, strict=True):
            best = np.array([int(np.argmax(rank[: n + 1])) for n in range(len(rank))], dtype=np.int64)
            sums.append(code.numpy()[best])
    # scores, maxima and log-sum-exps of this size are rounded to float32 before they are subtracted from each other
    steepest = max((int(rank.max()) for rank in ranks if len(rank)), default=0)
    largest = case.scale * (abs(shift_key(shift, case.scale)) * 2.0**12 + step * steepest)
    require_counts(judge, case, call, sums, None, extra=4 * largest * 2.0**-24)


def ranks_in_order(order: str, n: int, generator: np.random.Generator) -> np.ndarray:
    if order == "level":
        return np.zeros(n, dtype=np.int64)
    if order == "increasing":
        return np.arange(n)
    if order == "decreasing":
        return np.arange(n)[::-1].copy()
    ranks = np.zeros(n, dtype=np.int64)  # level, and one spike: each split and tile may hold it
    if n:
        ranks[0] = 1  # so that there is one largest before the spike too
        ranks[int(generator.integers(0, n))] = 2
    return ranks


def shift_key(shift: float, scale: float) -> float:
    """The key value that shifts every score by about `shift` under a query value of 2^12: a power of two, exact in every dtype."""
    if shift == 0.0:
        return 0.0
    exponent = min(12, round(math.log2(abs(shift) / (scale * 2.0**12))))
    return math.copysign(2.0**exponent, shift)


def aim_guards(case: AttentionCase, numbers: Numbers) -> None:
    """Slots that must not be read keep loud keys; with a negative shift they would win outright."""
    live = torch.zeros(case.num_slots, dtype=torch.bool)
    for slots in case.slots:
        live[slots] = True
    numbers.keys[~live] = 30000.0


def check_scale(judge: Judge, case: AttentionCase) -> None:
    """An unusual scale is used as it is given: values within the budget, queries such that scores stay around one."""
    wanted = 1.0 / (abs(case.scale) * case.head_dim**0.5) if case.scale else 1.0
    check_values(judge, case, query_scale=min(wanted, LARGEST_QUERY))
