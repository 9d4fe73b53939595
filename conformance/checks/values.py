"""Values against a float64 oracle, element by element, within a bound that is derived and not chosen (clauses PRE-2, DEC-2).

With p the exact weights, A = sum p |v|, u the unit roundoff of the dtype in which weights and output are rounded, scores accumulated in
float32:

    ds = max over visible j of (D + 2) 2^-24 scale sum |q k_j|          (tf32 products: 2 * 2^-11 in place of D * 2^-24)
    |out - exact| <= A (u + 2 ds + (n + 16) 2^-24 + 2^-22) + u |exact|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import Numbers, attend, head_name, loud_numbers, row_name
from conformance.checks.read_sets import UNIT_ROUNDOFF
from conformance.findings import Broken, Call
from conformance.judge import Judge

QUERY_SCALES = (1.0, 4.0, 16.0)


@dataclass
class Budgeted:
    exact: torch.Tensor  # (T, Hq, D) float64
    limit: torch.Tensor  # (T, Hq, D) float64


def random_numbers(case: AttentionCase, query_scale: float) -> Numbers:
    """Normal q, k and v in the positions' slots, as the dtype rounds them; other slots loud, their keys aimed at the first query."""
    generator = torch.Generator().manual_seed(case.data_seed)
    numbers = loud_numbers(case)
    numbers.q = round_to(query_scale * torch.randn(numbers.q.shape, generator=generator), case.dtype)
    if len(numbers.q):
        aimed = 100.0 * numbers.q[0, :: case.group_size].sign()
        numbers.keys[:] = aimed[None]
    for slots in case.slots:
        shape = (len(slots), case.num_kv_heads, case.head_dim)
        numbers.keys[slots] = round_to(torch.randn(shape, generator=generator), case.dtype)
        numbers.values[slots] = round_to(torch.randn(shape, generator=generator), case.dtype)
    return numbers


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).float()


def budgeted(case: AttentionCase, numbers: Numbers, float32_products: str) -> Budgeted:
    """The exact output and how far from it a kernel may be. float64 matrices, a sequence at a time."""
    exact = torch.zeros(numbers.q.shape, dtype=torch.float64)
    limit = torch.zeros_like(exact)
    unit = UNIT_ROUNDOFF[case.dtype]
    tf32 = case.dtype == torch.float32 and float32_products == "tf32"
    product_error = 2 * 2.0**-11 + 2 * 2.0**-24 if tf32 else (case.head_dim + 2) * 2.0**-24
    if tf32:
        unit = 2.0**-11  # the weights are rounded to tf32 before they meet V
    row = 0
    for sequence, (queries, context) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        if queries == 0:
            continue
        rows = slice(row, row + queries)
        row += queries
        q = numbers.q[rows].double()
        keys = numbers.keys[case.slots[sequence]].double().repeat_interleave(case.group_size, dim=1)
        values = numbers.values[case.slots[sequence]].double().repeat_interleave(case.group_size, dim=1)
        visible = context - queries + 1 + torch.arange(queries)
        hidden = torch.arange(context)[None, :] >= visible[:, None]
        scores = case.scale * torch.einsum("thd,nhd->htn", q, keys)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=2).nan_to_num(0.0)
        exact[rows] = torch.einsum("htn,nhd->thd", weights, values)
        magnitude = torch.einsum("htn,nhd->thd", weights, values.abs())
        sizes = case.scale * torch.einsum("thd,nhd->htn", q.abs(), keys.abs()).masked_fill(hidden, 0.0)
        largest = sizes.amax(dim=2) if context else torch.zeros(case.num_heads, queries, dtype=torch.float64)
        score_error = product_error * largest.T[:, :, None]  # (t, Hq, 1)
        sums = (visible.clamp(min=0).double()[:, None, None] + 16) * 2.0**-24 + 2.0**-22
        limit[rows] = magnitude * (unit + 2 * score_error + sums) + unit * exact[rows].abs() + 2.0**-40
    return Budgeted(exact, limit)


def check_values(judge: Judge, case: AttentionCase, query_scale: float) -> None:
    numbers = random_numbers(case, query_scale)
    call = attend(judge, case, numbers)
    expected = budgeted(case, numbers, judge.capabilities.float32_products)
    require_within(judge, case, call, expected)


def require_within(judge: Judge, case: AttentionCase, call, expected: Budgeted) -> None:  # type: ignore[no-untyped-def]
    """|out - exact| <= limit wherever a row sees something."""
    sees = torch.tensor([visible > 0 for _, visible in case.rows], dtype=torch.bool)
    if not sees.any():
        return
    error = (call.out - expected.exact).abs()
    share = (error / expected.limit)[sees]
    judge.note_budget(case.dtype, float(share.nan_to_num(float("inf")).max()))
    wrong = ~(error <= expected.limit) & sees[:, None, None]
    if not wrong.any():
        return
    row, head, dim = (int(x) for x in wrong.nonzero()[0])
    got, want, limit = (float(t[row, head, dim]) for t in (call.out, expected.exact, expected.limit))
    raise Broken(
        (f"{row_name(case, row)}, {head_name(case, head)}, dimension {dim}", ""),
        ("got", f"{got:.8g}"),
        ("want", f"{want:.8g} ± {limit:.3g} (the error is {abs(got - want) / limit:.3g} times the budget)"),
        ("wrong", f"{int(wrong.sum())} of {wrong.numel()} elements"),
        call=Call(call.function, call.args, call.kwargs, expected.exact, expected.limit),
    )
