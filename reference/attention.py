"""Causal attention, dense and per sequence, in float64.

Two formulations, held against each other in tests: `attend_token_by_token` walks the block table one position at a time and sums one
visible position after the other; `attend_dense` is the textbook matrix form. `reference.worked_head` works one head out with numbers.
"""

from __future__ import annotations

import math

import torch

from reference.preconditions import (
    count,
    require,
    require_block_size,
    require_block_tables,
    require_blocks_in_cache,
    require_cu_seqlens,
    require_integers,
    require_table,
)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    block_tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, Hq, D): causal attention of each sequence's query tokens over its keys, aligned bottom-right (clauses PRE-1...9).

    q: (T, Hq, D). Without block_tables k, v: (T_k, Hk, D) are the keys and values of this pass, end to end as cu_seqlens_k says; with
    block_tables (B, M) they are the caches (N, S, Hk, D), already stored to. Query row t of a sequence with q_len queries and k_len keys
    sees positions 0 ... k_len - q_len + t. A row that sees nothing is 0. max_seqlen_q and max_seqlen_k are upper bounds of the lengths, as
    in flash-attn; no sequence need reach them. scale is any number: 0 weighs all keys alike, a negative one is arithmetic like any other.
    cu_seqlens and block_tables may have any strides. A batch of no sequence has no row. Computed in float64, returned in q's dtype.
    Raises ValueError for cu_seqlens that decrease or do not fit, for shapes that do not fit (k and v have one shape, Hq is a multiple of
    Hk), and for a bad table.
    """
    return prefill_attention_with_lse(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        scale=scale, block_tables=block_tables,
    )[0].to(q.dtype)  # fmt: skip


def prefill_attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    block_tables: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `prefill_attention`, in float64, with the natural log-sum-exp of the scaled scores (T, Hq); -inf for a row that sees nothing."""
    require(q.dim() == 3, f"q has shape {tuple(q.shape)}, it must be (T, Hq, D)")
    if block_tables is None:
        require(k.dim() == 3, f"k has shape {tuple(k.shape)}, without block_tables it must be (T_k, Hk, D)")
    else:
        require(k.dim() == 4, f"k has shape {tuple(k.shape)}, with block_tables it must be (N, S, Hk, D)")
    require_heads(q, k, v, "k", "v")
    starts_q = require_cu_seqlens(cu_seqlens_q, len(q), "cu_seqlens_q")
    starts_k = require_cu_seqlens(cu_seqlens_k, len(k) if block_tables is None else None, "cu_seqlens_k")
    require(
        len(starts_q) == len(starts_k), f"cu_seqlens_q has {count(len(starts_q), 'entry', 'entries')}, cu_seqlens_k {len(starts_k)}"
    )
    if block_tables is not None:
        require_block_tables(block_tables, len(starts_q) - 1)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    for i in range(len(starts_q) - 1):
        q_len, k_len = starts_q[i + 1] - starts_q[i], starts_k[i + 1] - starts_k[i]
        require(q_len <= max_seqlen_q, f"sequence {i} has {count(q_len, 'query token')}, max_seqlen_q is {max_seqlen_q}")
        require(k_len <= max_seqlen_k, f"sequence {i} has {count(k_len, 'key')}, max_seqlen_k is {max_seqlen_k}")
        if q_len == 0:
            continue
        if block_tables is None:
            keys, values = k[starts_k[i] : starts_k[i + 1]], v[starts_k[i] : starts_k[i + 1]]
        else:
            keys, values = walk_block_table(k, v, block_tables[i].tolist(), k_len, f"sequence {i}")
        rows = slice(starts_q[i], starts_q[i + 1])
        out[rows], lse[rows] = attend_token_by_token(q[rows], keys, values, scale)
    return out, lse


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """(B, Hq, D): one query per sequence over the first context_lens[i] positions of its table (clauses DEC-1...9).

    q: (B, Hq, D), k_cache, v_cache: (N, S, Hk, D), context_lens: (B,), block_tables: (B, M). A sequence's own newest KV is already stored.
    A row of context 0 (graph padding) is 0; scale, strides and an empty batch as in `prefill_attention`. Computed in float64, returned in
    q's dtype. Raises ValueError for shapes that do not fit and for a bad table or length.
    """
    return decode_attention_with_lse(
        q, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=scale
    )[0].to(q.dtype)  # fmt: skip


