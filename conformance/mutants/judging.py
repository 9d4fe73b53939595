"""One mutant, or many in processes of their own, judged by the suite as it judges any implementation, until the first clause fails.

Processes are forked from one that has imported everything, which is most of what a small judgement costs; with CUDA they are spawned.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.clauses import CLAUSES
from conformance.mutants import all_mutants
from conformance.mutants.catalogue import Mutant

TESTS = Path(__file__).resolve().parent.parent
FIRST_FILE = {
    "BATCH": "test_batches.py", "SLOT": "test_slot_mapping.py", "KV": "test_store_kvcache.py", "PRE": "test_prefill_attention.py",
    "DEC": "test_decode_attention.py", "STEP": "test_steps.py", "LOGIT": "test_logits.py", "SAMPLE": "test_sampling.py",
    "LIFE": "test_lifecycle.py", "CLAIM": "test_decode_attention.py", "CLAIM-5": "test_claims.py", "CLAIM-6": "test_claims.py",
    "CLAIM-7": "test_claims.py",
}  # fmt: skip


@dataclass
class Judgement:
    """What became of one mutant."""

    name: str
    clause: str  # the one that its author says it breaks
    broken: list[str]  # the clauses that failed
    caught_by: str
    examples: int  # until caught
    seconds: float  # until caught
    case_size: int  # tokens of the shrunk case
    total_seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.broken)


def judge(name: str, effort: str, device: str, *, until_caught: bool = True, seed: int = 0) -> Judgement:
    """Run the suite on one mutant in this process."""
    mutant: Mutant = all_mutants()[name]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder) / "verdict.json"
        first = FIRST_FILE.get(mutant.clause, FIRST_FILE[CLAUSES[mutant.clause].family])
        files = sorted(TESTS.glob("test_*.py"), key=lambda path: (path.name != first, path.name))
        arguments = [
            *map(str, files), "-n0", "-q", "-p", "no:cacheprovider", "-p", "no:terminalreporter", "--impl", f"conformance.mutants:{name}",
            "--effort", effort, "--device", device, "--seed", str(seed), "--verdict-json", str(verdict), *(["-x"] if until_caught else []),
        ]  # fmt: skip
        pytest.main(arguments)
        if not verdict.exists():
            raise RuntimeError(f"the suite gave no verdict on mutant {name}: see python -m pytest conformance/ --impl conformance.mutants:{name}")
        told = json.loads(verdict.read_text())
    return judgement(mutant, told["clauses"], time.monotonic() - started)


def judgement(mutant: Mutant, clauses: list[dict[str, Any]], total_seconds: float) -> Judgement:
    broken = [clause["id"] for clause in clauses if not clause["holds"]]
    examples, seconds, case_size = 0, 0.0, 0
    for clause in clauses:
        for test in clause["tests"]:
            record = test["record"] or {}
            if record.get("examples_to_failure"):
                examples += record["examples_to_failure"]
                seconds += record["seconds_to_failure"]
                case_size = record["case_size"]
            else:
                examples += record.get("examples", 0)
                seconds += test["seconds"]
    caught_by = mutant.clause if mutant.clause in broken else (broken or [""])[0]
    return Judgement(mutant.name, mutant.clause, broken, caught_by, examples, seconds, case_size, total_seconds)


def in_child(answer: Connection, name: str, effort: str, device: str, until_caught: bool, seed: int) -> None:
    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    answer.send(judge(name, effort, device, until_caught=until_caught, seed=seed))


def judge_each(names: list[str], workers: int, effort: str, device: str, until_caught: bool, seed: int) -> Iterator[Judgement]:
    """Judgements in the order of `names`, each from a process of its own, so that no mutant leaves anything behind for the next."""
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    waiting = list(names)
    running: dict[Any, tuple[str, Any]] = {}
    done: dict[str, Judgement] = {}
    for name in names:
        while name not in done:
            while waiting and len(running) < workers:
                started = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=in_child, args=(sender, started, effort, device, until_caught, seed))
                process.start()
                sender.close()
                running[receiver] = (started, process)
            for answered in list[Any](wait(list(running))):
                ended, process = running.pop(answered)
                try:
                    done[ended] = answered.recv()
                except EOFError:
                    process.join()
                    if process.exitcode >= 0:  # an exception outside the suite: nothing was judged
                        raise RuntimeError(f"judging mutant {ended} ended with exit status {process.exitcode} and no verdict") from None
                    # the mutant killed its process by a signal, which is a way of being caught
                    done[ended] = Judgement(ended, all_mutants()[ended].clause, ["crash"], "crash", 0, 0.0, 0, 0.0)
                process.join()
        yield done[name]
