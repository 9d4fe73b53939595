"""Values against a float64 oracle, element by element, within the error budget (clauses PRE-2, DEC-2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import AttentionCall, Numbers, attend, head_name, loud_numbers, row_name
from conformance.checks.budget import exact_and_limit
from conformance.checks.localise import localise
from conformance.findings import Broken, Call, Refused
from conformance.judge import Judge

QUERY_SCALES = (1.0, 4.0, 16.0)
CLOSE = 40.0  # times the budget: rounding scores to eight bits reaches about 20


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


def budgeted(judge: Judge, case: AttentionCase, numbers: Numbers) -> Budgeted:
    """The exact output and how far from it a kernel may be. float64 matrices on the judged device, a sequence at a time."""
    device = judge.device
    exact = torch.zeros(numbers.q.shape, dtype=torch.float64)
    limit = torch.zeros_like(exact)
    row = 0
    for sequence, (queries, context) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        if queries == 0:
            continue
        rows = slice(row, row + queries)
        row += queries
        slots = case.slots[sequence]
        visible = context - queries + 1 + torch.arange(queries)
        q, keys, values = (t.to(device) for t in (numbers.q[rows], numbers.keys[slots], numbers.values[slots]))
        products = judge.capabilities.float32_products
        one_exact, one_limit = exact_and_limit(q, keys, values, visible, case.scale, case.dtype, products)
        exact[rows], limit[rows] = one_exact.cpu(), one_limit.cpu()
    return Budgeted(exact, limit)


def check_values(judge: Judge, case: AttentionCase, query_scale: float) -> None:
    numbers = random_numbers(case, query_scale)
    if case.dtype != torch.float16 and case.data_seed % 3 == 0:
        numbers.values *= 2.0**20  # past what float16 holds: bfloat16 must not go through it
    call = attend(judge, case, numbers)
    expected = budgeted(judge, case, numbers)
    require_within(judge, case, call, expected, numbers)


def require_within(judge: Judge, case: AttentionCase, call: AttentionCall, expected: Budgeted, numbers: Numbers | None = None) -> None:
    """|out - exact| <= limit wherever a row sees something. With `numbers`, a failure is also tried with other scales."""
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

    def explain() -> tuple[list[tuple[str, str]], str]:
        named, likely = localise(judge, case, row, head)
        if not named and numbers is not None:
            likely = recovered_scale(judge, case, row, head) or fitting_scale(judge, case, call, numbers) or likely_of_errors(share)
        return named, likely

    raise Broken(
        (f"{row_name(case, row)}, {head_name(case, head)}, dimension {dim}", ""),
        ("got", f"{got:.8g}"),
        ("want", f"{want:.8g} ± {limit:.3g} (the error is {abs(got - want) / limit:.3g} times the budget)"),
        ("wrong", f"{int(wrong.sum())} of {wrong.numel()} elements"),
        explain=explain,
        call=Call(call.function, call.args, call.kwargs, expected.exact, asked_where(sees, expected.limit)),
    )


def asked_where(sees: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """(T, Hq, D) the limit, infinite in rows that see nothing: what they hold is not looked at."""
    return limit.masked_fill(~sees[:, None, None], float("inf"))


def fitting_scale(judge: Judge, case: AttentionCase, call: AttentionCall, numbers: Numbers) -> str:
    """Another scale within whose budget the whole output lies, where there is one."""
    candidates = known_scales(case)
    sees = torch.tensor([visible > 0 for _, visible in case.rows], dtype=torch.bool)
    for scale in candidates.values():
        if math.isclose(scale, case.scale):
            continue
        other = budgeted(judge, replace(case, scale=scale), numbers)
        if bool(((call.out - other.exact).abs() <= other.limit)[sees].all()):
            same = [name for name, value in candidates.items() if math.isclose(value, scale)]
            return f"fits scale {scale:.6g} ({', or '.join(same)}), asked for {case.scale:.6g}"
    return ""


def known_scales(case: AttentionCase) -> dict[str, float]:
    """What has been taken for the scale, the likelier ones first."""
    asked, root, log2_e = case.scale, case.head_dim**0.5, math.log2(math.e)
    return {
        "no scale at all": 1.0, "the scale twice": asked**2, "1 / sqrt(D)": 1.0 / root, "1 / D": 1.0 / case.head_dim, "sqrt(D)": root,
        "scale * log2(e)": asked * log2_e, "scale / log2(e)": asked / log2_e, "scale / sqrt(D)": asked / root,
        "scale * sqrt(D)": asked * root, "half of it": asked / 2, "twice as much": asked * 2, "the mean of V, whatever the scores": 0.0,
    }  # fmt: skip


def recovered_scale(judge: Judge, case: AttentionCase, row: int, head: int) -> str:
    """The scale that one score tells, where it is another than asked for: with q . k of one position c and of all others 0, and n visible,
    that position weighs exp(s c) / (exp(s c) + n - 1)."""
    sequence, visible = case.rows[row]
    if visible < 2 or not 1e-3 < case.scale < 1e3:  # what the products below hold in every dtype
        return ""
    slot, found = case.slots[sequence][visible - 1], []
    for nats in (0.5, 1.5):  # over an equal share with all the others
        numbers = loud_numbers(case)
        for slots in case.slots:
            numbers.keys[slots], numbers.values[slots] = 0.0, 0.0
        product = float(round_to(torch.tensor((math.log(visible - 1) + nats) / case.scale), case.dtype))
        numbers.q[:, :, 0], numbers.keys[slot, :, 0], numbers.values[slot] = 1.0, product, 1.0
        try:
            weight = float(attend(judge, case, numbers).out[row, head, 0])
        except (Broken, Refused):
            return ""
        if not 0.0 < weight < 1.0:
            return ""
        found.append(math.log(weight * (visible - 1) / (1 - weight)) / product)
    if not math.isclose(*found, rel_tol=0.05) or math.isclose(found[1], case.scale, rel_tol=0.05):
        return ""
    scale, root = found[1], case.head_dim**-0.5
    same = [(name, value) for name, value in known_scales(case).items() if math.isclose(value, scale, rel_tol=0.04)]
    if same:
        return f"fits scale {same[0][1]:.6g} ({', or '.join(name for name, _ in same)}), asked for {case.scale:.6g}"
    return f"fits scale {scale:.3g}, asked for {case.scale:.6g}: {scale / case.scale:.3g} times as much, {scale / root:.3g} / sqrt(D)"


def likely_of_errors(share: torch.Tensor) -> str:
    """The right slots at the right scale: the sums are off."""
    if not bool(torch.isfinite(share).all()):
        return "scores or sums overflow, or NaN in a slot that must not be read comes in as 0 * NaN"
    if float(share.max()) < CLOSE:
        return "close, and beyond rounding: scores or weights are kept in fewer bits than float32, or small weights are dropped"
    return "weights of tiles or splits are combined wrongly, or scores are not those of q and K"
