"""`python tests/forked.py WORKERS QUICK < jobs.json`: pytest runs of the suite, each in a process forked from one that has imported everything.

jobs: a list of argument lists. Prints a list of [exit status, output]. Importing torch and the rest is most of what a small run
costs, and forking from pytest's own process would take its threads and plugins along.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conformance.judge import EFFORTS

ROOT = Path(__file__).resolve().parent.parent
SUITE = ["conformance/", "-p", "no:cacheprovider", "-p", "no:benchmark"]


def run_suites(jobs, workers=2, timeout_seconds=500, quick=None):
    """[(exit status, output, verdict or None)] of `python -m pytest conformance/ -n0 ARGUMENTS` for each list of arguments.

    quick: what the quick effort is to be for these runs, as a share of the default one.
    """
    with tempfile.TemporaryDirectory() as folder:
        verdicts = [Path(folder) / f"{i}.json" for i in range(len(jobs))]
        lists = [[*SUITE, "-n0", "--verdict-json", str(path), *job] for path, job in zip(verdicts, jobs, strict=True)]
        done = subprocess.run(
            [sys.executable, __file__, str(workers), str(quick or EFFORTS["quick"])], input=json.dumps(lists),
            capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=timeout_seconds,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [
            (status, output, json.loads(path.read_text()) if path.exists() else None)
            for (status, output), path in zip(json.loads(done.stdout), verdicts, strict=True)
        ]


def run_suite(*arguments, timeout_seconds=300):
    """The same, as people run it: one `python -m pytest` of its own. Without -n0, so that two workers judge unless told otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdict.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *SUITE, "--verdict-json", str(path), *arguments], capture_output=True, text=True, cwd=ROOT,
            env=environment(), timeout=timeout_seconds,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, json.loads(path.read_text()) if path.exists() else None


def environment():
    """Nothing of the pytest process that asks: its workers have variables of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def in_child(arguments, output):
    import pytest
    import torch

    torch.set_num_threads(1)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = pytest.main(arguments)
    sys.stdout.flush()
    sys.exit(int(status))


def main():
    import multiprocessing

    import hypothesis.internal.conjecture.engine  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    import conformance.mutants

    conformance.mutants.all_mutants()
    jobs, workers = json.load(sys.stdin), int(sys.argv[1])
    EFFORTS["quick"] = float(sys.argv[2])
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(i) for i in range(len(jobs))]
        waiting = [context.Process(target=in_child, args=pair) for pair in zip(jobs, outputs, strict=True)]
        processes, running = list(waiting), []
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(0.02)
            running = [process for process in running if process.is_alive()]
        told = [(process.exitcode, output.read_text()) for process, output in zip(processes, outputs, strict=True)]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
