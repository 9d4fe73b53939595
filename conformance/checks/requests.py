"""STEP-2: real requests through one cache: prefix hits, chunked prefill, continuous batching, a pool that is too small for all of them.

Nothing here loops over tokens. What a slot must hold is a name for each slot, and a name's rows are a function that the device computes
(`checks.contents`): each step's slots are read back, the whole cache is compared with its image now and then, and a few rows of each step
are held against dense attention over their sequence's own history, in float64 and in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import reference
from conformance.buffers import bits
from conformance.cases.attention import short
from conformance.cases.requests import Request
from conformance.checks.budget import exact_and_limit_of_row
from conformance.checks.contents import KEY, QUERY, VALUE, rows_of
from conformance.checks.request_engine import GENERATED, NOTHING, POISON, Engine, RequestEngine, Running, Tally
from conformance.checks.steps import require_like
from conformance.findings import Broken, Call
from reference import SequenceState

QUERY_SCALE = 0.125  # of a row that sees all its positions about equally
AIM = 4.0  # of a row that is aimed at one key: times that key
IMAGE_SLOTS = 16384  # compared at a time


class Judged(NamedTuple):
    """A row of a step whose output is looked at."""

    row: int
    one: Running
    position: int
    target: int | None  # the position that its query is aimed at
    sequence: int  # of the step
    query: int  # of that sequence


class Attended(NamedTuple):
    """An attention call of a step."""

    function: str
    args: tuple[torch.Tensor, ...]  # q, and the caches or k and v
    kwargs: dict[str, Any]
    out: torch.Tensor


@dataclass(frozen=True)
class InStep:
    """What a finding was made in, for the first line of its report: the function that answered last, and the cache's sizes."""

    function: str
    engine: Engine

    def headline(self, implementation: str, device: str) -> str:
        engine = self.engine
        sizes = f"S {engine.block_size} · Hk {engine.num_kv_heads} · G {engine.group_size} · D {engine.head_dim}"
        return f"{implementation}.{self.function}   {str(engine.dtype).removeprefix('torch.')} · {sizes} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        return []  # a trace is not shrunk: the step's lengths are facts of the finding


