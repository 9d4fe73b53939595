"""What a check raises: a clause is broken (with the facts), or the implementation refuses the case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

OVERWRITTEN = "an earlier result was overwritten by a later call"


@dataclass
class Call:
    """One call of the implementation with what it should have given: enough to write a stand-alone replay of it."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    want: torch.Tensor | None = None  # the expected result; None: what the facts say, or for store_kvcache what its arguments say
    limit: torch.Tensor | float = 0.0  # |got - want| may be at most this, element by element; infinite where nothing is asked
    before: dict[int, torch.Tensor] = field(default_factory=dict)  # data_ptr of a storage -> its bits when the call was made


Explain = Callable[[], tuple[list[tuple[str, str]], str]]


@dataclass
class Finding:
    """Why a clause does not hold: labelled facts for a reader who has never opened this repository."""

    facts: list[tuple[str, str]]
    likely: str = ""
    call: Call | None = None
    case: Any = None  # filled in by the judge
    drawn: bool = False  # the case was generated, and shrunk; filled in by the judge
    clause: str = ""  # filled in by the judge, unless the check knows better
    script: str = ""  # the body of a replay that is no single call of small tensors: it loads SPEC, and exits with 1 or 0
    explain: Explain | None = None  # more facts and a likely cause, from further calls
    replay: str = ""  # how to run the replay script, or why there is none

    def explained(self) -> None:
        """Add what `explain` finds, after the first fact. Called once, for the smallest case: it may cost many calls."""
        if self.explain is not None:
            (facts, likely), self.explain = self.explain(), None
            self.facts[1:1] = facts
            self.likely = likely or self.likely


class Broken(Exception):
    """The implementation breaks a clause on this case."""

    def __init__(self, *facts: tuple[str, str], likely: str = "", call: Call | None = None, clause: str = "", explain: Explain | None = None) -> None:
        super().__init__("; ".join(f"{label}: {text}" for label, text in facts))
        self.finding = Finding(list(facts), likely, call, clause=clause, explain=explain)


class Refused(Exception):
    """The implementation said clearly that it does not take this case."""


@dataclass
class Record:
    """What judging one test gathered. Travels as JSON from the process that judged to the one that reports."""

    clause: str
    function: str
    examples: int = 0
    refusals: dict[str, int] = field(default_factory=dict)  # message -> count
    worst_budget: dict[str, float] = field(default_factory=dict)  # dtype -> largest error / budget
    notes: list[str] = field(default_factory=list)
    side_findings: dict[str, str] = field(default_factory=dict)  # clause -> text, found while judging another clause
    seconds_to_failure: float = 0.0
    examples_to_failure: int = 0
    case_size: int = 0
