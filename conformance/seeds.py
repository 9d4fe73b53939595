"""`python -m conformance.seeds --impl pkg.module --seeds 50`: the same implementation under many seeds. An honest one fails under none.

Cases that no seed changes, and that cost a process of their own, are judged under the first seed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CONFORMANCE = Path(__file__).resolve().parent
THE_SAME_UNDER_ALL = "huge_pool or beyond_32_bits"  # tests by their names


class Seeded(NamedTuple):
    """What one seed gave."""

    seed: int
    exit_status: int
    held: int
    judged: int
    examples: int
    broken: list[str]
    seconds: float


def judge_seed(implementation: str, seed: int, effort: str, device: str, *, all_tests: bool = True) -> Seeded:
    """One run of the suite in a process of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder) / "verdict.json"
        files = sorted(str(file) for file in CONFORMANCE.glob("test_*.py"))
        first = seed % len(files)  # another for each, so that seeds side by side do not all compile the same kernels at the same time
        command = [
            sys.executable, "-m", "pytest", *files[first:], *files[:first], "-n0", "-q", "-p", "no:cacheprovider", "--impl", implementation,
            "--seed", str(seed), "--effort", effort, "--device", device, "--verdict-json", str(verdict),
            *([] if all_tests else ["-k", f"not ({THE_SAME_UNDER_ALL})"]),
        ]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not verdict.exists():
            told = f"{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
            raise SystemExit(f"seed {seed} of {implementation} gave no verdict, exit status {ended.returncode}:\n{told}")
        clauses = [clause for clause in json.loads(verdict.read_text())["clauses"] if clause["verdict"] != "not offered"]
    broken = [f"{clause['id']}: {clause['text'][:300]}" for clause in clauses if not clause["holds"]]
    examples = sum(clause["examples"] for clause in clauses)
    return Seeded(seed, ended.returncode, len(clauses) - len(broken), len(clauses), examples, broken, time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.seeds", description=__doc__)
    parser.add_argument("--impl", default="gpu_impl", help="as in pytest conformance/ --impl")
    parser.add_argument("--seeds", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--effort", default="quick", choices=("quick", "default", "thorough"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="seeds that are judged at a time")
    options = parser.parse_args()
    failed = []
    started = time.monotonic()
    with ThreadPoolExecutor(options.workers) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for told in pool.map(
            lambda seed: judge_seed(options.impl, seed, options.effort, options.device, all_tests=seed == options.first), seeds
        ):
            print(f"seed {told.seed:<4} {told.held} of {told.judged} clauses hold, {told.examples} cases, {told.seconds:.0f} s", flush=True)
            for text in told.broken:
                print(f"    {text}", flush=True)
            if told.exit_status != 0:
                failed.append(told.seed)
    print(
        f"{options.impl}: {options.seeds - len(failed)} of {options.seeds} seeds without a failure, {options.effort} effort, "
        f"{time.monotonic() - started:.0f} s{'; failed: ' + str(failed) if failed else ''}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
