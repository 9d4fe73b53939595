"""`python -m conformance.lives --impl pkg.kernels --runs 200 --steps 50`: long lives, until one breaks a clause of LIFE.

The clauses are judged by the suite too, on short lives; here a state machine goes on for as many steps as it is told to. Exit status: 0 if
every life held, 1 if one broke, 4 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from conformance.checks.life_machine import life_machine
from conformance.clauses import CLAUSES
from conformance.findings import Broken
from conformance.implementation import CannotLoad, Implementation, load_implementation
from conformance.judge import Judge
from conformance.verdicts import render_finding

MOST_ROUNDS, NEXT_SEED = 5, 1_000_003


def broken_life(implementation: Implementation, runs: int, steps: int, first_seed: int) -> tuple[str, str]:
    """("" or the report of a life that broke, how many lives and operations were tried)."""
    judge = Judge(implementation, CLAUSES["LIFE-3"], "prefill_attention")  # of whichever clause: the machine judges them all
    machine = life_machine(lambda: judge, steps)
    rules = settings(
        max_examples=runs, stateful_step_count=steps + 2, deadline=None, database=None, print_blob=False, verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    report = ""
    try:
        for again in range(MOST_ROUNDS):  # some lives are given up early
            if machine.long_lives < runs:  # type: ignore[attr-defined]
                run_state_machine_as_test(seed(first_seed + again * NEXT_SEED)(machine), settings=rules)
    except (Broken, Flaky):  # shrinking is given up after a while: the shortest life that broke is told
        finding = min(machine.failing.values(), key=lambda broken: len(broken.finding.case.program)).finding  # type: ignore[attr-defined]
        clause = CLAUSES[finding.clause]
        report = render_finding(clause, finding, implementation.name, str(implementation.device), " and ".join(clause.functions))
    counters: Any = machine
    counted = f"{counters.long_lives} lives of {steps} operations or more, {counters.lives} in all with {counters.steps} operations"
    return report, counted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.lives", description=__doc__)
    parser.add_argument("--impl", default="gpu_impl", help="as in pytest conformance/ --impl")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default: the GPU if there is one)")
    parser.add_argument("--runs", type=int, default=200, help="lives of so many operations, at least (default 200)")
    parser.add_argument("--steps", type=int, default=50, help="operations of a life (default 50)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    if name == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        torch.set_num_threads(1)
    try:
        implementation = load_implementation(options.impl, torch.device(name))
    except CannotLoad as error:
        print(error, file=sys.stderr)
        return 4
    started = time.monotonic()
    report, counted = broken_life(implementation, options.runs, options.steps, options.seed)
    if report:
        print(report + "\n")
    print(f"{options.impl}: {'a life broke' if report else 'every life held'}: {counted}, seed {options.seed}, {time.monotonic() - started:.0f} s")
    return 1 if report else 0


if __name__ == "__main__":
    sys.exit(main())
