"""The lives of `checks.lives` as a Hypothesis state machine: each rule is an operation, and any program of them is a life."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from conformance.cases.lives import Admit, Decode, Finish, Fork, LifeCase, Operation, Preempt, Prefill, Resume, admits, pools, prefills
from conformance.checks.life_book import LifeEnds
from conformance.checks.lives import EVERY_CLAUSE, Life
from conformance.findings import Broken
from conformance.judge import SHRINKING_SECONDS, Judge

Machine = type[RuleBasedStateMachine]


def life_machine(judge_of_a_life: Callable[[], Judge], long: int = 50) -> Machine:
    """A state machine that raises Broken for any clause of LIFE. Its class counts `steps`, `lives`, and those of `long` operations or more."""
    which = st.integers(0, 3)
    capabilities = judge_of_a_life().capabilities

    class LifeMachine(RuleBasedStateMachine):
        steps, lives, long_lives = 0, 0, 0
        failing: ClassVar[dict[str, Broken]] = {}  # a program that broke breaks again, whatever its implementation remembers of it
        deadline = float("inf")
        life: Life
        program: list[Any]

        @initialize(pool=pools(capabilities))
        def begin(self, pool: Any) -> None:
            type(self).lives += 1
            self.program = [pool]
            self.life = Life(judge_of_a_life(), pool, clauses=EVERY_CLAUSE)

        def do(self, operation: Operation) -> None:
            type(self).steps += 1
            self.program.append(operation)
            key = repr(self.program)
            if key in self.failing:
                raise self.failing[key]
            if time.monotonic() > self.deadline:
                return  # too late for a smaller program
            try:
                self.life.do(operation)
                type(self).long_lives += len(self.program) - 1 == long  # the first entry is the pool
            except LifeEnds:  # no clause is judged alone here: every broken one is raised
                raise AssertionError("a life ended and nothing was found") from None
            except Broken as broken:
                if not self.failing:
                    type(self).deadline = time.monotonic() + SHRINKING_SECONDS
                broken.finding.drawn = True
                broken.finding.case = LifeCase(self.program[0], tuple(self.program[1:]))
                self.failing[key] = broken
                raise

        @rule(data=st.data())
        def admit(self, data: st.DataObject) -> None:
            operation: Admit = data.draw(admits(self.life.pool.block_size), label="prompt")
            self.do(operation)

        @precondition(lambda self: self.life.live())
        @rule(data=st.data())
        def prefill(self, data: st.DataObject) -> None:
            operation: Prefill = data.draw(prefills(self.life.pool.block_size), label="batch")
            self.do(operation)

        @precondition(lambda self: self.life.live())
        @rule(token=st.integers(0, 1))
        def decode(self, token: int) -> None:
            self.do(Decode(token))

        @precondition(lambda self: self.life.live())
        @rule(which=which)
        def fork(self, which: int) -> None:
            self.do(Fork(which))

        @precondition(lambda self: self.life.live())
        @rule(which=which)
        def preempt(self, which: int) -> None:
            self.do(Preempt(which))

        @precondition(lambda self: len(self.life.live()) < len(self.life.sequences))
        @rule(which=which)
        def resume(self, which: int) -> None:
            self.do(Resume(which))

        @precondition(lambda self: self.life.live())
        @rule(which=which)
        def finish(self, which: int) -> None:
            self.do(Finish(which))

    return LifeMachine
