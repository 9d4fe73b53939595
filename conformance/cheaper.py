"""What makes judging cheaper and changes no verdict: CPython's frames and Triton's interpreter do the same work over and over."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

ROOM = 17_000  # slots of 8 bytes: CPython then maps a chunk of 256 KiB for the frame, and more than 100 KiB of it are left for what it calls
Function = TypeVar("Function", bound=Callable[..., Any])


def with_room(function: Function) -> Function:
    """What `function` calls finds room for its frames.

    CPython keeps frames in chunks of 16 KiB. Where one ends in the middle of a loop, every call in that loop maps a new chunk and unmaps it
    again: under pytest and Hypothesis the interpreter did so 350,000 times in two tests, a sixth of a run's processor time.
    """
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_stacksize=max(ROOM, function.__code__.co_stacksize))
    return function


def look_builtins_up_once() -> None:
    """Triton's interpreter, if it is loaded, searches triton.language for its builtins before every call of a jit function.

    Their names do not change: they are kept from the first search. A fifth of the interpreter's time; later than 3.9 it may have no such search.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or getattr(interpreter, "inspect", None) is not inspect:
        return
    is_builtin = interpreter.tl.core.is_builtin
    names: dict[Any, list[str]] = {}

    def getmembers(package: Any, predicate: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
        if predicate is not None:
            return inspect.getmembers(package, predicate)
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        return [(name, getattr(package, name)) for name in names[package]]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})
