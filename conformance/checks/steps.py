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
from conformance.buffers import bits, first_difference
from conformance.checks.budget import exact_and_limit
from conformance.checks.values import round_to
from conformance.findings import Broken, Call
from conformance.judge import Judge
from reference import SequenceState

MOST_ROWS = 1100  # of a chunk, that are all judged
LOUD = 30000.0  # in every slot that was never written: it must not be read


@dataclass
class History:
    """One sequence's whole past: the keys and values of each of its tokens, in float32 as the dtype rounds them."""

    keys: torch.Tensor  # (n, Hk, D)
    values: torch.Tensor


@dataclass
class Attended:
    """What a step's attention gave, and the call that gave it."""

    out: torch.Tensor  # (T, Hq, D) float64
    q: torch.Tensor  # (T, Hq, D)
    call: Call | None


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
        cache.fill_(LOUD)
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

    def store(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write a step's rows; each must then lie in its slot. What else was written shows when it is attended to."""
        slots = slot_mapping.long()
        given = (slots >= 0) & (slots < self.num_blocks * self.block_size)
        blocks, offsets, rows = slots[given] // self.block_size, slots[given] % self.block_size, given.nonzero().flatten()
        before = self.k_cache[blocks, offsets], self.v_cache[blocks, offsets]
        self.run("store_kvcache", key, value, self.k_cache, self.v_cache, slot_mapping)
        for name, cache, stored, old in (("k_cache", self.k_cache, key, before[0]), ("v_cache", self.v_cache, value, before[1])):
            got, want = bits(cache[blocks, offsets]), bits(stored[rows])
            place = first_difference(got.flatten(), want.flatten())
            if place is None:
                continue
            row = place // want[0].numel()
            digits = 2 * cache.element_size()
            told, wanted = (f"0x{int(t.flatten()[place]) & 16**digits - 1:0{digits}x}" for t in (got, want))
            for target, content in ((self.k_cache, before[0]), (self.v_cache, before[1])):
                target[blocks, offsets] = content  # a replay begins with what the call began with
            likely = "the row was not written" if torch.equal(got[row], bits(old)[row]) else ""
            where = f"slot {int(slots[rows[row]])} (physical block {int(blocks[row])}, offset {int(offsets[row])})"
            raise Broken(
                (name, f"{where}: row {int(rows[row])} of {len(key)} of this step must be here, and is not"),
                ("bits", f"are {told}, they must be {wanted}"),
                likely=likely,
                call=Call("store_kvcache", (key, value, self.k_cache, self.v_cache, slot_mapping), {}),
            )

    def places(self, table: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks, offsets) of a sequence's first positions."""
        positions = torch.arange(count, device=self.k_cache.device)
        blocks = torch.tensor(list(table), dtype=torch.int64, device=self.k_cache.device)
        return blocks[positions // self.block_size], positions % self.block_size

    def misplaced(self, history: History, table: Sequence[int], visible: int) -> str:
        """The first visible position whose slot does not hold its key and value any more, in words."""
        blocks, offsets = self.places(table, visible)
        for name, cache, rows in (("key", self.k_cache, history.keys), ("value", self.v_cache, history.values)):
            must = rows[:visible].to(cache.device, cache.dtype)
            wrong = (cache[blocks, offsets] != must).flatten(1).any(dim=1).nonzero().flatten().tolist()
            if wrong:
                slot = int(blocks[wrong[0]]) * self.block_size + int(offsets[wrong[0]])
                return f"slot {slot} does not hold the {name} of position {wrong[0]} ({len(wrong)} of {visible} positions are wrong)"
        return ""

    def keep_only(self, history: History, table: Sequence[int], visible: int) -> None:
        """The caches as one sequence needs them, all else loud: a replay is small, and begins with a cache that is right."""
        blocks, offsets = self.places(table, visible)
        for cache, rows in ((self.k_cache, history.keys), (self.v_cache, history.values)):
            cache.fill_(LOUD)
            cache[blocks, offsets] = rows[:visible].to(cache.device, cache.dtype)

    def attended(self, function: str, *args: torch.Tensor, **kwargs: Any) -> Attended:
        """What an attention function returns, in float64."""
        q = args[0]
        out = self.run(function, *args, **kwargs)
        return Attended(attended(out, q), q, Call(function, args, kwargs))

    def prefill(self, states: Sequence[SequenceState], q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended | None:
        """One prefill step of a layer: q, key, value (T, heads, D) of the scheduled tokens.

        None if the implementation offers no prefill_attention: what the reference would say is not judged.
        """
        batch = self.run("prepare_prefill", states, self.block_size, device=self.judge.device)
        q, key, value = (t.to(self.judge.device, self.dtype) for t in (q, key, value))
        self.store(key, value, batch.slot_mapping)
        if not self.offers("prefill_attention"):
            return None
        paged = batch.block_tables is not None
        return self.attended(
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

    def decode(self, states: Sequence[SequenceState], q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended | None:
        """One decode step: q, key, value (B, heads, D) of each sequence's last token. None as in `prefill`."""
        batch = self.run("prepare_decode", states, self.block_size, device=self.judge.device)
        q, key, value = (t.to(self.judge.device, self.dtype) for t in (q, key, value))
        self.store(key, value, batch.slot_mapping)
        if not self.offers("decode_attention"):
            return None
        return self.attended(
            "decode_attention",
            q,
            self.k_cache,
            self.v_cache,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=self.scale,
        )


def rows_to_judge(start: int, count: int, block_size: int) -> list[int]:
    """Which of a chunk's rows are held against dense attention: all, or of a long chunk both ends, what is near a block's, and one in 13.

    A single wrong row amid a large page may so be missed in a life: PRE-1 looks at every row of such a page, every time.
    """
    if count <= MOST_ROWS:
        return list(range(count))
    near = (min((start + t) % block_size, -(start + t) % block_size) for t in range(count))
    return [t for t, distance in enumerate(near) if t % 13 == 0 or min(t, count - 1 - t, distance) < 8]


def require_like(out: Any, q: torch.Tensor) -> None:
    """An attention function returned a tensor of q's shape, where q lies."""
    if not isinstance(out, torch.Tensor) or out.shape != q.shape or out.device.type != q.device.type:
        told = f"shape {tuple(out.shape)} on {out.device}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise Broken(("returned", f"{told}, the contract says a tensor of shape {tuple(q.shape)} on {q.device}"))


def attended(out: Any, q: torch.Tensor) -> torch.Tensor:
    """What an attention function returned, in float64."""
    require_like(out, q)
    return out.double()


def require_row(
    pipeline: Pipeline, attended: Attended, row: int, history: History, visible: int, table: Sequence[int], where: str
) -> float:
    """One query row (Hq, D) against dense attention over its own history, within the error budget. Returns error / budget."""
    got = attended.out[row]
    keys, values = history.keys[:visible].to(got.device), history.values[:visible].to(got.device)
    products = pipeline.judge.capabilities.float32_products
    exact, limit = exact_and_limit(
        attended.q[row][None], keys, values, torch.tensor([visible]), pipeline.scale, pipeline.dtype, products
    )
    error = (got - exact[0]).abs()
    wrong = ~(error <= limit[0])
    if wrong.any():
        head, dim = (int(x) for x in wrong.nonzero()[0])
        want, limits = torch.zeros_like(attended.out), torch.full_like(attended.out, float("inf"))  # the other rows are not asked
        want[row], limits[row] = exact[0], limit[0]
        if attended.call is not None:
            attended.call.want, attended.call.limit = want, limits
        misplaced = pipeline.misplaced(history, table, visible)
        pipeline.keep_only(history, table, visible)
        raise Broken(
            ("at", where),
            ("element", f"out[{row}, {head}, {dim}]: head {head}, dimension {dim} of the step's row {row}"),
            ("got", f"{float(got[head, dim]):.8g}"),
            ("want", f"{float(exact[0, head, dim]):.8g} ± {float(limit[0, head, dim]):.3g}"),
            ("wrong", f"{int(wrong.sum())} of {wrong.numel()} elements of this row"),
            *([("cache", misplaced)] if misplaced else []),
            likely="a slot is given out wrongly, or was overwritten by a later step; attention alone is replayed" if misplaced else "",
            call=attended.call,
        )
    return float((error / limit[0]).max())


def normal_rows(generator: np.random.Generator, count: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return round_to(torch.from_numpy(generator.standard_normal((count, heads, head_dim))).float(), dtype)
