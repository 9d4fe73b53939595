"""`python -m benchmarks.judging`: what judging costs, on the CPU: the oracle by its tokens, each file of the suite, and mutants a minute.

The oracle must be linear in the pairs of a query and a key that it sees: nanoseconds a pair, and the exponent of pairs that fits each step
from one row to the next (1.0 is linear). Both formulations are timed, on one decode row and on a chunk of 16 queries behind a context.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.growth import seconds_of
from benchmarks.results import brief
from reference.attention import attend_dense, attend_token_by_token, walk_block_table

TOKENS = (100, 1_000, 10_000, 100_000)
QUERIES = (1, 16)  # a decode row, a chunk
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
LEAST_EXPONENT_AT = 1_000  # tokens: below, calls cost more than pairs
MOST_PAIRS_ONE_BY_ONE = 200_000  # a third of a minute a million
MUTANTS = 24


def oracle_rows(tokens: tuple[int, ...] = TOKENS) -> Iterator[list[str]]:
    """A line of the table for each number of tokens and of queries."""
    device = torch.device("cpu")
    for queries in QUERIES:
        before: dict[str, tuple[int, float]] = {}
        for num_tokens in tokens:
            generator = torch.Generator().manual_seed(0)
            num_blocks = -(-num_tokens // BLOCK_SIZE)
            cache = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, generator=generator)
            table = torch.randperm(num_blocks, generator=generator).tolist()
            q = torch.randn(queries, HEADS, HEAD_DIM, generator=generator)
            keys, values = walk_block_table(*cache, table, num_tokens)
            pairs = queries * (num_tokens - queries) + queries * (queries + 1) // 2
            calls = {
                "walk": lambda: walk_block_table(*cache, table, num_tokens),
                "token by token": lambda: attend_token_by_token(q, keys, values, 0.125),
                "dense": lambda: attend_dense(q, keys, values, 0.125),
            }
            cells = [f"{queries}", f"{num_tokens:,}", f"{pairs:,}"]
            for name, call in calls.items():
                if name == "token by token" and pairs > MOST_PAIRS_ONE_BY_ONE:
                    cells += ["", "", ""]
                    continue
                seconds = seconds_of(call, device)
                work = num_tokens if name == "walk" else pairs  # a walk fetches each token once, whoever sees it
                exponent = ""
                if name in before and num_tokens > LEAST_EXPONENT_AT:
                    work_before, seconds_before = before[name]
                    exponent = f"{math.log(seconds / seconds_before) / math.log(work / work_before):.2f}"
                before[name] = (work, seconds)
                cells += [brief(seconds * 1e3), brief(seconds / work * 1e9), exponent]
            yield cells


def seconds_by_file(junit: Path) -> dict[str, tuple[int, float]]:
    """file -> tests and seconds, slowest first, from pytest's JUnit file."""
    files: dict[str, tuple[int, float]] = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name = case.get("classname", "").replace(".", "/") + ".py"
        tests, seconds = files.get(name, (0, 0.0))
        files[name] = (tests + 1, seconds + float(case.get("time", 0)))
    return dict(sorted(files.items(), key=lambda item: -item[1][1]))


def suite_files(effort: str) -> tuple[dict[str, tuple[int, float]], str]:
    """The suite on gpu_impl, with its closing line."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "suite.xml"
        command = [sys.executable, "-m", "pytest", "conformance/", "-q", "-p", "no:benchmark", "--effort", effort, "--device", "cpu"]
        command += ["--junit-xml", str(junit), "--verdict-json", str(Path(folder) / "verdict.json")]
        run = subprocess.run(command, capture_output=True, text=True)
        closing = [line for line in run.stdout.splitlines() if re.search(r"clauses? holds?", line)]
        return seconds_by_file(junit), (closing or run.stdout.splitlines()[-1:])[-1].strip()


def mutants_a_minute(count: int) -> str:
    """`count` mutants spread over the catalogue, judged until they are caught."""
    from conformance.mutants import all_mutants  # here, not above: its kernels are compiled or interpreted from this import on

    names = [name for name, mutant in all_mutants().items() if not mutant.gpu_only]
    some = names[:: max(1, len(names) // count)][:count]
    started = time.monotonic()
    run = subprocess.run([sys.executable, "-m", "conformance.mutants", *some], capture_output=True, text=True)
    seconds = time.monotonic() - started
    told = [line for line in run.stdout.splitlines() if "caught" in line]
    return f"{60 * len(some) / seconds:.0f} mutants a minute: {len(some)} of {len(names)} in {seconds:.0f} s, {'; '.join(told[1:])}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judging", description=__doc__)
    parser.add_argument("--only", choices=("oracle", "suite", "mutants"), help="one of the three")
    parser.add_argument("--effort", default="default", help="of the suite")
    parser.add_argument("--mutants", type=int, default=MUTANTS, metavar="N")
    parser.add_argument("--most-tokens", type=int, default=TOKENS[-1])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    print(f"CPU, {os.cpu_count()} cores, torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    if options.only in (None, "oracle"):
        print(f"Oracle, float64, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}: ms, ns a token or a pair, exponent\n")
        print("| queries | tokens | pairs | walk ms | ns a token | exp. | token by token ms | ns a pair | exp. | dense ms | ns a pair | exp. |")
        print("|" + "---:|" * 12)
        for cells in oracle_rows(tuple(n for n in TOKENS if n <= options.most_tokens)):
            print(f"| {' | '.join(cells)} |", flush=True)
        print()
    if options.only in (None, "suite"):
        files, closing = suite_files(options.effort)
        print("| file | tests | seconds |\n|---|---:|---:|\n" + "\n".join(f"| {name} | {n} | {s:.1f} |" for name, (n, s) in files.items()))
        print(f"\n{closing}\n", flush=True)
    if options.only in (None, "mutants"):
        print(mutants_a_minute(options.mutants))
    return 0


if __name__ == "__main__":
    sys.exit(main())
