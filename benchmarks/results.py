"""A run's figures, read from the JSON of pytest-benchmark: one row for each case and contender, and how contenders compare in a case."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    group: str  # the function and its case
    contender: str
    us: float  # median of one call
    clock: str  # "device": CUDA events around replays; "host": the host's clock around a call and the wait for the device
    bytes_moved: int
    flops: int
    gb_per_s: float
    tflop_per_s: float
    percent_of_roof: float

    @property
    def function(self) -> str:
        return self.group.split(" ", 1)[0]

    @property
    def case(self) -> str:
        return self.group.split(" ", 1)[1]


class Results(NamedTuple):
    machine: Mapping[str, Any]
    date: str
    rows: list[Row]

    @property
    def on_gpu(self) -> bool:
        return self.machine.get("device", "cpu") != "cpu"

    def groups(self) -> list[str]:
        """In the order of the run."""
        return list(dict.fromkeys(row.group for row in self.rows))

    def us(self, group: str) -> dict[str, float]:
        """contender -> µs, fastest first."""
        return {row.contender: row.us for row in sorted(self.rows, key=lambda row: row.us) if row.group == group}


def read_results(path: Path) -> Results:
    told = json.loads(path.read_text(encoding="utf-8"))
    return Results(told["machine_info"], told.get("datetime", ""), [row_of(bench) for bench in told["benchmarks"] if "us" in bench["extra_info"]])


def row_of(bench: Mapping[str, Any]) -> Row:
    told = bench["extra_info"]
    return Row(bench["group"], *(told[field] for field in Row._fields[1:]))


def figures(us: float, bytes_moved: int, flops: int, copy_gb_per_s: float, matmul_tflop_per_s: float) -> dict[str, float]:
    """Rates of a call, and the share of the roof: the least time that its bytes and its products need, over the time that it took."""
    least_us = max(bytes_moved / copy_gb_per_s / 1e3, flops / matmul_tflop_per_s / 1e6)
    return {
        "gb_per_s": bytes_moved / us / 1e3,
        "tflop_per_s": flops / us / 1e6,
        "percent_of_roof": 100 * least_us / us,
    }


def brief(value: float) -> str:
    """A figure with about three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def add_ratios(benchmarks: Iterable[dict[str, Any]]) -> None:
    """To each benchmark's extra_info `ratio_to`: its time over each other contender's of the same case; under 1 it is faster."""
    measured = [bench for bench in benchmarks if "us" in bench.get("extra_info", {})]
    for bench in measured:
        own = bench["extra_info"]
        others = [other["extra_info"] for other in measured if other["group"] == bench["group"] and other is not bench]
        own["ratio_to"] = {other["contender"]: own["us"] / other["us"] for other in others}
