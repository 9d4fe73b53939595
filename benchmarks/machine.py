"""The machine that figures come from: its GPU, driver, clocks and libraries, and its roof, measured."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.contenders import ON_GPU
from benchmarks.timing import time_on_device

LIBRARIES = ("torch", "triton", "numpy", "flash-attn", "flash-attn-3", "flash-attn-4", "vllm", "pytest-benchmark")
GIB, MIB = 2**30, 2**20
LOAD_PRODUCTS = 400  # about half a second, longer than nvidia-smi takes to answer
NVIDIA_SMI = {  # what nvidia-smi calls it: what it is called here
    "driver_version": "driver",
    "clocks.max.sm": "sm_clock_at_most",
    "clocks.mem": "memory_clock",
    "power.limit": "power_limit",
    "mig.mode.current": "mig",
}


class Roof(NamedTuple):
    """What this machine does at best."""

    copy_gb_per_s: float  # bytes read and bytes written, together
    matmul_tflop_per_s: float


def device_name() -> str:
    return torch.cuda.get_device_name() if ON_GPU else "cpu"


def library_versions() -> dict[str, str]:
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def gpu_state() -> dict[str, str]:
    """Driver, clocks and limits as nvidia-smi tells them; what it does not know is left out."""
    smi = shutil.which("nvidia-smi")
    if not ON_GPU or smi is None:
        return {}
    # one by one: a single unknown field would make the whole query fail
    return {name: answer for query, name in NVIDIA_SMI.items() if (answer := _asked(smi, query))}


def sm_clock_under_load() -> dict[str, str]:
    """The clock while the GPU multiplies matrices: idle, it tells nothing."""
    smi = shutil.which("nvidia-smi")
    if not ON_GPU or smi is None:
        return {}
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    for _ in range(LOAD_PRODUCTS):
        torch.mm(a, a, out=out)
    answer = _asked(smi, "clocks.sm")
    torch.cuda.synchronize()
    return {"sm_clock_under_load": answer} if answer else {}


def _asked(smi: str, query: str) -> str:
    """nvidia-smi's answer for the current GPU; empty if it has none."""
    try:
        uuid = str(torch.cuda.get_device_properties().uuid).removeprefix("GPU-")
        command = [smi, f"--id=GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (AttributeError, OSError, subprocess.SubprocessError):
        return ""
    return "" if answer.startswith("[") else answer  # [N/A], [Not Supported]


def measured_roof() -> Roof:
    """A GPU's: a copy of 1 GiB and a bf16 product of 8192 x 8192 matrices. A CPU's, so that the same tables can be made: small float32 ones."""
    if not ON_GPU:
        return _roof_of_cpu()
    source = torch.randn(GIB // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    # a graph may hand copy_ to a copy engine, which is slower than a kernel that copies
    copy_us = min(time_on_device([lambda: target.copy_(source)]).us, time_on_device([lambda: torch.neg(source, out=target)]).us)
    a = source[: 8192 * 8192].reshape(8192, 8192)
    matmul_us = time_on_device([lambda: a @ a]).us
    return Roof(2 * GIB / copy_us / 1e3, 2 * 8192**3 / matmul_us / 1e6)


def _roof_of_cpu() -> Roof:
    source = torch.randn(8 * MIB)
    target, a = torch.empty_like(source), source[: 512 * 512].reshape(512, 512)
    return Roof(2 * source.nbytes / _host_us(lambda: target.copy_(source)) / 1e3, 2 * 512**3 / _host_us(lambda: a @ a) / 1e6)


def _host_us(call: Callable[[], object]) -> float:
    each = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        each.append((time.perf_counter() - started) * 1e6)
    return min(each)  # what the machine does at best: it may be shared
