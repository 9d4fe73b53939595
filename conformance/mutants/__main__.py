"""`python -m conformance.mutants`: the suite judges every mutant, and says what caught it."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from conformance.mutants import all_mutants
from conformance.mutants.judging import judge_each


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to judge (default: all)")
    parser.add_argument("--effort", default="default", choices=("quick", "default", "thorough"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all-clauses", action="store_true", help="do not stop at the first clause that fails, and list all that do")
    parser.add_argument("--alone", action="store_true", help="judge those that break one clause alone, by all clauses: no other may fail")
    parser.add_argument("--json", type=Path, help="where the judgements are written for other programs")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8))
    options = parser.parse_args()
    mutants = all_mutants()
    for name in options.names:
        if name not in mutants:
            print(f"there is no mutant {name!r}; python -m conformance.mutants without a name judges all {len(mutants)}", file=sys.stderr)
            return 4
    options.all_clauses = options.all_clauses or options.alone
    names = options.names or [name for name, mutant in mutants.items() if not mutant.gpu_only or options.device != "cpu"]
    if options.alone:
        names = [name for name in names if mutants[name].alone]
    left_out = [name for name, mutant in mutants.items() if name not in names] if not options.names else []
    console = Console(width=170, highlight=False)
    console.print(f"{'mutant':<46} {'breaks':<9} {'caught by':<26} {'examples':>8} {'seconds':>8} {'case':>6}")
    judgements = []
    for told in judge_each(names, options.workers, options.effort, options.device, not options.all_clauses, options.seed):
        judgements.append(told)
        by = ", ".join(told.broken[:6]) if told.caught else "LIVES"
        console.print(
            f"{told.name:<46} {told.clause:<9} {by:<26} {told.examples:>8} {told.seconds:>8.2f} {told.case_size:>6}",
            style=None if told.caught else "bold red",
        )
    caught = [told for told in judgements if told.caught]
    if options.json:
        options.json.write_text(json.dumps([asdict(told) for told in judgements], indent=1))
    for name in left_out:
        console.print(f"{name:<46} {mutants[name].clause:<9} shows on a GPU only: not judged here")
    if caught:
        console.print(f"median {statistics.median(told.seconds for told in caught):.2f} s until caught")
    console.print(f"{len(caught)} of {len(judgements)} caught")
    right = caught
    if options.alone:
        right = [told for told in caught if told.broken == [told.clause]]
        console.print(f"{len(right)} of {len(judgements)} break their own clause and no other")
    return 0 if len(right) == len(judgements) else 1


if __name__ == "__main__":
    sys.exit(main())
