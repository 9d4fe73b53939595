"""Checks of prepare_prefill, prepare_decode and compute_slot_mapping: whole tensors, compared with what the sequences' states say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch

from conformance.buffers import Buffers
from conformance.cases.sequences import SequencesCase
from conformance.checks.likely_batches import first_fitting, likely_of_slots, likely_of_table
from conformance.findings import Broken
from conformance.judge import Judge
from reference import SequenceState


def require_tensor(value: Any, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`value` as a tensor of this dtype on this device, or a finding."""
    if not isinstance(value, torch.Tensor):
        raise Broken((name, f"is a {type(value).__name__}, the contract says a tensor"))
    if value.dtype != dtype:
        raise Broken((name, f"has dtype {value.dtype}, the contract says {dtype}"))
    if value.device.type != device.type:
        raise Broken((name, f"lies on {value.device}, its inputs on {device}"))
    return value


def field_of(batch: Any, name: str) -> Any:
    if not hasattr(batch, name):
        raise Broken(("returned", f"a {type(batch).__name__} without the attribute {name!r}"))
    return getattr(batch, name)


def require_equal(
    got: Any, want: list[Any], name: str, dtype: torch.dtype, device: torch.device, where: Callable[[int], str] | None = None,
    likely: Callable[[list[int]], str] | None = None,
) -> None:  # fmt: skip
    """A one-dimensional tensor equals a list; the first difference is named, and `likely` says what the whole tensor may be."""
    tensor = require_tensor(got, name, dtype, device)
    if tuple(tensor.shape) != (len(want),):
        raise Broken((name, f"has shape {tuple(tensor.shape)}, it must be ({len(want)},)"))
    values = tensor.tolist()
    for i, (value, wanted) in enumerate(zip(values, want, strict=True)):
        if value != wanted:
            place = f"  ({where(i)})" if where else ""
            raise Broken((f"{name}[{i}]", f"is {value}, it must be {wanted}{place}"), likely=likely(values) if likely else "")


