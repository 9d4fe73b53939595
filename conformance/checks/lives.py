"""LIFE: sequences that live in one pool. Every step goes through prepare, store and attend, and is held against what each sequence has lived.

A life knows, for every slot, which token's KV it must hold, with all that came before that token; outputs are dense attention over the
sequence's own history; a block that is re-used, or that nobody can ask for again, is poisoned first. Each stage is judged by its own
clause: where an earlier stage is wrong, the judged one goes on from what the earlier stage should have given, and a later one is not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import reference
from conformance.buffers import bits, first_difference
from conformance.cases.lives import Admit, Decode, Finish, Fork, LifeCase, Operation, Preempt, Prefill, Resume
from conformance.checks.batches import BatchChecks, field_of, require_equal
from conformance.checks.budget import exact_and_limit
from conformance.checks.contents import KEY, QUERY, VALUE, rows_of
from conformance.checks.life_book import POISON, LifeBook, LifeEnds, Sequence
from conformance.checks.managed import HITS
from conformance.checks.steps import attended, rows_to_judge
from conformance.findings import Broken, Call
from conformance.judge import Judge
from reference import SequenceState

PREPARED, STORED, PREFILLED, DECODED = "LIFE-1", "LIFE-2", "LIFE-3", "LIFE-4"
EVERY_CLAUSE = tuple(f"LIFE-{number}" for number in range(1, 9))
MOST_SEQUENCES = 6
QUERY_SCALE = 0.125  # small queries keep every weight near 1/n: a token that is not seen shows


class Life(LifeBook):
    """One life, operation by operation."""

    # --- operations -----------------------------------------------------------------------------------------------------------------

    def do(self, operation: Operation) -> None:
        """Raises Broken where the judged clause is broken, with the life so far; LifeEnds where another one leaves nothing to go on from."""
        try:
            match operation:
                case Admit(length, changed):
                    self.admit(length, changed)
                case Prefill(chunks, with_decodes):
                    self.prefill(chunks, with_decodes)
                case Decode(token):
                    self.decode(token)
                case Fork(which):
                    self.fork(which)
                case Preempt(which):
                    self.leave(which, self.preempt)
                case Resume(which):
                    self.resume(which)
                case Finish(which):
                    self.leave(which, self.finish)
        except Broken as broken:
            broken.finding.facts.append(("life", "\n".join(self.told)))
            raise

    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences.values() if not sequence.waiting]

    def admit(self, length: int, changed: tuple[int, ...]) -> None:
        if len(self.sequences) >= MOST_SEQUENCES:
            return
        sequence, length = Sequence(self.number, [], []), min(length, self.pool.longest)
        for position in range(length):
            sequence.append(self.pool.other_token if position in changed else 0)
        self.number += 1
        others = [position for position in changed if position < length]
        told = f", but for {self.pool.other_token} at {others}" if others else ""
        self.enter(sequence, f"admit sequence {sequence.number}: {length} tokens, all 0{told}")

    def resume(self, which: int) -> None:
        waiting = [sequence for sequence in self.sequences.values() if sequence.waiting]
        if waiting:
            sequence = waiting[which % len(waiting)]
            self.enter(sequence, f"resume sequence {sequence.number}: {len(sequence.tokens)} tokens")

    def enter(self, sequence: Sequence, line: str) -> None:
        """Cached tokens are as good as computed: each one's slot holds its KV, computed after the same tokens."""
        self.told.append(line)
        cached = self.guarded(lambda: self.managed.admit(sequence.number, sequence.tokens))
        self.told[-1] += f"; {cached} cached" + (f" in blocks {self.managed.tables[sequence.number]}" if cached else "")
        self.guarded(lambda: self.require_hits(sequence, cached))
        sequence.computed, sequence.waiting = cached, False
        self.sequences[sequence.number] = sequence

    def require_hits(self, sequence: Sequence, cached: int) -> None:
        for position in range(cached):
            slot = self.slot(sequence, position)
            if self.held[slot] != sequence.names[position]:
                raise self.managed.broken(
                    HITS, ("cached", f"{self.place(sequence, position)}"), ("holds", self.holds(slot)),
                    likely=self.likely_of_hit(sequence, position, slot),
                )  # fmt: skip

    def fork(self, which: int) -> None:
        live = self.live()
        if live and len(self.sequences) < MOST_SEQUENCES:
            parent = live[which % len(live)]
            child = Sequence(self.number, list(parent.tokens), list(parent.names), parent.computed)
            self.number += 1
            self.told.append(f"fork sequence {parent.number} into sequence {child.number}: {parent.computed} computed tokens")
            self.guarded(lambda: self.managed.fork(parent.number, child.number))
            self.sequences[child.number] = child

    def leave(self, which: int, how: Callable[[Sequence], None]) -> None:
        live = self.live()
        if live:
            how(live[which % len(live)])

    def finish(self, sequence: Sequence) -> None:
        self.told.append(f"finish sequence {sequence.number}")
        self.free(sequence)
        del self.sequences[sequence.number]

    def preempt(self, sequence: Sequence, why: str = "") -> None:
        self.told.append(f"preempt sequence {sequence.number}{why}")
        self.free(sequence)
        sequence.waiting, sequence.computed = True, 0

    def free(self, sequence: Sequence) -> None:
        """Blocks that nobody holds any more, and that are no full prefix, are poisoned at once; the others when they are re-used."""
        table = self.managed.tables[sequence.number]
        self.guarded(lambda: self.managed.free(sequence.number))
        size = self.pool.block_size
        for column, block in enumerate(table):
            full = (column + 1) * size <= sequence.computed
            if not full and not self.managed.holders(block, sequence.number):
                self.poison(block)

    def prefill(self, chunks: tuple[int, ...], with_decodes: bool) -> None:
        prompts = [sequence for sequence in self.live() if sequence.remaining > 0]
        work = [(sequence, min(chunks[i % len(chunks)], sequence.remaining)) for i, sequence in enumerate(prompts)]
        if not any(count for _, count in work):
            return
        self.told.append("prefill")
        riders = self.that_decode() if with_decodes else []
        for sequence in riders:
            self.append(sequence, 0)
        self.step([*work, *((sequence, 1) for sequence in riders)], decoding=False)

    def decode(self, token: int) -> None:
        work = self.that_decode()
        if not work:
            return
        self.told.append("decode")
        for sequence in work:
            self.append(sequence, token)
        self.step([(sequence, 1) for sequence in work], decoding=True)

    def that_decode(self) -> list[Sequence]:
        return [sequence for sequence in self.live() if sequence.remaining == 0 and len(sequence.tokens) < self.pool.longest]

    def append(self, sequence: Sequence, token: int) -> None:
        """A fork goes on with tokens of its own."""
        token = self.pool.other_token if token != sequence.number % 2 else 0
        self.guarded(lambda: self.managed.append(sequence.number, token))
        sequence.append(token)

    # --- a step ---------------------------------------------------------------------------------------------------------------------

    def step(self, asked: list[tuple[Sequence, int]], *, decoding: bool) -> None:
        line = len(self.told) - 1
        work = [(sequence, count) for sequence, count in asked if count > 0 and self.make_room(sequence, count)]
        self.told[line] += " " + ", ".join(
            f"sequence {s.number} {span(s.computed, count)} in blocks {self.managed.tables[s.number]}" for s, count in work
        )
        if not work:
            self.told.pop(line)
            return
        states = [self.state(sequence, count, decoding) for sequence, count in work]
        batch = self.prepared(states, decoding)
        names = torch.tensor(
            [name for sequence, count in work for name in sequence.names[sequence.computed : sequence.computed + count]], device=self.judge.device
        )
        key, value = self.rows(names, KEY), self.rows(names, VALUE)
        slots = [self.slot(s, p) for s, count in work for p in range(s.computed, s.computed + count)]
        self.store(key, value, slots, batch.slot_mapping)
        for sequence, count in work:
            for position in range(sequence.computed, sequence.computed + count):
                self.held[self.slot(sequence, position)] = sequence.names[position]
                self.past[self.slot(sequence, position)].add(sequence.names[position])
                self.owner.setdefault(sequence.names[position], (sequence.number, position))
        self.attend(work, names, key, value, batch, decoding)
        for sequence, count in work:
            self.guarded(lambda: self.managed.computed(sequence.number, count))
            sequence.computed += count
        self.steps += 1

    def make_room(self, sequence: Sequence, count: int) -> bool:
        """Blocks for the chunk: copied ones hold what they are copies of, new ones are poisoned. Without room the sequence is preempted."""
        before = self.managed.tables[sequence.number]
        copies = self.guarded(lambda: self.managed.schedule(sequence.number, count))
        if copies is None:
            self.preempt(sequence, ": the pool is full")
            return False
        table = self.managed.tables[sequence.number]
        for block in table:
            if block not in before:
                self.poison(block)
        for source, target in copies:
            self.told.append(f"copy block {source} into block {target}, for sequence {sequence.number}")
            for cache in (self.cache, self.expected):
                cache[:, 1, target] = cache[:, 1, source]
            size = self.pool.block_size
            self.held[target * size : (target + 1) * size] = self.held[source * size : (source + 1) * size]
        return True

    def poison(self, block: int) -> None:
        for cache in (self.cache, self.expected):
            cache[:, 1, block] = POISON
        size = self.pool.block_size
        self.held[block * size : (block + 1) * size] = [None] * size

    def state(self, sequence: Sequence, count: int, decoding: bool) -> SequenceState:
        table = self.managed.tables[sequence.number]
        if decoding:  # it ends with the last token's block
            table = table[: -(-len(sequence.tokens) // self.pool.block_size)]
        return SequenceState(list(sequence.tokens), sequence.computed, count, list(table))

    def prepared(self, states: list[SequenceState], decoding: bool) -> Any:
        """The implementation's batch, once it has been held against the states; else the reference's."""
        function = "prepare_decode" if decoding else "prepare_prefill"
        right = getattr(reference, function)(states, self.pool.block_size, device=self.judge.device)
        if self.calls(function):
            checks = BatchChecks(self.judge)
            try:
                batch = checks.prepare(function, states, self.pool.block_size)
                require_batch(checks, batch, right, states)
                return batch
            except Broken as broken:
                self.blame(PREPARED, broken)
        return right

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: list[int], slot_mapping: torch.Tensor) -> None:
        size = self.pool.block_size
        where = torch.tensor(slots, device=self.judge.device)
        for cache, rows in zip(reference.layer_views(self.expected, 1), (key, value), strict=True):
            cache[where // size, where % size] = rows
        if self.calls("store_kvcache", not_for=(PREPARED,)):
            before = {self.cache.data_ptr(): bits(self.cache).flatten().clone()}
            try:
                self.judge.call("store_kvcache", key, value, self.k_cache, self.v_cache, slot_mapping)
                self.require_image(slots, Call("store_kvcache", (key, value, self.k_cache, self.v_cache, slot_mapping), {}, before=before))
                return
            except Broken as broken:
                self.blame(STORED, broken)
        self.cache.copy_(self.expected)

    def require_image(self, slots: list[int], call: Call) -> None:
        element = first_difference(bits(self.cache).flatten(), bits(self.expected).flatten())
        if element is None:
            return
        which, layer, block, offset, head, dim = torch.unravel_index(torch.tensor(element), self.cache.shape)
        slot = int(block) * self.pool.block_size + int(offset)
        place = f"slot {slot} (physical block {int(block)}, offset {int(offset)}), kv head {int(head)}, dimension {int(dim)}"
        got, want = (float(cache.flatten()[element]) for cache in (self.cache, self.expected))
        told = "row " + str(slots.index(slot)) + " must be here" if slot in slots and int(layer) == 1 else "no row is mapped here"
        owned = f", it belongs to another layer (layer {int(layer)})" if int(layer) != 1 else f", it holds {self.holds(slot)}"
        raise Broken(
            ("v_cache" if int(which) else "k_cache", place), ("found", f"{got:.6g}, it must be {want:.6g}: {told}{owned}"), call=call
        )  # fmt: skip

    def attend(
        self, work: list[tuple[Sequence, int]], names: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Any, decoding: bool
    ) -> None:
        function = "decode_attention" if decoding else "prefill_attention"
        if not self.calls(function, not_for=(PREPARED, STORED)):
            return
        pool = self.pool
        q = rows_of(names, pool.num_kv_heads * pool.group_size, pool.head_dim, pool.dtype, QUERY) * QUERY_SCALE
        scale = pool.head_dim**-0.5
        paged = decoding or batch.block_tables is not None
        args = (q, self.k_cache if paged else key, self.v_cache if paged else value)
        kwargs = {"scale": scale, "block_tables": batch.block_tables}
        for name in ("context_lens",) if decoding else ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
            kwargs[name] = getattr(batch, name)
        try:
            out = attended(self.judge.call(function, *args, **kwargs), q)
            self.require_rows(out, q, work, scale, Call(function, args, kwargs))
        except Broken as broken:
            self.blame(DECODED if decoding else PREFILLED, broken)

    def require_rows(self, out: torch.Tensor, q: torch.Tensor, work: list[tuple[Sequence, int]], scale: float, call: Call) -> None:
        """Every row, or many of a long chunk, against dense attention over its sequence's own history."""
        call.want, call.limit, row = torch.zeros_like(out), torch.full_like(out, float("inf")), 0
        for sequence, count in work:
            end = sequence.computed + count
            history = torch.tensor(sequence.names[:end], device=out.device)
            judged = torch.tensor(rows_to_judge(sequence.computed, count, self.pool.block_size))
            call.want[row + judged], call.limit[row + judged] = exact_and_limit(
                q[row + judged], self.rows(history, KEY), self.rows(history, VALUE), sequence.computed + 1 + judged, scale, self.pool.dtype,
                self.judge.capabilities.float32_products,
            )  # fmt: skip
            row += count
        error = (out - call.want).abs()
        wrong = ~(error <= call.limit)
        if not bool(wrong.any()):
            self.judge.note_budget(self.pool.dtype, float((error / call.limit).max()))
            return
        row, head, dim = (int(x) for x in wrong.nonzero()[0])
        first = row
        for sequence, count in work:  # noqa: B007  # the sequence that it stops at is the one
            if row < count:
                break
            row -= count
        raise Broken(
            ("at", self.place(sequence, sequence.computed + row)),
            (f"out[{first}, {head}, {dim}]", f"got {float(out[first, head, dim]):.6g}, want {float(call.want[first, head, dim]):.6g} "
                                             f"± {float(call.limit[first, head, dim]):.2g}"),
            ("wrong", f"{int(wrong.any(2).any(1).sum())} of {len(out)} rows of this step"),
            call=call,
        )  # fmt: skip


def span(start: int, count: int) -> str:
    return f"position {start}" if count == 1 else f"positions {start}...{start + count - 1}"


def require_batch(checks: BatchChecks, batch: Any, right: Any, states: list[SequenceState]) -> None:
    """Every field of a prepared batch is the reference's; a table may have spare columns."""
    for name, want in right._asdict().items():
        got = field_of(batch, name)
        if name == "block_tables" and want is not None:
            checks.require_tables(got, states)
        elif isinstance(want, torch.Tensor):
            require_equal(got, want.tolist(), name, want.dtype, checks.device)
        elif got != want:
            raise Broken((name, f"is {'a tensor' if isinstance(got, torch.Tensor) else got}, it must be {want}"))


def check_life(judge: Judge, case: LifeCase) -> None:
    try:
        life = Life(judge, case.pool)
        for operation in case.program:
            life.do(operation)
    except LifeEnds:
        return
    if not life.called & set(judge.clause.functions):
        judge.record.examples -= 1  # a life in which nothing was judged is no case