class RequestReplay(RequestEngine):
    """Replays requests through an implementation. Raises Broken with the request, position, block and slot that are wrong."""

    def run(self, requests: list[Request]) -> Tally:
        """Prefill and decode steps by turns, until every request has finished."""
        try:
            return self.finish(requests)
        except Broken as broken:
            broken.finding.case = InStep(self.answered, self.engine)
            raise

    # --- a step ---------------------------------------------------------------------------------------------------------------------

    def step(self, work: list[tuple[Running, int]], *, decoding: bool) -> None:
        states = [SequenceState(one.tokens, one.computed, count, one.table) for one, count in work]
        batch = self.call("prepare_decode" if decoding else "prepare_prefill", states, self.engine.block_size, device=self.device)
        slots, names = self.slots_and_names(work)
        self.require_slots(batch.slot_mapping, slots, work)
        key, value = self.rows(names, KEY), self.rows(names, VALUE)
        self.store(key, value, batch.slot_mapping)
        self.held[slots] = names
        self.require_stored(key, value, slots, work)
        judged = self.rows_to_judge(work)
        self.answered = "BlockManager"  # who has what history is its word
        for row in judged:
            self.require_history(row.one, row.position)
        self.attend(work, judged, names, key, value, batch, decoding)
        for one, count in work:
            self.manager.computed(one.number, count)
            one.computed += count
            if one.computed == one.num_last:
                self.leave(one)
                self.admitting = True
                self.tally.requests += 1
                self.finished(self.tally)
        self.tally.computed_tokens += len(names)

    def slots_and_names(self, work: list[tuple[Running, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every token of a step, end to end."""
        if all(count == 1 for _, count in work):  # a decode step: few numbers, that are at hand
            size = self.engine.block_size
            slots = [one.table[one.computed // size] * size + one.computed % size for one, _ in work]
            return self.on_device(slots), self.on_device([one.tokens[one.computed] for one, _ in work])
        slots_of_each = [self.slots(one, one.computed, one.computed + count) for one, count in work]
        return torch.cat(slots_of_each), torch.cat([one.names[one.computed : one.computed + count] for one, count in work])

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        self.answered = function
        if function in self.judge.implementation.offered:
            return self.judge.call(function, *args, **kwargs)
        return getattr(reference, function)(*args, **kwargs)

    def store(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self.answered = "store_kvcache"
        if "store_kvcache" in self.judge.implementation.offered:
            self.judge.call("store_kvcache", key, value, self.k_cache, self.v_cache, slot_mapping)
            return
        where = slot_mapping.long()  # as the reference does, all rows at once: real requests have many
        for cache, rows in ((self.k_cache, key), (self.v_cache, value)):
            cache.flatten(0, 1)[where] = rows

    def attend(
        self, work: list[tuple[Running, int]], judged: list[Judged], names: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Any,
        decoding: bool,
    ) -> None:  # fmt: skip
        function = "decode_attention" if decoding else "prefill_attention"
        if function not in self.judge.implementation.offered:
            return
        engine = self.engine
        q = rows_of(names, engine.num_kv_heads * engine.group_size, engine.head_dim, engine.dtype, QUERY) * QUERY_SCALE
        for row, one, _, target, *_ in judged:
            if target is not None:
                q[row] = AIM * self.rows(one.names[target : target + 1], KEY)[0].repeat_interleave(engine.group_size, dim=0)
        scale = engine.head_dim**-0.5
        paged = decoding or batch.block_tables is not None
        kwargs = {"scale": scale, "block_tables": batch.block_tables}
        for name in ("context_lens",) if decoding else ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
            kwargs[name] = getattr(batch, name)
        args = (q, self.k_cache if paged else key, self.v_cache if paged else value)
        self.answered = function
        out = self.judge.call(function, *args, **kwargs)
        require_like(out, q)
        for judged_row in judged:
            self.require_row(Attended(function, args, kwargs, out), judged_row, work)

    def rows_to_judge(self, work: list[tuple[Running, int]]) -> list[Judged]:
        """A chunk's last row, and rows anywhere."""
        starts = [0]
        for _, count in work:
            starts.append(starts[-1] + count)
        judged: list[Judged] = []
        for turn in range(self.engine.rows_judged):
            i = self.random.randrange(len(work))
            one, count = work[i]
            t = count - 1 if turn == 0 else self.random.randrange(count)
            position = one.computed + t
            aims = (None, position, max(0, position - 1), max(0, one.computed - 1), 0, self.random.randint(0, position))
            if all(starts[i] + t != row for row, *_ in judged):
                judged.append(Judged(starts[i] + t, one, position, self.random.choice(aims), i, t))
        return judged

    # --- what must hold -------------------------------------------------------------------------------------------------------------

    def require_row(self, attended: Attended, judged: Judged, work: list[tuple[Running, int]]) -> None:
        row, one, position, target, *_ = judged
        got, q, scale = attended.out[row].double(), attended.args[0][row], attended.kwargs["scale"]
        engine = self.engine

        def history(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.rows(one.names[start:end], KEY), self.rows(one.names[start:end], VALUE)

        products = self.judge.capabilities.float32_products
        want, limit = exact_and_limit_of_row(q, history, position + 1, scale, engine.dtype, products)
        error = (got - want).abs()
        wrong = ~(error <= limit)
        if bool(wrong.any()):
            head, dim = (int(x) for x in wrong.nonzero()[0])
            aimed = "" if target is None else f", aimed at position {target}"
            values = (float(t[head, dim]) for t in (got, want, limit))
            raise Broken(
                ("at", f"{self.place(one, position)}{aimed}"),
                *lengths_of_step(attended.function, judged, work),
                (f"head {head}, dimension {dim}", "got {:.8g}, want {:.8g} ± {:.3g}".format(*values)),
                ("wrong", f"{int(wrong.sum())} of {wrong.numel()} elements of this row"),
                call=self.call_of_row(attended, judged, want, limit),
            )
        self.judge.note_budget(engine.dtype, float((error / limit).max()))
        self.judge.record.examples += 1
        self.tally.rows_judged += 1

    def call_of_row(self, attended: Attended, judged: Judged, want: torch.Tensor, limit: torch.Tensor) -> Call:
        """The call, and what the row must be. Nothing else is asked, so that other queries are 0 and other sequences' KV is poison: it packs."""
        q, k, v = attended.args
        wants = torch.zeros(attended.out.shape, dtype=torch.float64, device=self.device)
        limits = torch.full_like(wants, float("inf"))
        wants[judged.row], limits[judged.row] = want, limit
        own_q = torch.zeros_like(q)
        own_q[judged.row] = q[judged.row]
        own: Any = slice(judged.row - judged.query, judged.row + 1)  # without a cache, the keys are the step's own rows
        if attended.kwargs["block_tables"] is not None:
            own = self.on_device(judged.one.table)
        kept = [torch.full_like(rows, POISON) for rows in (k, v)]
        for only, rows in zip(kept, (k, v), strict=True):
            only[own] = rows[own]
        return Call(attended.function, (own_q, *kept), attended.kwargs, wants, limits)

    def require_history(self, one: Running, last: int) -> None:
        """Each position up to `last` lies in the slot that the table says: prefix hits are hits, and nobody has taken a block away."""
        held = self.held[self.slots(one, 0, last + 1)]
        wrong = (held != one.names[: last + 1]).nonzero()
        if len(wrong):
            what = "cached" if int(wrong[0]) < one.computed else "computed"
            raise Broken((what, self.place(one, int(wrong[0]))), ("holds", self.told(int(held[wrong[0]]))))

    def require_slots(self, slot_mapping: torch.Tensor, slots: torch.Tensor, work: list[tuple[Running, int]]) -> None:
        if slot_mapping.shape == slots.shape and bool((slot_mapping == slots).all()):
            return
        if slot_mapping.shape != slots.shape:
            raise Broken(("slot_mapping", f"has shape {tuple(slot_mapping.shape)}, it must be ({len(slots)},)"))
        row = int((slot_mapping != slots).nonzero()[0])
        raise Broken((f"slot_mapping[{row}]", f"is {int(slot_mapping[row])}, it must be {int(slots[row])}"), ("at", self.place_of_row(row, work)))

    def require_stored(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, work: list[tuple[Running, int]]) -> None:
        for name, cache, rows in (("k_cache", self.k_cache, key), ("v_cache", self.v_cache, value)):
            wrong = (bits(cache.flatten(0, 1)[slots]) != bits(rows)).flatten(1).any(1).nonzero()
            if len(wrong):
                raise Broken((name, f"does not hold the row that was to be stored: {self.place_of_row(int(wrong[0]), work)}"))

    def require_image(self) -> None:
        """Every slot of the pool holds the row of its name, or what was put there when its block was taken."""
        self.tally.images += 1
        for first in range(0, len(self.held), IMAGE_SLOTS):
            names = self.held[first : first + IMAGE_SLOTS]
            for name, cache, kind in (("k_cache", self.k_cache, KEY), ("v_cache", self.v_cache, VALUE)):
                want = self.rows(names, kind).masked_fill_((names == NOTHING)[:, None, None], POISON)
                wrong = (bits(cache.flatten(0, 1)[first : first + IMAGE_SLOTS]) != bits(want)).flatten(1).any(1).nonzero()
                if len(wrong):
                    slot, size = first + int(wrong[0]), self.engine.block_size
                    where = f"slot {slot} (physical block {slot // size}, offset {slot % size})"
                    raise Broken((name, f"{where} must hold {self.told(int(self.held[slot]))}, and was changed"))

    # --- words ----------------------------------------------------------------------------------------------------------------------

    def rows(self, names: torch.Tensor, kind: int) -> torch.Tensor:
        return rows_of(names, self.engine.num_kv_heads, self.engine.head_dim, self.engine.dtype, kind)

    def place_of_row(self, row: int, work: list[tuple[Running, int]]) -> str:
        for one, count in work:
            if row < count:
                return self.place(one, one.computed + row)
            row -= count
        return f"{row} rows after the last one"

    def place(self, one: Running, position: int) -> str:
        size = self.engine.block_size
        block = one.table[position // size]
        return (
            f"request {one.number} of the trace, position {position} = logical block {position // size}, offset {position % size}, "
            f"slot {block * size + position % size} (physical block {block})"
        )

    def told(self, name: int) -> str:
        if name == NOTHING:
            return "nothing"
        if name >= GENERATED:
            return f"the KV of token {(name - GENERATED) % 2**20} that request {(name - GENERATED) // 2**20} generated"
        return f"the KV of token {name % self.tokens_per_hash} of the prompt block {name // self.tokens_per_hash}"


def lengths_of_step(function: str, judged: Judged, work: list[tuple[Running, int]]) -> list[tuple[str, str]]:
    """The row's place in the batch, and the lengths of the batch."""
    context_lens = ("context_lens", short(str([one.computed + count for one, count in work])))
    if function == "decode_attention":
        return [("row", f"{judged.row} of {len(work)} in the step"), context_lens]
    counts = [count for _, count in work]
    place = f"{judged.row} of {sum(counts)} in the step = query {judged.query} of sequence {judged.sequence}"
    return [("row", place), ("query_lens", short(str(counts))), context_lens]
