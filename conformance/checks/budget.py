"""How far from the exact output an honest kernel may be, element by element: a bound that is derived and not chosen.

With p the exact weights, A = sum p |v|, u the unit roundoff of the dtype in which weights and output are rounded, scores accumulated in
float32:

    ds = max over visible j of (D + 2) 2^-24 scale sum |q k_j|          (tf32 products: 2 * 2^-11 in place of D * 2^-24)
    |out - exact| <= A (u + 2 ds + (n + 16) 2^-24 + 2^-22) + u |exact| + sum min(t, p) |v| + t

The last two terms are what a relative bound forgets: float16 rounds weights and outputs under 2^-14 to multiples of 2^-24, so each of them
may be off by half of that, t = 2^-25 (with as much again for a weight that was rounded before it was normalised).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SMALLEST_STEP = {torch.bfloat16: 2.0**-132, torch.float16: 2.0**-24, torch.float32: 2.0**-126}


def exact_and_limit(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    float32_products: str = "ieee",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, float64 matrices. q: (t, Hq, D) over keys, values (n, Hk, D); row r sees its first visible[r] positions.

    Returns the exact output and its limit, both (t, Hq, D). A row that sees nothing has output 0.
    """
    heads, head_dim = q.shape[1:]
    group_size = heads // keys.shape[1]
    q = q.double()
    keys = keys.double().repeat_interleave(group_size, dim=1)
    values = values.double().repeat_interleave(group_size, dim=1)
    visible = visible.to(q.device)
    hidden = torch.arange(len(keys), device=q.device)[None, :] >= visible[:, None]
    scores = scale * torch.einsum("thd,nhd->htn", q, keys)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=2)
    weights = weights.masked_fill((visible <= 0)[None, :, None], 0.0)
    exact = torch.einsum("htn,nhd->thd", weights, values)
    magnitude = torch.einsum("htn,nhd->thd", weights, values.abs())
    underflow = torch.einsum("htn,nhd->thd", weights.clamp(max=SMALLEST_STEP[dtype]), values.abs())
    sizes = abs(scale) * torch.einsum("thd,nhd->htn", q.abs(), keys.abs()).masked_fill(hidden, 0.0)
    largest = (sizes.amax(dim=2) if len(keys) else sizes.new_zeros(heads, len(q))).T
    return exact, limit_of(exact, magnitude, underflow, largest[:, :, None], visible[:, None, None], head_dim, dtype, float32_products)


def limit_of(
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    underflow: torch.Tensor,
    largest: torch.Tensor,
    visible: torch.Tensor,
    head_dim: int,
    dtype: torch.dtype,
    float32_products: str,
) -> torch.Tensor:
    """The bound itself, element by element. largest: of the visible scores' sizes, scale * sum |q * k|."""
    step = SMALLEST_STEP[dtype]
    unit = UNIT_ROUNDOFF[dtype]
    product_error = (head_dim + 2) * 2.0**-24
    if dtype == torch.float32 and float32_products == "tf32":
        unit = 2.0**-11  # the weights are rounded to tf32 before they meet V
        product_error = 2 * 2.0**-11 + 2 * 2.0**-24
    sums = (visible.clamp(min=0).double() + 16) * 2.0**-24 + 2.0**-22
    return magnitude * (unit + 2 * product_error * largest + sums) + unit * exact.abs() + underflow + step


def exact_and_limit_of_row(
    q: torch.Tensor,
    history: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    visible: int,
    scale: float,
    dtype: torch.dtype,
    float32_products: str = "ieee",
    chunk: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for one row q (Hq, D) that sees `visible` >= 1 positions, however many: history(start, end) gives keys, values (n, Hk, D).

    In two passes over chunks of positions, so that no more than a chunk of keys or values is there at a time.
    """
    heads, head_dim = q.shape
    starts = range(0, visible, chunk)
    scores, largest = [], q.new_zeros(heads, dtype=torch.float64)
    for start in starts:
        keys = history(start, min(start + chunk, visible))[0].double()
        by_head = q.double().view(keys.shape[1], -1, head_dim)
        scores.append(scale * torch.einsum("hgd,nhd->hgn", by_head, keys))
        sizes = abs(scale) * torch.einsum("hgd,nhd->hgn", by_head.abs(), keys.abs())
        largest = torch.maximum(largest, sizes.amax(dim=2).flatten())
    weights = torch.softmax(torch.cat(scores, dim=2), dim=2)
    exact, magnitude, underflow = torch.zeros((3, *weights.shape[:2], head_dim), dtype=torch.float64, device=q.device)
    for start in starts:
        end = min(start + chunk, visible)
        values, part = history(start, end)[1].double(), weights[:, :, start:end]
        exact += torch.einsum("hgn,nhd->hgd", part, values)
        magnitude += torch.einsum("hgn,nhd->hgd", part, values.abs())
        underflow += torch.einsum("hgn,nhd->hgd", part.clamp(max=SMALLEST_STEP[dtype]), values.abs())
    exact, magnitude, underflow = (t.reshape(heads, head_dim) for t in (exact, magnitude, underflow))
    seen = torch.tensor(visible, device=q.device)
    return exact, limit_of(exact, magnitude, underflow, largest[:, None], seen, head_dim, dtype, float32_products)
