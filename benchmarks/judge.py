"""Judged before timed. The oracle is the reference's; large cases are judged on a sample of their rows, small ones on every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats

from conformance.implementation import REFUSALS, one_line
from reference.attention import attend_dense
from reference.sampling import probabilities

ROWS_JUDGED = 8  # of a sequence, of a batch
FALSE_ALARM = 1e-6  # of the one statistical check

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def unless_refused(call: Callable[[], Any]) -> Any:
    """The result of the call that is judged. A case that the contender refuses, or whose library is missing, is skipped in its words."""
    try:
        return call()
    except (*REFUSALS, ImportError) as refusal:
        pytest.skip(f"refused: {one_line(refusal)}")


def some_rows(count: int, limit: int = ROWS_JUDGED, seed: int = 1) -> list[int]:
    """All of 0 ... count - 1 if they are few, else the first, the last and random ones between them."""
    if count <= limit:
        return list(range(count))
    between = torch.randperm(count - 2, generator=torch.Generator().manual_seed(seed))[: limit - 2] + 1
    return [0, *sorted(between.tolist()), count - 1]


def assert_output(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, who: str) -> None:
    assert tuple(out.shape) == shape, f"{who}: the output has shape {tuple(out.shape)}, it must be {shape}"
    assert out.dtype == dtype, f"{who}: the output is {out.dtype}, it must be {dtype}"


def assert_attention_row(
    out: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, who: str
) -> None:
    """One query row, out and q (Hq, D), over the keys and values (n, Hk, D) that it sees: within the error budget of the float64 oracle.

    The budget is derived: one rounding of the weights and of the output in out's dtype, scores accumulated in float32.
    """
    length, kv_heads, head_dim = keys.shape
    u = UNIT_ROUNDOFF[out.dtype]
    exact, _ = attend_dense(q[None], keys, values, scale)
    magnitude, _ = attend_dense(q[None], keys, values.abs(), scale)
    by_kv_head = q.double().abs().reshape(kv_heads, -1, head_dim)
    score_magnitude = torch.einsum("kgd,nkd->kgn", by_kv_head, keys.double().abs()).amax(dim=2).reshape(-1, 1)
    score_error = (head_dim + 2) * 2.0**-24 * scale * score_magnitude
    budget = magnitude[0] * (u + 2 * score_error + (length + 16) * 2.0**-24 + 2.0**-22) + u * exact[0].abs()
    share = ((out.double() - exact[0]).abs() / budget).nan_to_num(torch.inf)
    head, dim = divmod(int(share.argmax()), head_dim)
    assert share.max() <= 1, (
        f"{who}: head {head}, dimension {dim} is {out[head, dim].item():.6g}, exact is {exact[0, head, dim].item():.6g}: "
        f"{share.max().item():.3g} times the error budget"
    )


def assert_stored(image: torch.Tensor, before: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor, who: str) -> None:
    """The whole cache: each mapped slot holds its row's bits, every other one what it held before.

    Told from the slot's side (which row does this slot hold?), not as another store. Compared as integers, so that NaN payloads count.
    """
    num_blocks, block_size = image.shape[:2]
    row_of_slot = [-1] * (num_blocks * block_size)
    for row, slot in enumerate(slot_mapping.tolist()):
        row_of_slot[slot] = row
    owner = torch.tensor(row_of_slot, device=image.device).reshape(num_blocks, block_size)
    expected = torch.where((owner >= 0)[:, :, None, None], rows[owner.clamp(min=0)], before)
    integers = {2: torch.int16, 4: torch.int32}[image.element_size()]
    wrong = (image.view(integers) != expected.view(integers)).flatten(2).any(dim=2).nonzero().tolist()
    assert not wrong, f"{who}: {len(wrong)} slots differ, the first is offset {wrong[0][1]} of block {wrong[0][0]}"


def assert_logits(out: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, who: str) -> None:
    """out: (B, V) against hidden (B, E), the last rows, in float64: one rounding of the output, products summed in float32."""
    rows = some_rows(len(hidden))
    h = hidden[rows].double()
    for first in range(0, len(weight), 16384):  # a slice of the vocabulary at a time: the weight in float64 is large
        w = weight[first : first + 16384].double()
        exact, magnitude = h @ w.T, h.abs() @ w.abs().T
        budget = UNIT_ROUNDOFF[out.dtype] * exact.abs() + (hidden.shape[1] + 2) * 2.0**-24 * magnitude
        share = ((out[rows, first : first + 16384].double() - exact).abs() / budget).nan_to_num(torch.inf)
        assert share.max() <= 1, f"{who}: a logit of tokens {first} and following is {share.max().item():.3g} times the error budget off"


def assert_race_won(tokens: torch.Tensor, logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor, who: str) -> None:
    """With injected noise, none of it 0, the token is exactly the argmax of p / noise."""
    expected = (probabilities(logits, temperatures).double() / noise.double()).argmax(dim=1)
    wrong = (tokens != expected).nonzero().flatten().tolist()
    assert not wrong, (
        f"{who}: {len(wrong)} rows are wrong, row {wrong[0]} gives token {tokens[wrong[0]].item()}, "
        f"the race's winner is {expected[wrong[0]].item()}"
    )


def assert_distribution(draws: list[torch.Tensor], logits: torch.Tensor, temperatures: torch.Tensor, who: str) -> None:
    """The drawn tokens' places in their own cumulative distributions, jittered inside the token's step, are uniform on [0, 1)."""
    p = torch.softmax(logits.double() / temperatures.double()[:, None], dim=1)
    upper = p.cumsum(dim=1)
    places = []
    for draw in draws:
        column = draw[:, None]
        jitter = torch.rand(column.shape, dtype=torch.float64, device=p.device)
        places.append((upper.gather(1, column) - jitter * p.gather(1, column))[:, 0])
    p_value = stats.kstest(torch.cat(places).cpu().numpy(), "uniform").pvalue
    assert p_value > FALSE_ALARM, f"{who}: the tokens are not distributed as softmax(logits / T), p = {p_value:.1e}"
