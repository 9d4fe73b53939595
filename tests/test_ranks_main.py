"""`python -m conformance.ranks_main --ranks 2`, over gloo: it judges, and a rank that fails, hangs or dies ends it with a sentence."""

import subprocess
import sys
import time

from forked import ROOT, environment

LIMIT_SECONDS = 60  # within which a check ends, whatever a rank does


def run_ranks(implementation, *arguments):
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "conformance.ranks_main", "--ranks", "2", "--impl", implementation, *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=3 * LIMIT_SECONDS,
    )  # fmt: skip
    return done, time.monotonic() - started


def test_gpu_impl_holds_on_two_ranks():
    done, _ = run_ranks("gpu_impl", "--parallel-sample", "gpu_impl.sharded:parallel_sample", "--draws", "500")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *verdicts = done.stdout.splitlines()
    assert first == "gpu_impl on 2 ranks over gloo"
    assert [line.split("   ")[0:2] for line in verdicts] == [
        ["pass", "LOGIT-4"], ["pass", "LOGIT-5"], ["pass", "head-parallel attention"], ["pass", "sharded sampling"]
    ]  # fmt: skip


def test_heads_that_are_not_alone_with_themselves_are_told():
    done, _ = run_ranks("tests/misbehaving/ranks.py:heads")
    assert done.returncode == 1 and "fail   head-parallel attention" in done.stdout, done.stdout + done.stderr
    assert "on rank 0, which holds 2 kv heads, and" in done.stdout and "where one device holds all 4" in done.stdout


def test_a_rank_that_fails_is_a_verdict():
    done, seconds = run_ranks("tests/misbehaving/ranks.py:failing", "--wait-seconds", "8")
    assert done.returncode == 1 and seconds < LIMIT_SECONDS
    assert "rank 1 of 2: case 1 of LOGIT-4 raised RuntimeError: no workspace left" in done.stderr


def test_a_rank_that_is_killed_ends_the_check():
    done, seconds = run_ranks("tests/misbehaving/ranks.py:killed")
    assert done.returncode == 1 and seconds < LIMIT_SECONDS
    assert "rank 1 of 2 was killed by signal 9, and the check with it: there is no verdict" in done.stderr


def test_a_rank_that_hangs_ends_the_check():
    done, seconds = run_ranks("tests/misbehaving/ranks.py:hanging", "--wait-seconds", "8")
    assert done.returncode == 1 and seconds < LIMIT_SECONDS
    assert "case 1 of LOGIT-4 has not come back within 8 s: a rank does not reach the collective, or runs for ever" in done.stderr


def test_without_torchrun_it_says_how_to_start():
    done = subprocess.run(
        [sys.executable, "-m", "conformance.ranks_main"], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=LIMIT_SECONDS
    )
    assert done.returncode == 4 and "--nproc-per-node 2" in done.stderr and len(done.stderr.splitlines()) == 1
