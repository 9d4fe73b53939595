"""Judge, then time: `pytest benchmarks/ --benchmark-only`, and `--impl mypkg.kernels` to time yours beside the rest.

Two figures a case. pytest-benchmark's is the host's clock around one call and a torch.cuda.synchronize(). On a GPU the device's own is
beside it: CUDA events around replays of a graph, over inputs that do not fit in the L2 cache (benchmarks/timing.py), with its share of the
roof that the same process measured: the bandwidth of a copy, or the rate of a matrix product. `--benchmark-json` keeps both, and
`python -m benchmarks.summary` and `python -m benchmarks.roofline` read them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.contenders import ABSENT, CONTENDERS, ON_GPU, add_contender
from benchmarks.machine import Roof, device_name, gpu_state, library_versions, measured_roof, sm_clock_under_load
from benchmarks.results import Row, add_ratios, brief, figures
from benchmarks.timing import time_on_device
from conformance.implementation import CannotLoad

ROUNDS = 20 if ON_GPU else 5
NO_GPU_FIGURES = "THESE ARE NO GPU FIGURES: small shapes on the CPU, Triton kernels in Triton's interpreter"
ROWS = pytest.StashKey[list[Row]]()
UNDER_LOAD = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("whichslot")
    group.addoption("--impl", metavar="IMPL", help="time this one too: pkg.module | pkg.module:object | path/to/file.py")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS], config.stash[UNDER_LOAD] = [], {}
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used")  # a case that was refused or judged wrong
    if spec := config.getoption("--impl"):
        try:
            add_contender(spec)
        except CannotLoad as reason:
            raise pytest.UsageError(str(reason)) from reason


def pytest_report_header() -> list[str]:
    about = {**gpu_state(), **library_versions()}
    lines = [" · ".join([device_name(), *(f"{name} {told}" for name, told in about.items())])]
    lines.append(f"timed: {', '.join(c.name for c in CONTENDERS)}")
    lines += [f"not timed: {sentence}" for sentence in ABSENT]
    return lines if ON_GPU else [*lines, NO_GPU_FIGURES]


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    for host in ("node", "release"):  # a saved figure names the device, not the host
        machine_info.pop(host, None)
    machine_info.update(device=device_name(), libraries=library_versions(), not_timed=ABSENT, **gpu_state())


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: object, output_json: dict[str, Any]) -> None:
    add_ratios(output_json["benchmarks"])
    output_json["machine_info"].update(config.stash[UNDER_LOAD])
    output_json["commit_info"] = {field: output_json["commit_info"].get(field) for field in ("id", "time", "dirty")}  # not whose folder it was
    roofs = [bench["extra_info"]["roof"] for bench in output_json["benchmarks"] if "roof" in bench["extra_info"]]
    if roofs:
        output_json["machine_info"]["roof"] = roofs[0]


@pytest.fixture(scope="session")
def roof(pytestconfig: pytest.Config) -> Roof:
    """What this machine does at best, measured in this process."""
    pytestconfig.stash[UNDER_LOAD].update(sm_clock_under_load())
    return measured_roof()


@pytest.fixture
def timed(benchmark: Any, roof: Roof, request: pytest.FixtureRequest) -> Callable[..., None]:
    """timed(calls, group=..., contender=..., bytes_moved=..., flops=...): time calls that have been judged correct.

    calls: the same work on inputs of its own each, as many as benchmarks.timing.sets_needed says. on_host: the work is the host's, and so
    is the clock.
    """

    def time_it(
        calls: Sequence[Callable[[], object]], *, group: str, contender: str, bytes_moved: int, flops: int = 0, on_host: bool = False
    ) -> None:
        benchmark.group = group
        benchmark.pedantic(synchronised(calls[0]), rounds=ROUNDS, warmup_rounds=1)
        if benchmark.stats is None:  # --benchmark-disable: judged only
            return
        us, clock, launched = benchmark.stats.stats.median * 1e6, "host", "from Python"
        if ON_GPU and not on_host:
            timing = time_on_device(calls)
            us, clock, launched = timing.us, "device", "in a graph" if timing.graphed else "from Python"
            benchmark.extra_info["spread_us"] = timing.spread_us
        row = Row(group, contender, us, clock, bytes_moved, flops, **figures(us, bytes_moved, flops, *roof))
        benchmark.extra_info.update(
            row._asdict(), launched=launched, device=device_name(), libraries=library_versions(), roof=roof._asdict(), gpu_figures=ON_GPU
        )
        request.config.stash[ROWS].append(row)

    return time_it


def synchronised(call: Callable[[], object]) -> Callable[[], None]:
    """The call, and the wait until the device is done with it."""

    def call_and_wait() -> None:
        call()
        if ON_GPU:
            torch.cuda.synchronize()

    return call_and_wait


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section(f"on the device: {device_name()}" if ON_GPU else NO_GPU_FIGURES)
    group, fastest_us = None, 0.0
    for row in sorted(rows, key=lambda row: (row.group, row.us)):
        if row.group != group:
            group, fastest_us = row.group, row.us
            terminalreporter.write_line(group)
        rates = f"{brief(row.gb_per_s):>8} GB/s {brief(row.tflop_per_s):>8} TFLOP/s {brief(row.percent_of_roof):>6} % of the roof"
        terminalreporter.write_line(f"  {row.contender:<28} {row.us:>12,.1f} µs {row.us / fastest_us:>8,.2f} x {rates}, {row.clock}'s clock")
