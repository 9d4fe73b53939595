"""Who is timed: the reference, gpu_impl, the FlashAttention objects of gpu_impl.flash where they load, and plain torch.

A contender is any object that offers the contract's function under its name. What cannot be timed here is told in the report's header.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import reference
from benchmarks import plain_torch
from conformance.implementation import load_implementation

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


class Contender(NamedTuple):
    name: str
    functions: Any  # a module or an object


def load_contenders() -> tuple[list[Contender], list[str]]:
    """Everyone who can be timed on this machine, and one sentence for each who cannot."""
    found = [Contender("reference", reference), Contender("gpu_impl", importlib.import_module("gpu_impl")), Contender("torch", plain_torch)]
    if not ON_GPU:
        return found, ["gpu_impl.flash (needs a GPU)"]
    try:
        flash = importlib.import_module("gpu_impl.flash")
    except ImportError as error:
        return found, [f"gpu_impl.flash ({error})"]
    objects = [Contender(f"gpu_impl.flash:{name}", member) for name, member in vars(flash).items() if offers_attention(name, member)]
    return found + (objects or [Contender("gpu_impl.flash", flash)]), []


def add_contender(spec: str) -> None:
    """One more, named as in `--impl`. Raises CannotLoad with one sentence."""
    offered = load_implementation(spec, torch.device(DEVICE)).offered
    CONTENDERS.append(Contender(spec, SimpleNamespace(**offered)))


def offers_attention(name: str, member: object) -> bool:
    """A public object, one for each FlashAttention; not a class, and not a module that was imported there."""
    if name.startswith("_") or inspect.isclass(member) or inspect.ismodule(member):
        return False
    return hasattr(member, "decode_attention") or hasattr(member, "prefill_attention")


CONTENDERS, ABSENT = load_contenders()


def pairs(function: str, cases: Iterable[Any]) -> list[Any]:
    """Every case with everyone who offers `function`. The reference, made to be read, is left out of cases of real size."""
    return [
        pytest.param(case, contender, id=f"{case.name}-{contender.name}")
        for case in cases
        for contender in CONTENDERS
        if hasattr(contender.functions, function) and not (contender.name == "reference" and case.real_size)
    ]


def takes(function: Callable[..., object], keyword: str) -> bool:
    """Optional keywords are found by looking: what is not taken is not asked."""
    return keyword in inspect.signature(function).parameters
