"""Sequences with nothing to do, results that must be written, and inputs that must stay (clauses 8 and 9 of PRE and DEC)."""

from __future__ import annotations

import torch

from conformance.buffers import bits
from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import attend, loud_numbers
from conformance.checks.read_sets import check_read_set
from conformance.checks.values import random_numbers
from conformance.findings import OVERWRITTEN, Broken
from conformance.judge import Judge


def check_empties(judge: Judge, case: AttentionCase) -> None:
    """Rows beside sequences without queries (prefill) or of context 0 (decode) read what they should, and every row is written."""
    check_read_set(judge, case)


def check_empty_batch(judge: Judge, case: AttentionCase) -> None:
    """A batch of nobody gives an empty result; `attend` judges its shape and dtype."""
    attend(judge, case, loud_numbers(case))


def check_unchanged(judge: Judge, case: AttentionCase, later: AttentionCase) -> None:
    """Inputs are compared by every call; here an earlier result is held against a later call of another shape, and two of the same."""
    numbers = random_numbers(case, query_scale=1.0)
    call = attend(judge, case, numbers)
    before = bits(call.result.contiguous()).clone()
    for other in (later, case, case):  # two: there may be two buffers of a shape
        attend(judge, other, random_numbers(other, query_scale=4.0))
        if not torch.equal(bits(call.result.contiguous()), before):
            raise Broken(
                ("found", OVERWRITTEN),
                likely="an output buffer is kept and handed out twice",
            )
