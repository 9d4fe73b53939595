"""Steps that follow each other over one cache: prepare, store, attend, through the implementation where it offers them (STEP).

What an implementation does not offer is taken from the reference, so that kernels without batch preparation are driven too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import reference
from conformance.checks.budget import exact_and_limit
from conformance.checks.values import round_to
from conformance.findings import Broken
from conformance.judge import Judge
from reference import SequenceState


@dataclass
class History:
    """One sequence's whole past: the keys and values of each of its tokens, in float32 as the dtype rounds them."""

    keys: torch.Tensor  # (n, Hk, D)
    values: torch.Tensor


@dataclass
class Pipeline:
    """A model of one layer: a cache, and the functions that write and read it."""

    judge: Judge
    num_blocks: int
    block_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype
    k_cache: torch.Tensor = field(init=False)
    v_cache: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        cache = reference.allocate_kv_cache(
            2, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim, dtype=self.dtype, device=self.judge.device
        )
        cache.fill_(30000.0)  # loud: what was never written must not be read
        self.k_cache, self.v_cache = reference.layer_views(cache, 1)

    @property
    def scale(self) -> float:
        return float(self.head_dim) ** -0.5

    def run(self, function: str, *args: Any, **kwargs: Any) -> Any:
        if function in self.judge.implementation.offered:
            return self.judge.call(function, *args, **kwargs)
        if function == "store_kvcache":  # as the reference does, all rows at once: real requests have many
            key, value, k_cache, v_cache, slots = args
            blocks, offsets = slots.long() // self.block_size, slots.long() % self.block_size
            k_cache[blocks, offsets], v_cache[blocks, offsets] = key, value
            return None
        return getattr(reference, function)(*args, **kwargs)

    def offers(self, function: str) -> bool:
        return function in self.judge.implementation.offered

    def prefill(self, states: Sequence[SequenceState], q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        """One prefill step of a layer: q, key, value (T, heads, D) of the scheduled tokens. Returns (T, Hq, D) float64.

        None if the implementation offers no prefill_attention: what the reference would say is not judged.
        """
        batch = self.run("prepare_prefill", states, self.block_size, device=self.judge.device)
        q, key, value = (t.to(self.judge.device, self.dtype) for t in (q, key, value))
        self.run("store_kvcache", key, value, self.k_cache, self.v_cache, batch.slot_mapping)
        if not self.offers("prefill_attention"):
            return None
        paged = batch.block_tables is not None
        out = self.run(
            "prefill_attention",
            q,
            self.k_cache if paged else key,
            self.v_cache if paged else value,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=batch.cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=self.scale,
            block_tables=batch.block_tables,
        )
        return attended(out, q)

    def decode(self, states: Sequence[SequenceState], q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        """One decode step: q, key, value (B, heads, D) of each sequence's last token. Returns (B, Hq, D) float64, or None."""
        batch = self.run("prepare_decode", states, self.block_size, device=self.judge.device)
        q, key, value = (t.to(self.judge.device, self.dtype) for t in (q, key, value))
        self.run("store_kvcache", key, value, self.k_cache, self.v_cache, batch.slot_mapping)
        if not self.offers("decode_attention"):
            return None
        out = self.run(
            "decode_attention",
            q,
            self.k_cache,
            self.v_cache,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=self.scale,
        )
        return attended(out, q)


def attended(out: Any, q: torch.Tensor) -> torch.Tensor:
    """What an attention function returned, in float64."""
    require_like(out, q)
    return out.double()


def require_like(out: Any, q: torch.Tensor) -> None:
    """An attention function returned a tensor of q's shape, where q lies."""
    if not isinstance(out, torch.Tensor) or out.shape != q.shape or out.device.type != q.device.type:
        told = f"shape {tuple(out.shape)} on {out.device}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise Broken(("returned", f"{told}, the contract says a tensor of shape {tuple(q.shape)} on {q.device}"))


def require_row(
    got: torch.Tensor, q: torch.Tensor, history: History, visible: int, scale: float, dtype: torch.dtype, products: str, where: str
) -> float:
    """One query row (Hq, D) against dense attention over its own history, within the error budget. Returns error / budget."""
    sees = torch.tensor([visible])
    keys, values = history.keys[:visible].to(got.device), history.values[:visible].to(got.device)
    exact, limit = exact_and_limit(q[None].to(got.device), keys, values, sees, scale, dtype, products)
    error = (got - exact[0]).abs()
    wrong = ~(error <= limit[0])
    if wrong.any():
        head, dim = (int(x) for x in wrong.nonzero()[0])
        raise Broken(
            ("at", where),
            (
                f"head {head}, dimension {dim}",
                f"got {float(got[head, dim]):.8g}, want {float(exact[0, head, dim]):.8g} ± {float(limit[0, head, dim]):.3g}",
            ),
            ("wrong", f"{int(wrong.sum())} of {wrong.numel()} elements of this row"),
        )
    return float((error / limit[0]).max())


def normal_rows(generator: np.random.Generator, count: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return round_to(torch.from_numpy(generator.standard_normal((count, heads, head_dim))).float(), dtype)
