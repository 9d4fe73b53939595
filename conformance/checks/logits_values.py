"""last_token_logits of normal numbers against float64, within the rounding of sums in float32 (clause LOGIT-6).

A logit is a sum of E products h w. In float32 each product is rounded once (not at all for half precision inputs, whose products of at
most 22 bits are exact) and each partial sum once, each time by at most 2^-24 of a number that is no larger than sum |h w|. In whatever
order, a product takes part in at most E roundings, so the sum is off by at most (1 + 2^-24)^E - 1 <= (E + 1) 2^-24 of that (for E < 5792):

    |out - exact|  <=  (E + 1) 2^-24 (1 + u) sum |h w| + u |exact| + t

u and t round the result to its dtype: u its unit roundoff, t its smallest step. What CAPABILITIES states adds to it: tf32 products round
both factors to 11 bits before they meet, 2 * 2^-11 sum |h w|; sums in half precision, as torch lets cuBLAS add the parts of a split sum
(allow_bf16_reduced_precision_reduction), round each part once, and the parts together are no larger than sum |h w|: u sum |h w|.
"""

from __future__ import annotations

import torch

from conformance.buffers import Buffers
from conformance.capabilities import Capabilities
from conformance.cases.logits_values import ValuesCase
from conformance.checks.budget import SMALLEST_STEP, UNIT_ROUNDOFF
from conformance.findings import Broken, Call
from conformance.judge import Judge

CLOSE = 200.0  # times the limit: sums kept in half precision stay under it
TILES = (8, 16, 32, 64, 128)


def exact_and_limit(
    hidden: torch.Tensor, weight: torch.Tensor, returned: torch.dtype, stated: Capabilities
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, V) float64 both: what a row of hidden (rows, E) gives with weight (V, E), and how far from it a result may be."""
    exact = hidden.double() @ weight.double().T
    magnitude = hidden.double().abs() @ weight.double().abs().T
    unit = UNIT_ROUNDOFF[returned]
    relative = (hidden.shape[1] + 1) * 2.0**-24 * (1 + unit)
    if hidden.dtype == torch.float32 and stated.float32_products == "tf32":
        relative += 2 * 2.0**-11
    if hidden.dtype != torch.float32 and stated.half_sums == "half":
        relative += UNIT_ROUNDOFF[hidden.dtype]
    return exact, relative * magnitude + unit * exact.abs() + SMALLEST_STEP[returned]


def check_values(judge: Judge, case: ValuesCase) -> None:
    buffers = Buffers(judge.device)
    hidden, weight = case.tensors
    args = [buffers.put("hidden", hidden, case.layout), buffers.put("weight", weight, case.weight_layout)]
    if case.cu_seqlens_q is not None:
        args.append(buffers.put("cu_seqlens_q", case.cu_seqlens_q))
    buffers.freeze()
    result = judge.call("last_token_logits", *args)
    if buffers.changed():
        judge.note_beside("LOGIT-3", f"last_token_logits wrote into its inputs: {buffers.changed()}")
    shape = len(case.lens), case.vocab_size
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape or result.dtype not in (case.dtype, torch.float32):
        told = f"{result.dtype} of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"
        raise Broken(("logits", f"are {told}, they must be a tensor of shape {shape}, of hidden's dtype or float32"))
    exact, limit = exact_and_limit(hidden[case.ends], weight, result.dtype, judge.capabilities)
    got = result.detach().cpu().double()
    share = (got - exact).abs() / limit
    judge.note_budget(case.dtype, float(share.nan_to_num(float("inf")).max()))
    wrong = ~(share <= 1)
    for row in wrong.any(dim=1).nonzero().flatten().tolist():
        others = fitting_rows(got[row], hidden, weight, result.dtype, judge.capabilities)
        if others:  # which row it is, is another clause's
            clause = "LOGIT-2" if case.decode else "LOGIT-1"
            judge.note_beside(clause, f"row {row} holds the logits of hidden row {others[0]}, it must hold those of row {case.ends[row]}")
            wrong[row] = False
    if not wrong.any():
        return
    row, token = (int(x) for x in wrong.nonzero()[0])
    raise Broken(
        (f"row {row}", f"= hidden row {case.ends[row]}, token {token}"),
        ("got", f"{float(got[row, token]):.8g}"),
        ("want", f"{float(exact[row, token]):.8g} ± {float(limit[row, token]):.3g} (the error is {float(share[row, token]):.3g} times that)"),
        ("wrong", f"{int(wrong.sum())} of {wrong.numel()} logits"),
        likely=likely_of_logits(case, got[row], row, float(share[row].max()), result.dtype, judge.capabilities),
        call=Call("last_token_logits", tuple(args), {}, exact, limit),
    )


def fitting_rows(got: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, returned: torch.dtype, stated: Capabilities) -> list[int]:
    """The rows of hidden (T, E) whose logits a row (V,) holds."""
    exact, limit = exact_and_limit(hidden, weight, returned, stated)
    return ((got - exact).abs() <= limit).all(dim=1).nonzero().flatten().tolist()


def likely_of_logits(case: ValuesCase, got: torch.Tensor, row: int, worst: float, returned: torch.dtype, stated: Capabilities) -> str:
    """What else the row (V,) fits."""
    hidden, weight = case.tensors

    def fits(rows: torch.Tensor, columns: torch.Tensor) -> list[int]:
        return fitting_rows(got, rows, columns, returned, stated)

    for tile in TILES:
        whole = case.hidden_size // tile * tile
        if 0 < whole < case.hidden_size and fits(hidden[case.ends[row]][None, :whole], weight[:, :whole]):
            return f"only the first {whole} of {case.hidden_size} columns are read: the hidden size is rounded down to whole tiles of {tile}"
    if case.weight_layout != "plain":
        packed = packed_as_rows(case)
        if packed is not None and fits(hidden[case.ends[row]][None], packed):
            return f"weight's rows are read {case.hidden_size} elements apart, whatever its strides"
    if worst < CLOSE:
        hint = " (or torch lets cuBLAS add in bfloat16: allow_bf16_reduced_precision_reduction)" if case.dtype == torch.bfloat16 else ""
        return f"close, and beyond rounding: products or partial sums are kept in fewer bits than float32{hint}"
    return ""


def packed_as_rows(case: ValuesCase) -> torch.Tensor | None:
    """weight as it looks to who takes its row stride for E; None where that is not within its storage."""
    view = Buffers(torch.device("cpu")).put("weight", case.tensors[1], case.weight_layout)
    return view.as_strided(view.shape, (case.hidden_size, 1)) if view.stride(1) == 1 else None
