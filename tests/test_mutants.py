"""The planted faults are caught: by the quick effort nearly all, by the default one all; some break their clause and no other.

Judging all of them takes some minutes, so a part is judged that turns with the day: every sixth mutant, and two of those that are said to
break their clause alone. WHICHSLOT_MUTANTS=all judges every one; so does `python -m conformance.mutants`.
"""

import json
import os
import subprocess
import sys
from datetime import date

from forked import ROOT, environment

from conformance.mutants import all_mutants
from conformance.mutants.catalogue import Mutant

MUTANTS: dict[str, Mutant] = {name: mutant for name, mutant in all_mutants().items() if not mutant.gpu_only}
ALL = os.environ.get("WHICHSLOT_MUTANTS") == "all"
EVERY = 1 if ALL else 6
DAY = date.today().toordinal()
# said to break one clause alone, and known to break others with it; a mutant that no longer does must leave the list
NOT_ALONE_YET: set[str] = set()


def judge_mutants(names, tmp_path, *options):
    """Their judgements by name, and the exit status."""
    path = tmp_path / "judgements.json"
    done = subprocess.run(
        [sys.executable, "-m", "conformance.mutants", *names, "--workers", "2", "--json", str(path), *options],
        capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=3000 if ALL else 500,
    )  # fmt: skip
    assert path.exists(), done.stdout + done.stderr
    told = {judgement["name"]: judgement for judgement in json.loads(path.read_text())}
    assert list(told) == list(names)
    return told, done.returncode, done.stdout


def test_mutants_are_caught(tmp_path):
    names = list(MUTANTS)[DAY % EVERY :: EVERY]
    told, status, output = judge_mutants(names, tmp_path, "--effort", "quick")
    alive = [name for name, judgement in told.items() if not judgement["broken"]]
    assert len(alive) <= 0.1 * len(names), alive
    assert status == (1 if alive else 0)
    assert output.splitlines()[-1] == f"{len(names) - len(alive)} of {len(names)} caught"
    assert all(judgement["seconds"] <= judgement["total_seconds"] for judgement in told.values())
    if alive:
        told, status, output = judge_mutants(alive, tmp_path, "--effort", "default")
        assert [name for name, judgement in told.items() if not judgement["broken"]] == [], output
        assert status == 0


def test_mutants_that_break_their_clause_alone(tmp_path):
    alone = [name for name, mutant in MUTANTS.items() if mutant.alone]
    names = alone if ALL else [alone[DAY % len(alone)], alone[(DAY + len(alone) // 2) % len(alone)]]
    told, status, output = judge_mutants(names, tmp_path, "--alone", "--effort", "default" if ALL else "quick")
    wrong = {name: judgement["broken"] for name, judgement in told.items() if set(judgement["broken"]) - {MUTANTS[name].clause}}
    assert set(wrong) == NOT_ALONE_YET & set(names), wrong
    exactly = sum(judgement["broken"] == [judgement["clause"]] for judgement in told.values())
    assert output.splitlines()[-1] == f"{exactly} of {len(names)} break their own clause and no other"
    assert status == (0 if exactly == len(names) else 1)


def test_a_mutant_that_is_not_known_gets_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "conformance.mutants", "nosuch"], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=100
    )
    assert done.returncode == 4 and done.stdout == ""
    assert done.stderr.startswith("there is no mutant 'nosuch'; ") and len(done.stderr.splitlines()) == 1