def prefix_sums(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def rows_of(states: list[SequenceState]) -> list[tuple[int, int]]:
    """(sequence, position) of each row of a prefill, end to end."""
    return [
        (i, position)
        for i, state in enumerate(states)
        for position in range(state.num_cached_tokens, state.num_cached_tokens + state.num_scheduled_tokens)
    ]


def describe_row(states: list[SequenceState], block_size: int, sequence: int, position: int) -> str:
    block = states[sequence].block_table[position // block_size]
    return (
        f"sequence {sequence}, position {position} = logical block {position // block_size}, offset {position % block_size}, "
        f"physical block {block}"
    )


def slot(states: list[SequenceState], block_size: int, sequence: int, position: int) -> int:
    return states[sequence].block_table[position // block_size] * block_size + position % block_size


class BatchChecks:
    """One check a field of the two batches."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.device = judge.device

    def prefill(self, states: list[SequenceState], block_size: int) -> Any:
        return self.prepare("prepare_prefill", states, block_size)

    def decode(self, states: list[SequenceState], block_size: int) -> Any:
        return self.prepare("prepare_decode", states, block_size)

    def prepare(self, function: str, states: list[SequenceState], block_size: int) -> Any:
        """The implementation gets copies, which it must leave as they are."""
        handed = copy.deepcopy(states)
        batch = self.judge.call(function, handed, block_size, device=self.device)
        for i, (mine, theirs) in enumerate(zip(states, handed, strict=True)):
            for name in SequenceState._fields:
                if getattr(mine, name) != getattr(theirs, name):
                    raise Broken((f"sequence {i}", f"its {name} was changed in place"), likely="a list of the caller's is padded or cut")
        return batch

    def input_ids(self, case: SequencesCase) -> None:
        states = case.states()
        want = [states[i].token_ids[position] for i, position in rows_of(states)]
        batch = self.prefill(states, case.block_size)
        rows = rows_of(states)
        require_equal(
            field_of(batch, "input_ids"), want, "input_ids", torch.int64, self.device,
            lambda t: f"the token of sequence {rows[t][0]} at position {rows[t][1]}",
            lambda got: first_fitting(got, {
                "num_cached_tokens is ignored: the sequences' first tokens are fed":
                    [states[i].token_ids[p - states[i].num_cached_tokens] for i, p in rows],
                "token 0 is taken for padding": [token or (set(got) - set(want) or {0}).pop() for token in want],
                "token ids are kept in 32 bits": [(token + 2**31) % 2**32 - 2**31 for token in want],
            }),
        )  # fmt: skip

    def positions(self, case: SequencesCase) -> None:
        states = case.states()
        rows = rows_of(states)
        batch = self.prefill(states, case.block_size)
        require_equal(
            field_of(batch, "positions"), [position for _, position in rows], "positions", torch.int64, self.device,
            lambda t: f"row {t} is of sequence {rows[t][0]}",
            lambda got: first_fitting(got, {
                "positions count from the chunk's start, not from the sequence's": [p - states[i].num_cached_tokens for i, p in rows],
                "positions count through the batch": list(range(len(rows))),
                "positions are one too far": [p + 1 for _, p in rows],
                "positions are one too far after a prefix hit": [p + (states[i].num_cached_tokens > 0) for i, p in rows],
            }),
        )  # fmt: skip

    def cu_seqlens(self, case: SequencesCase) -> None:
        states = case.states()
        batch = self.prefill(states, case.block_size)
        want_q = prefix_sums([state.num_scheduled_tokens for state in states])
        want_k = prefix_sums([state.num_cached_tokens + state.num_scheduled_tokens for state in states])
        require_equal(field_of(batch, "cu_seqlens_q"), want_q, "cu_seqlens_q", torch.int32, self.device)
        require_equal(
            field_of(batch, "cu_seqlens_k"), want_k, "cu_seqlens_k", torch.int32, self.device,
            likely=lambda got: first_fitting(got, {
                "the whole prompt is counted, not cached + scheduled tokens": prefix_sums([len(state.token_ids) for state in states]),
                "the cached tokens are forgotten": want_q,
                "the scheduled tokens are forgotten": prefix_sums([state.num_cached_tokens for state in states]),
            }),
        )  # fmt: skip

    def max_seqlens(self, case: SequencesCase) -> None:
        states = case.states()
        batch = self.prefill(states, case.block_size)
        wants = {
            "max_seqlen_q": max(state.num_scheduled_tokens for state in states),
            "max_seqlen_k": max(state.num_cached_tokens + state.num_scheduled_tokens for state in states),
        }
        for name, want in wants.items():
            got = field_of(batch, name)
            if isinstance(got, bool) or not isinstance(got, Integral):
                raise Broken((name, f"is {got!r} of type {type(got).__name__}, the contract says an int"))
            if got != want:
                raise Broken((name, f"is {got}, it must be {want}"), likely=self.likely_of_largest(name, int(got), states))

    def likely_of_largest(self, name: str, got: int, states: list[SequenceState]) -> str:
        queries = [state.num_scheduled_tokens for state in states]
        keys = [state.num_cached_tokens + state.num_scheduled_tokens for state in states]
        lengths = queries if name == "max_seqlen_q" else keys
        return first_fitting([got], {
            "it is the first sequence's": lengths[:1],
            "it is the last sequence's": lengths[-1:],
            "it is the sum of all sequences": [sum(lengths)],
            "it is taken from the queries": [max(queries)],
            "it is taken from the keys": [max(keys)],
            "the whole prompt is counted": [max(len(state.token_ids) for state in states)],
        }) or ("it is an earlier call's" if got > max(lengths) else "")  # fmt: skip

    def block_tables(self, case: SequencesCase) -> None:
        states = case.states()
        tables = field_of(self.prefill(states, case.block_size), "block_tables")
        if all(state.num_cached_tokens == 0 for state in states):
            if tables is not None:
                raise Broken(("block_tables", "is a tensor although no sequence has cached tokens, it must be None"))
            return
        self.require_tables(tables, states)

    def require_tables(self, tables: Any, states: list[SequenceState]) -> None:
        if tables is None:
            raise Broken(("block_tables", "is None although a sequence has cached tokens"))
        tables = require_tensor(tables, "block_tables", torch.int32, self.device)
        longest = max(len(state.block_table) for state in states)
        if tables.dim() != 2 or tables.shape[0] != len(states) or tables.shape[1] < longest:
            raise Broken(("block_tables", f"has shape {tuple(tables.shape)}, it must be ({len(states)}, {longest})"))
        for i, row in enumerate(tables.tolist()):
            want = list(states[i].block_table) + [-1] * (len(row) - len(states[i].block_table))
            for column, (got, wanted) in enumerate(zip(row, want, strict=True)):
                if got != wanted:
                    what = "sequence's own table" if column < len(states[i].block_table) else "padding"
                    told = f"is {got}, it must be {wanted} ({what})"
                    raise Broken((f"block_tables[{i}, {column}]", told), likely=likely_of_table(states, i, row))

    def warm_up(self, case: SequencesCase) -> None:
        batch = self.prefill(case.states(), case.block_size)
        if field_of(batch, "block_tables") is not None:
            raise Broken(("block_tables", "is not None in a warm-up pass"))
        require_equal(field_of(batch, "slot_mapping"), [], "slot_mapping", torch.int32, self.device)
        require_equal(
            field_of(batch, "positions"), [position for _, position in rows_of(case.states())], "positions", torch.int64, self.device
        )

    def decode_step(self, case: SequencesCase) -> None:
        states = case.states()
        batch = self.decode(states, case.block_size)
        lengths = [len(state.token_ids) for state in states]
        last_tokens = [state.token_ids[-1] for state in states]
        require_equal(
            field_of(batch, "input_ids"), last_tokens, "input_ids", torch.int64, self.device,
            likely=lambda got: first_fitting(got, {"the first token is fed": [state.token_ids[0] for state in states]}),
        )  # fmt: skip
        require_equal(
            field_of(batch, "positions"), [n - 1 for n in lengths], "positions", torch.int64, self.device,
            likely=lambda got: first_fitting(got, {"the position is len, it must be len - 1": lengths}),
        )  # fmt: skip
        require_equal(
            field_of(batch, "context_lens"), lengths, "context_lens", torch.int32, self.device,
            likely=lambda got: first_fitting(got, {"the newest token is not counted": [n - 1 for n in lengths]}),
        )  # fmt: skip
        self.require_tables(field_of(batch, "block_tables"), states)

    # --- slots --------------------------------------------------------------------------------------------------------------------

    def prefill_slots(self, case: SequencesCase) -> None:
        states = case.states()
        self.require_slots(field_of(self.prefill(states, case.block_size), "slot_mapping"), states, case.block_size, rows_of(states))

    def decode_slots(self, case: SequencesCase) -> None:
        states = case.states()
        rows = [(i, len(state.token_ids) - 1) for i, state in enumerate(states)]
        self.require_slots(field_of(self.decode(states, case.block_size), "slot_mapping"), states, case.block_size, rows)

    def require_slots(self, got: Any, states: list[SequenceState], block_size: int, rows: list[tuple[int, int]]) -> None:
        want = [slot(states, block_size, i, position) for i, position in rows]
        require_equal(
            got, want, "slot_mapping", torch.int32, self.device, lambda t: describe_row(states, block_size, *rows[t]),
            lambda slots: likely_of_slots(states, block_size, rows, slots),
        )  # fmt: skip

    def computed_slots(self, case: SequencesCase, layout: str = "plain") -> None:
        """compute_slot_mapping, from tensors with spare columns; layout: how the integers of all three lie, a stride may be refused."""
        states = case.states()
        rows = rows_of(states)
        width = max(len(state.block_table) for state in states) + case.block_size % 3
        tables = torch.full((len(states), width), -1, dtype=torch.int32)
        for i, state in enumerate(states):
            tables[i, : len(state.block_table)] = torch.tensor(list(state.block_table), dtype=torch.int32)
        positions = torch.tensor([position for _, position in rows], dtype=torch.int64, device=self.device)
        sums = torch.tensor(prefix_sums([state.num_scheduled_tokens for state in states]), dtype=torch.int32, device=self.device)
        buffers = Buffers(self.device)
        plain = layout == "plain"
        handed = (
            buffers.put("positions", positions, layout, gap=0),
            buffers.put("cu_seqlens_q", sums, layout, gap=0),
            buffers.put_table("block_tables", tables, case.block_size % 4) if plain else buffers.put("block_tables", tables, layout, gap=0),
        )
        buffers.freeze()
        got = self.judge.call("compute_slot_mapping", *handed, case.block_size)
        if buffers.changed():
            raise Broken(("found", f"an input was changed: {buffers.changed()}"))
        self.require_slots(got, states, case.block_size, rows)

    def chunks(self, case: SequencesCase) -> None:
        """The chunks of a split prefill, laid end to end, are the slots of one pass; the split falls where the case's cached counts say."""
        for i, state in enumerate(case.states()):
            end = state.num_cached_tokens + state.num_scheduled_tokens
            for start, stop in ((0, state.num_cached_tokens), (state.num_cached_tokens, end)):
                if stop == start:
                    continue
                chunk = [SequenceState(state.token_ids, start, stop - start, state.block_table)]
                got = field_of(self.prefill(chunk, case.block_size), "slot_mapping")
                try:
                    self.require_slots(got, chunk, case.block_size, rows_of(chunk))
                except Broken as broken:
                    split = f"sequence {i} after {state.num_cached_tokens} of {end} tokens; this is the chunk [{start}, {stop})"
                    broken.finding.facts.insert(0, ("split", split))
                    raise

    def decode_equals_prefill(self, case: SequencesCase) -> None:
        """A decode step's slot is the slot that a prefill gives to the same position."""
        self.decode_slots(case)
        if "prepare_prefill" not in self.judge.implementation.offered:
            return
        states = case.states()
        whole = [SequenceState(state.token_ids, 0, len(state.token_ids), state.block_table) for state in states]
        slots = require_tensor(field_of(self.prefill(whole, case.block_size), "slot_mapping"), "slot_mapping", torch.int32, self.device)
        ends = prefix_sums([len(state.token_ids) for state in states])[1:]
        if tuple(slots.shape) != (ends[-1],):
            raise Broken(("slot_mapping", f"has shape {tuple(slots.shape)}, it must be ({ends[-1]},)"))
        for i, end in enumerate(ends):
            want = slot(states, case.block_size, i, len(states[i].token_ids) - 1)
            if int(slots[end - 1]) != want:
                what = f"the decode step of sequence {i} writes its last token there"
                raise Broken((f"slot_mapping[{end - 1}]", f"is {int(slots[end - 1])}, it must be {want}  ({what})"))
