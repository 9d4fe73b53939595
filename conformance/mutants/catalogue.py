"""The catalogue of mutants: sound implementations with one fault planted in one method.

A mutant is a small function that replaces one method of a sound class. Its name is the mutant's name, its docstring says what is wrong,
its clause is the one that must catch it, its source the public report it is modelled on, or 'own'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    name: str
    clause: str
    description: str
    source: str
    sound: type
    replaces: str
    fault: Callable[..., Any]
    alone: bool  # whether it breaks its clause and no other
    gpu_only: bool  # a fault that only a GPU shows

    def implementation(self) -> Any:
        """The sound implementation with the fault in it."""
        return type(self.name, (self.sound,), {self.replaces: self.fault})()


CATALOGUE: dict[str, Mutant] = {}


def mutant(
    clause: str, *, replaces: str, of: type, source: str, alone: bool = False, gpu_only: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a fault in the catalogue: the decorated function takes the place of method `replaces` of the sound class `of`."""

    def enter(fault: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(fault, "__name__", "")
        if name in CATALOGUE:
            raise ValueError(f"there is a mutant {name} already")
        if not hasattr(of, replaces):
            raise ValueError(f"mutant {name} replaces {of.__name__}.{replaces}, which does not exist")
        description = " ".join((fault.__doc__ or "").split())
        CATALOGUE[name] = Mutant(name, clause, description, source, of, replaces, fault, alone, gpu_only)
        return fault

    return enter
