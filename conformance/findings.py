"""What a check raises: a clause is broken (with the facts), or the implementation refuses the case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Call:
    """One call of the implementation with what it should have given: enough to write a stand-alone replay of it."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    want: torch.Tensor | None = None  # the expected result; None: what the facts say, or for store_kvcache what its arguments say
    limit: torch.Tensor | float = 0.0  # |got - want| may be at most this, element by element; infinite where nothing is asked
    before: dict[int, torch.Tensor] = field(default_factory=dict)  # data_ptr of a storage -> its bits when the call was made


@dataclass
class Finding:
    """Why a clause does not hold: labelled facts for a reader who has never opened this repository."""

    facts: list[tuple[str, str]]
    likely: str = ""
    call: Call | None = None
    case: Any = None  # filled in by the judge
    clause: str = ""  # filled in by the judge, unless the check knows better
    script: str = ""  # the body of a replay that is no single call of small tensors: it loads SPEC, and exits with 1 or 0
    replay: str = ""  # how to run the replay script, or why there is none


class Broken(Exception):
    """The implementation breaks a clause on this case."""

    def __init__(self, *facts: tuple[str, str], likely: str = "", call: Call | None = None, clause: str = "") -> None:
        super().__init__("; ".join(f"{label}: {text}" for label, text in facts))
        self.finding = Finding(list(facts), likely, call, clause=clause)


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
