"""Who is timed: the reference, gpu_impl, the FlashAttention objects of gpu_impl.flash where they load, plain torch and plain Python.

`gpu_impl` takes for attention what its dispatch table says, `gpu_impl, own kernel` its Triton kernels in every case.

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
from benchmarks import plain_python, plain_torch
from conformance.implementation import load_implementation

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
OWN_KERNEL = "gpu_impl, own kernel"


class Contender(NamedTuple):
    name: str
    functions: Any  # a module or an object


def load_contenders() -> tuple[list[Contender], list[str]]:
    """Everyone who can be timed on this machine, and one sentence for each who cannot."""
    found = [
        Contender("reference", reference),
        Contender("gpu_impl", importlib.import_module("gpu_impl")),
        Contender("torch", plain_torch),
        Contender("python, a token at a time", plain_python),
    ]
    if not ON_GPU:
        return found, ["gpu_impl.flash (needs a GPU)", f"{OWN_KERNEL} (without a GPU gpu_impl is nothing else)"]
    found.append(Contender(OWN_KERNEL, importlib.import_module("gpu_impl.attention")))
    try:
        flash = importlib.import_module("gpu_impl.flash")
    except ImportError as error:
        return found, [f"gpu_impl.flash ({error})"]
    absent = []
    for name, member in vars(flash).items():
        if offers_attention(name, member):
            reason = why_not_usable(member)
            if reason:
                absent.append(f"gpu_impl.flash:{name} ({reason})")
            else:
                found.append(Contender(f"gpu_impl.flash:{name}", member))
    return found, absent


def add_contender(spec: str) -> None:
    """One more, named as in `--impl`. Raises CannotLoad with one sentence."""
    offered = load_implementation(spec, torch.device(DEVICE)).offered
    CONTENDERS.append(Contender(spec, SimpleNamespace(**offered)))


def offers_attention(name: str, member: object) -> bool:
    """A public object, one for each FlashAttention; not a class, and not a module that was imported there."""
    if name.startswith("_") or inspect.isclass(member) or inspect.ismodule(member):
        return False
    return hasattr(member, "decode_attention") or hasattr(member, "prefill_attention")


def why_not_usable(attention: Any) -> str:
    """Why a library cannot be called here (it is not installed, or a part of it is not); empty if it can."""
    q = torch.zeros(16, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    sums = torch.tensor([0, 16], dtype=torch.int32, device=DEVICE)
    lengths = {"cu_seqlens_q": sums, "cu_seqlens_k": sums, "max_seqlen_q": 16, "max_seqlen_k": 16}
    try:
        attention.prefill_attention(q, q, q, scale=1.0, **lengths)
    except Exception as error:  # whatever a half-installed library raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


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
