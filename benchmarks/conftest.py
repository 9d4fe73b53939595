"""Judge, then time: `pytest benchmarks/ --benchmark-only`, and `--impl mypkg.kernels` to time yours beside the rest.

Two figures a case. pytest-benchmark's is the host's clock around one call and a torch.cuda.synchronize(). On a GPU the device's own is
beside it: CUDA events around replays of a graph, over inputs that do not fit in the L2 cache (benchmarks/timing.py), with its share of the
roof that the same process measured: the bandwidth of a copy, or the rate of a matrix product.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.contenders import ABSENT, CONTENDERS, ON_GPU, add_contender
from benchmarks.timing import time_on_device
from conformance.implementation import CannotLoad

LIBRARIES = ("torch", "triton", "flash-attn", "flash-attn-4")
ROUNDS = 20 if ON_GPU else 5
GIB = 2**30


class Row(NamedTuple):
    group: str
    contender: str
    device_us: float
    rate: str
    share: str
    launched: str


ROWS = pytest.StashKey[list[Row]]()


def library_versions() -> dict[str, str]:
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def device_name() -> str:
    return torch.cuda.get_device_name() if ON_GPU else "cpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("whichslot")
    group.addoption("--impl", metavar="IMPL", help="time this one too: pkg.module | pkg.module:object | path/to/file.py")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used")  # a case that was refused or judged wrong
    if spec := config.getoption("--impl"):
        try:
            add_contender(spec)
        except CannotLoad as reason:
            raise pytest.UsageError(str(reason)) from reason


def pytest_report_header() -> list[str]:
    versions = " · ".join(f"{library} {version}" for library, version in library_versions().items())
    lines = [f"{device_name()} · {versions}", f"timed: {', '.join(c.name for c in CONTENDERS)}"]
    lines += [f"not timed: {sentence}" for sentence in ABSENT]
    if not ON_GPU:
        lines.append("THESE ARE NO GPU FIGURES: small shapes on the CPU, Triton kernels in Triton's interpreter")
    return lines


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # a saved figure names the device, not the host
    machine_info.update(device=device_name(), libraries=library_versions())


class Roof(NamedTuple):
    copy_gb_per_s: float
    matmul_tflop_per_s: float


@pytest.fixture(scope="session")
def roof() -> Roof | None:
    """What this GPU does at best, measured now: a copy of 1 GiB (read and write counted) and a bf16 product of 8192 x 8192 matrices."""
    if not ON_GPU:
        return None
    source = torch.randn(GIB // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    # a graph may hand copy_ to a copy engine, which is slower than a kernel that copies
    copy_us = min(time_on_device([lambda: target.copy_(source)]).us, time_on_device([lambda: torch.neg(source, out=target)]).us)
    a = source[: 8192 * 8192].reshape(8192, 8192)
    matmul_us = time_on_device([lambda: a @ a]).us
    return Roof(2 * GIB / copy_us / 1e3, 2 * 8192**3 / matmul_us / 1e6)


@pytest.fixture
def timed(benchmark: Any, roof: Roof | None, request: pytest.FixtureRequest) -> Callable[..., None]:
    """timed(calls, group=..., contender=..., bytes_moved=..., flops=...): time calls that have been judged correct.

    calls: the same work on inputs of its own each, as many as benchmarks.timing.sets_needed says.
    """

    def time_it(calls: Sequence[Callable[[], object]], *, group: str, contender: str, bytes_moved: int, flops: int = 0) -> None:
        benchmark.group = group
        benchmark.extra_info.update(contender=contender, device=device_name(), libraries=library_versions(), bytes_moved=bytes_moved)
        if flops:
            benchmark.extra_info["flops"] = flops
        if roof is not None:
            row = row_of(calls, group, contender, bytes_moved, flops, roof)
            benchmark.extra_info.update(
                device_us=row.device_us, rate=row.rate, share_of_roof=row.share, launched=row.launched, roof=roof._asdict()
            )
            request.config.stash[ROWS].append(row)
        benchmark.pedantic(synchronised(calls[0]), rounds=ROUNDS, warmup_rounds=1)

    return time_it


def synchronised(call: Callable[[], object]) -> Callable[[], None]:
    """The call, and the wait until the device is done with it."""

    def call_and_wait() -> None:
        call()
        if ON_GPU:
            torch.cuda.synchronize()

    return call_and_wait


def row_of(calls: Sequence[Callable[[], object]], group: str, contender: str, bytes_moved: int, flops: int, roof: Roof) -> Row:
    timing = time_on_device(calls)
    seconds_at_copy_rate = bytes_moved / (roof.copy_gb_per_s * 1e9)
    seconds_at_matmul_rate = flops / (roof.matmul_tflop_per_s * 1e12)
    if seconds_at_matmul_rate > seconds_at_copy_rate:
        rate = f"{flops / timing.us / 1e6:,.0f} TFLOP/s"
    else:
        rate = f"{bytes_moved / timing.us / 1e3:,.0f} GB/s"
    share = f"{max(seconds_at_copy_rate, seconds_at_matmul_rate) / (timing.us * 1e-6):.0%}"
    return Row(group, contender, timing.us, rate, share, "graph" if timing.graphed else "launched from Python")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section(f"on the device: {device_name()}")
    group = None
    for row in sorted(rows, key=lambda row: (row.group, row.device_us)):
        if row.group != group:
            group = row.group
            terminalreporter.write_line(group)
        terminalreporter.write_line(f"  {row.contender:<28} {row.device_us:>12,.1f} µs {row.rate:>16} {row.share:>6} of the roof, {row.launched}")
