"""`python -m benchmarks.summary results.json [--write benchmarks/README.md]`: a run's figures and goals as Markdown."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.goals import OURS, Verdict, verdicts
from benchmarks.results import Results, Row, brief, read_results

NO_GPU_FIGURES = "**These are no GPU figures**: small shapes on a CPU, Triton kernels in Triton's interpreter. They show that the benchmarks run."
UNITS = {"us": "µs", "percent_of_roof": "% of the roof", "tflop_per_s": "TFLOP/s", "ratio": "x its time", "times_as_fast": "times as fast"}
SETTINGS = ("driver", "sm_clock_under_load", "sm_clock_at_most", "memory_clock", "power_limit", "mig")


def render(results: Results, picture: str = "") -> str:
    lines = ["# How fast", "", "Written by `python -m benchmarks.summary` from the figures of one run:"]
    lines += [f"{results.date[:10]}, {machine_of(results)}.", ""]
    if roof := results.machine.get("roof"):
        lines += [
            f"The roof, measured in the same run: a copy of {brief(roof['copy_gb_per_s'])} GB/s, read and write counted, and a matrix product of "
            f"{brief(roof['matmul_tflop_per_s'])} TFLOP/s.",
            "",
        ]
    if not results.on_gpu:
        lines += [NO_GPU_FIGURES, ""]
    if missing := results.machine.get("not_timed"):
        lines += [f"Not timed: {'; '.join(missing)}.", ""]
    if picture:
        lines += [f"![every case under the measured roof]({picture})", ""]
    lines += ["## Goals", "", *goal_table(verdicts(results)), ""]
    lines += [
        "## Figures", "",
        "µs are medians of one call: on the device's clock, events around replays of a graph whose inputs do not fit in the L2 cache, or, where",
        "it says host, on the host's, around a call and the wait for its end. The last column is the contender's time over gpu_impl's: over 1,",
        "gpu_impl is faster.", "",
    ]  # fmt: skip
    for function in dict.fromkeys(row.function for row in results.rows):
        lines += [f"### {function}", "", *figure_table([row for row in results.rows if row.function == function]), ""]
    return "\n".join(lines)


def machine_of(results: Results) -> str:
    machine = results.machine
    about = [machine.get("device", "")]
    about += [f"{name.replace('_', ' ')} {machine[name]}" for name in SETTINGS if name in machine]
    about += [f"{library} {version}" for library, version in machine.get("libraries", {}).items()]
    return " · ".join(about)


def goal_table(told: list[Verdict]) -> list[str]:
    asked = [verdict for verdict in told if verdict.value is not None]
    reached = sum(bool(verdict.reached) for verdict in asked)
    lines = [f"{reached} of {len(asked)} measured are reached, {len(told) - len(asked)} are not measured.", ""]
    lines += ["| goal | case | measured | against | |", "|---|---|---:|---|---|"]
    for verdict in told:
        value = "" if verdict.value is None else f"{verdict.value:,.2f} {UNITS[verdict.goal.measure]}"
        word = verdict.told if verdict.reached else f"**{verdict.told}**"
        lines.append(f"| {verdict.goal.text} | {verdict.group.partition(' ')[2]} | {value} | {verdict.peer} | {word} |")
    return lines


def figure_table(rows: list[Row]) -> list[str]:
    with_flops, on_host = any(row.flops for row in rows), any(row.clock == "host" for row in rows)
    heads = ["case", "contender", "µs", "GB/s", *(["TFLOP/s"] if with_flops else []), "% of the roof", "over gpu_impl"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for case in dict.fromkeys(row.case for row in rows):
        of_case = sorted((row for row in rows if row.case == case), key=lambda row: row.us)
        ours_us = next((row.us for row in of_case if row.contender == OURS), None)
        for row in of_case:
            us = f"{row.us:,.1f}" + (" host" if on_host and row.clock == "host" else "")
            cells = [case if row is of_case[0] else "", row.contender, us, brief(row.gb_per_s)]
            cells += [brief(row.tflop_per_s) if row.flops else ""] if with_flops else []
            cells += [brief(row.percent_of_roof), f"{row.us / ours_us:,.2f}" if ours_us else ""]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="what `pytest benchmarks/ --benchmark-json=` wrote; several are read as one run")
    parser.add_argument("--write", type=Path, help="a Markdown file (default: standard output)")
    parser.add_argument("--picture", type=Path, help="of `python -m benchmarks.roofline`, to be shown")
    options = parser.parse_args()
    try:
        results = joined([read_results(path) for path in options.results])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{', '.join(map(str, options.results))}: no results of the benchmarks ({type(error).__name__}: {error})", file=sys.stderr)
        return 4
    picture = ""
    if options.picture:
        picture = os.path.relpath(options.picture, options.write.parent) if options.write else str(options.picture)
    text = render(results, picture)
    if options.write is None:
        print(text)
        return 0
    options.write.write_text(text, encoding="utf-8")
    told = verdicts(results)
    for verdict in told:
        print(f"{verdict.told:<20} {verdict.goal.text}: {verdict.group or 'no case of it'} {verdict.peer and 'against ' + verdict.peer}".rstrip())
    print(f"{len(results.rows)} figures in {options.write}")
    return 0


def joined(runs: list[Results]) -> Results:
    """One run out of several on the same machine, each with figures of its own; a later one replaces what an earlier one measured."""
    devices = {run.machine.get("device") for run in runs}
    if len(devices) > 1:
        raise ValueError(f"the runs are of several devices: {', '.join(map(str, devices))}")
    rows = {(row.group, row.contender): row for run in runs for row in run.rows}
    return Results(runs[-1].machine, runs[-1].date, list(rows.values()))


if __name__ == "__main__":
    sys.exit(main())
