"""The book of a life: its sequences, for every slot the token whose KV it must hold, and the words in which a finding tells of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import reference
from conformance.cases.lives import Pool
from conformance.checks.contents import next_name, rows_of
from conformance.checks.managed import HITS, Managed
from conformance.findings import Broken
from conformance.judge import Judge

POISON = 30000.0


class LifeEnds(Exception):
    """A clause other than the judged one is broken, and nothing can follow."""


@dataclass
class Sequence:
    number: int
    tokens: list[int]
    names: list[int]  # of each token, with everything before it
    computed: int = 0
    waiting: bool = False  # preempted: it is in no table

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.names.append(next_name(self.names[-1] if self.names else 0, token))


@dataclass
class LifeBook:
    """Who has computed what, and which slot holds it; what the implementation was asked, and whose fault a finding is."""

    judge: Judge
    pool: Pool
    clauses: tuple[str, ...] = ()  # that are judged; the judge's own if none is named
    told: list[str] = field(default_factory=list)  # what has happened, a line each
    sequences: dict[int, Sequence] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        pool = self.pool
        self.clauses = self.clauses or (self.judge.clause.id,)
        shape = (2, pool.num_blocks, pool.block_size, pool.num_kv_heads, pool.head_dim)
        self.cache = reference.allocate_kv_cache(*shape, dtype=pool.dtype, device=self.judge.device).fill_(POISON)
        self.k_cache, self.v_cache = reference.layer_views(self.cache, 1)  # what lies in layer 0 must stay
        self.expected = self.cache.clone()
        self.held: list[int | None] = [None] * (pool.num_blocks * pool.block_size)  # the name of the token whose KV a slot holds
        self.past: list[set[int]] = [set() for _ in self.held]  # names that a slot has ever held
        self.owner: dict[int, tuple[int, int]] = {}  # name -> (sequence, position) that computed it first
        self.number = 0
        self.called = {"BlockManager"}  # functions of the implementation that were asked
        self.managed = self.guarded(lambda: Managed(self.judge, pool.num_blocks, pool.block_size, pool.order_seed))

    # --- words ----------------------------------------------------------------------------------------------------------------------

    def rows(self, names: torch.Tensor, kind: int) -> torch.Tensor:
        return rows_of(names, self.pool.num_kv_heads, self.pool.head_dim, self.pool.dtype, kind)

    def slot(self, sequence: Sequence, position: int) -> int:
        size = self.pool.block_size
        return self.managed.tables[sequence.number][position // size] * size + position % size

    def place(self, sequence: Sequence, position: int) -> str:
        size, slot = self.pool.block_size, self.slot(sequence, position)
        return (
            f"sequence {sequence.number}, position {position} = logical block {position // size}, offset {position % size} = slot {slot} "
            f"(physical block {slot // size})"
        )

    def holds(self, slot: int) -> str:
        name = self.held[slot]
        if name is None:
            return "nothing: it was not written since its block was taken from the pool"
        number, position = self.owner[name]
        return f"the KV that sequence {number} computed at position {position}"

    def likely_of_hit(self, sequence: Sequence, position: int, slot: int) -> str:
        name = self.held[slot]
        if sequence.names[position] in self.past[slot]:
            return "a stale hash: it outlived what the block held, which was used again since"
        if name is None:
            return "a block is found before it is full: its last tokens were not computed"
        if self.owner[name][1] != position:
            return "the hash of a block leaves out its parent: the same tokens elsewhere in a sequence are no prefix"
        return "the hash leaves out a token: tokens themselves must be compared"

    def calls(self, function: str, not_for: tuple[str, ...] = ()) -> bool:
        """Whether the implementation is asked; not_for: clauses that are judged before it is called."""
        called = function in self.judge.implementation.offered and not set(self.clauses) <= set(not_for)
        if called:
            self.called.add(function)
        return called

    # --- blame ----------------------------------------------------------------------------------------------------------------------

    def guarded(self, ask: Callable[[], Any]) -> Any:
        """A wrong answer of the block manager: nothing can follow it."""
        try:
            return ask()
        except Broken as broken:
            self.blame(broken.finding.clause or HITS, broken)
            raise LifeEnds from None

    def blame(self, clause: str, broken: Broken) -> None:
        """Raise what breaks the judged clause; note what breaks another one."""
        broken.finding.clause = clause
        if clause in self.clauses:
            raise broken
        self.judge.note_beside(clause, str(broken))