def decode_attention_with_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decode_attention`, in float64, with the natural log-sum-exp of the scaled scores (B, Hq)."""
    require(q.dim() == 3, f"q has shape {tuple(q.shape)}, it must be (B, Hq, D)")
    require(k_cache.dim() == 4, f"k_cache has shape {tuple(k_cache.shape)}, it must be (N, S, Hk, D)")
    require_heads(q, k_cache, v_cache, "k_cache", "v_cache")
    require_integers(context_lens, "context_lens", "(B,)")
    require_integers(block_tables, "block_tables", "(B, M)")
    require(
        len(q) == len(context_lens) == len(block_tables),
        f"q has {count(len(q), 'row')}, context_lens {len(context_lens)}, block_tables {len(block_tables)}",
    )
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    for i, length in enumerate(context_lens.tolist()):
        require(length >= 0, f"sequence {i} has context length {length}, it must be at least 0")
        keys, values = walk_block_table(k_cache, v_cache, block_tables[i].tolist(), length, f"sequence {i}")
        out[i : i + 1], lse[i : i + 1] = attend_token_by_token(q[i : i + 1], keys, values, scale)
    return out, lse


def walk_block_table(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: list[int], length: int, who: str = "the sequence"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (length, Hk, D) of positions 0 ... length - 1, fetched one position after the other."""
    num_blocks, block_size = k_cache.shape[:2]
    require_block_size(block_size)
    require_table(block_table, length, block_size, who)
    require_blocks_in_cache(block_table[: -(-length // block_size)], num_blocks, who)
    keys = torch.empty((length, *k_cache.shape[2:]), dtype=k_cache.dtype, device=k_cache.device)
    values = torch.empty_like(keys)
    for position in range(length):
        block, offset = block_table[position // block_size], position % block_size
        keys[position] = k_cache[block, offset]
        values[position] = v_cache[block, offset]
    return keys, values


def attend_token_by_token(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q (t, Hq, D) over keys, values (n, Hk, D). Returns out (t, Hq, D) and lse (t, Hq), float64.

    Row r sees positions 0 ... n - t + r; query head h reads key/value head h // (Hq / Hk). Every query head takes its step at once:
    a score, a weight and a denominator are (Hq, 1), one number a head.
    """
    num_rows, num_heads, _ = q.shape
    group_size = num_heads // keys.shape[1]
    kv_head_of = torch.tensor([head // group_size for head in range(num_heads)], dtype=torch.int64, device=q.device)
    q = q.double().contiguous()
    keys = keys.double().index_select(1, kv_head_of)  # (n, Hq, D): the key that each query head reads
    values = values.double().index_select(1, kv_head_of)
    out = torch.zeros_like(q)
    lse = torch.full((num_rows, num_heads), -math.inf, dtype=torch.float64, device=q.device)
    for row in range(num_rows):
        num_visible = len(keys) - num_rows + row + 1
        if num_visible <= 0:
            continue
        query = q[row]
        scores = [scale * (query * keys[position]).sum(dim=1, keepdim=True) for position in range(num_visible)]
        largest = torch.stack(scores).amax(dim=0)
        denominator, weighted_sum = torch.zeros_like(largest), torch.zeros_like(query)
        for position in range(num_visible):
            weight = torch.exp(scores[position] - largest)
            denominator += weight
            weighted_sum += weight * values[position]
        out[row] = weighted_sum / denominator
        lse[row] = (largest + torch.log(denominator))[:, 0]
    return out, lse


def attend_dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `attend_token_by_token`, as matrices: softmax(scale * Q K^T + mask) V, a head at a time.

    A hidden score is -inf, whatever the key; a hidden value stays out of the product, for 0 * NaN is NaN.
    """
    num_rows, num_heads, _ = q.shape
    group_size = num_heads // keys.shape[1]
    q, keys, values = q.double(), keys.double(), values.double()
    num_visible = [max(0, len(keys) - num_rows + row + 1) for row in range(num_rows)]
    positions = torch.arange(len(keys), device=q.device)
    hidden = positions[None, :] >= torch.tensor(num_visible, dtype=torch.int64, device=q.device)[:, None]
    out = torch.zeros_like(q)
    lse = torch.full((num_rows, num_heads), -math.inf, dtype=torch.float64, device=q.device)
    if len(keys) == 0:
        return out, lse
    for head in range(num_heads):
        scores = scale * (q[:, head] @ keys[:, head // group_size].T)
        scores = scores.masked_fill(hidden, -math.inf)
        lse[:, head] = torch.logsumexp(scores, dim=1)
        weights = torch.softmax(scores, dim=1)
        for row, n in enumerate(num_visible):
            out[row, head] = weights[row, :n] @ values[:n, head // group_size]  # n = 0: an empty sum
    return out, lse


def require_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_name: str, v_name: str) -> None:
    query_heads, kv_heads = q.shape[-2], k.shape[-2]
    require(k.shape == v.shape, f"{k_name} has shape {tuple(k.shape)}, {v_name} {tuple(v.shape)}")
    require(kv_heads >= 1, f"{k_name} has shape {tuple(k.shape)}, it must have at least 1 key/value head")
    require(
        query_heads % kv_heads == 0, f"q has {count(query_heads, 'query head')}, no multiple of the {kv_heads} key/value heads"
    )
    require(q.shape[-1] == k.shape[-1], f"q has head dimension {q.shape[-1]}, {k_name} has {k.shape[-1]}")
