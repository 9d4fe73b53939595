"""What an implementation claims of itself beyond the clauses: NaN in unwritten slots, rows that see nothing."""

from __future__ import annotations

import torch

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import attend, row_name
from conformance.checks.values import budgeted, random_numbers, require_within
from conformance.findings import Broken
from conformance.judge import Judge


def check_nan_tail(judge: Judge, case: AttentionCase) -> None:
    """NaN in every slot that no position lies in, in V alone, in K alone, in both."""
    numbers = random_numbers(case, query_scale=1.0)
    live = torch.zeros(case.num_slots, dtype=torch.bool)
    for slots in case.slots:
        live[slots] = True
    expected = budgeted(case, numbers, judge.capabilities.float32_products)
    for poisoned in ((numbers.values,), (numbers.keys,), (numbers.keys, numbers.values)):
        for tensor in poisoned:
            tensor[~live] = float("nan")
        require_within(judge, case, attend(judge, case, numbers), expected)


def check_empty_rows(judge: Judge, case: AttentionCase) -> None:
    """A row without a visible position is exactly 0."""
    out = attend(judge, case, random_numbers(case, query_scale=1.0)).out
    for row, (_, visible) in enumerate(case.rows):
        if visible == 0 and not bool((out[row] == 0).all()):
            head, dim = (int(x) for x in (out[row] != 0).nonzero()[0])
            raise Broken((row_name(case, row), f"sees nothing, and out[{row}, {head}, {dim}] is {float(out[row, head, dim]):.6g} in place of 0"))
