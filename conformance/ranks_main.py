"""`torchrun --nproc-per-node 2 -m conformance.ranks_main --impl gpu_impl`: what several ranks hold together, judged on ranks of torchrun's.

LOGIT-4 and LOGIT-5 with the same cases and the same judgement as in the suite, in each dtype, and head-parallel attention: over NCCL where
every rank has a GPU, else over gloo. With `--parallel-sample pkg.module:function` sharded sampling is held to the unsharded race too.
Rank 0 prints; the exit status is 0 if all holds, else 1. `python -m conformance.ranks_main --ranks 2` starts torchrun itself, and adds a
sentence if the ranks end without a verdict. A rank that a case keeps waiting for too long ends the check.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from conformance.cases.logits import LogitsCase, parallel_cases, uneven_cases
from conformance.checks.head_parallel import head_parallel, judged_cases
from conformance.checks.logits import parallel
from conformance.checks.ranks import Answer, Given, answered, plain, rebuilt
from conformance.checks.sharded import judge_sharded
from conformance.clauses import CLAUSES
from conformance.findings import Broken, Refused
from conformance.implementation import CannotLoad, Implementation, load_implementation
from conformance.judge import Judge
from conformance.verdicts import render_finding

WAIT_SECONDS = 30.0  # for one case; the first one also starts NCCL, and compiles
VERDICT = re.compile(r"^(pass|fail)   ", re.MULTILINE)
ENDED = re.compile(r"rank\s*:\s*(\d+) .*?exitcode\s*:\s*(-?\d+)", re.DOTALL)  # in torchrun's report
SENTENCE = re.compile(r"rank \d+ of \d+: |\[rank\d+\]: [\w.]*(Error|Exception)\b")  # of ours, or what an exception came to


class Watch:
    """Ends this rank, with a sentence, once a case has taken too long: it waits for a rank that will not come."""

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self.what, self.since = "starting", time.monotonic()
        threading.Thread(target=self.look, daemon=True).start()

    def at(self, what: str) -> None:
        self.what, self.since = what, time.monotonic()

    def what_rank(self) -> str:
        return f"rank {self.rank} of {self.size}: {self.what}"

    def look(self) -> None:
        while time.monotonic() - self.since < self.seconds:
            time.sleep(0.5)
        sys.stderr.write(
            f"{self.what_rank()} has not come back within {self.seconds:g} s: a rank does not reach the collective, or runs for ever\n"
        )
        sys.stderr.flush()
        os._exit(1)


class TorchrunRanks:
    """Stands where `Ranks` does, inside every rank: each calls, and all know every answer.

    Answers go through the store of the rendezvous, which works where a collective of the implementation's own is stuck.
    """

    def __init__(self, implementation: Implementation, watch: Watch) -> None:
        self.implementation = implementation
        self.watch = watch
        self.world_size = dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store()
        self.round = 0

    def run(self, ranks: tuple[int, ...] | None, given: dict[int, Given]) -> dict[int, Answer]:
        group = None if ranks is None else dist.new_group(list(ranks))
        own = given.get(dist.get_rank())
        told = ("none", "", None, "") if own is None else answered(self.implementation, self.implementation.device, group, plain(own))
        if told[0] == "raised":
            sys.stderr.write(f"{self.watch.what_rank()} raised {told[1]}\n")
        self.round += 1
        self.store.set(f"answer {self.round} of {dist.get_rank()}", base64.b64encode(pickle.dumps(told)).decode())
        answers = {}
        for rank in range(self.world_size):
            kind, text, tensor, changed = pickle.loads(base64.b64decode(self.store.get(f"answer {self.round} of {rank}")))
            answers[rank] = Answer(kind, text, None if tensor is None else rebuilt(*tensor), changed)
        return answers


Verdict = tuple[str, str]  # what was judged; "" or what is wrong


def judge_logits(implementation: Implementation, ranks: TorchrunRanks, watch: Watch) -> list[Verdict]:
    """The same on every rank."""
    takes_group = implementation.takes("parallel_logits", "group")
    verdicts = []
    clauses: tuple[tuple[str, Callable[[int, torch.dtype], list[LogitsCase]]], ...] = (("LOGIT-4", parallel_cases), ("LOGIT-5", uneven_cases))
    for clause, cases_of in clauses:
        judge, text = Judge(implementation, CLAUSES[clause], "parallel_logits"), ""

        def judged(case: LogitsCase, judge: Judge = judge, clause: str = clause) -> None:
            watch.at(f"case {judge.record.examples} of {clause}")
            parallel(judge, ranks, case)

        cases = [case for dtype in implementation.capabilities.dtypes for case in cases_of(ranks.world_size, dtype)]
        try:
            judge.for_each([case for case in cases if case.ranks is None or takes_group], judged)
        except Broken as broken:
            text = render_finding(CLAUSES[clause], broken.finding, implementation.name, str(implementation.device), "parallel_logits")
        refused = sum(judge.record.refusals.values())
        verdicts.append((f"{clause}   {judge.record.examples} cases, {refused} refused", text))
    return verdicts


def judge_heads(implementation: Implementation, watch: Watch) -> list[Verdict]:
    count, refused, told = 0, 0, ""
    for case in judged_cases(implementation, dist.get_world_size()):
        count += 1
        watch.at(f"case {count} of head-parallel attention")
        try:
            told = told or head_parallel(implementation, case)
        except Refused:
            refused += 1
        except Broken as broken:
            told = told or str(broken)
    return [(f"head-parallel attention   {count} cases, {refused} refused", told)] if count else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.ranks_main", description=__doc__)
    parser.add_argument("--impl", default="gpu_impl", help="what is judged, as in pytest conformance/ --impl")
    parser.add_argument("--parallel-sample", metavar="PKG.MODULE:FUNCTION", help="sharded sampling, judged too")
    parser.add_argument("--draws", type=int, default=4_000, help="tokens drawn from each law of sharded sampling (default 4000)")
    parser.add_argument("--wait-seconds", type=float, default=WAIT_SECONDS, help="for one case (default 30)")
    parser.add_argument("--ranks", type=int, help="start torchrun with this many ranks")
    options = parser.parse_args()
    if "RANK" in os.environ:
        return judge_as_rank(options)
    if options.ranks is None:
        print("this is started by torchrun: torchrun --nproc-per-node 2 -m conformance.ranks_main, or with --ranks 2", file=sys.stderr)
        return 4
    return start(options.ranks, sys.argv[1:])


def start(num_ranks: int, arguments: list[str]) -> int:
    """torchrun in a process of its own. Its report of a rank that ended comes to one sentence."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "--monitor-interval", "1"]
    ended = subprocess.run([*command, "-m", "conformance.ranks_main", *arguments], capture_output=True, text=True, check=False)
    print(ended.stdout, end="")
    if ended.returncode and not VERDICT.search(ended.stdout):
        sentences = [line for line in ended.stderr.splitlines() if SENTENCE.match(line)]
        ends = [(int(rank), int(status)) for rank, status in ENDED.findall(ended.stderr)]
        if ends:  # a signal that torchrun does not send, or that no broken connection brings about, comes first
            rank, status = min(ends, key=lambda end: (end[1] >= 0 or -end[1] in (signal.SIGTERM, signal.SIGABRT), end[0]))
            how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
            sentences.append(f"rank {rank} of {num_ranks} {how}, and the check with it: there is no verdict")
        print("\n".join(sentences) or ended.stderr[-2000:], file=sys.stderr)
    return 1 if ended.returncode else 0


def judge_as_rank(options: argparse.Namespace) -> int:
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    watch = Watch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.wait_seconds)
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        torch.set_num_threads(1)
    try:
        implementation = load_implementation(options.impl, device)
    except CannotLoad as error:
        print(f"rank {watch.rank} of {watch.size}: {error}", file=sys.stderr)
        return 4
    watch.at("joining the group")
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=2 * options.wait_seconds))
    verdicts: list[Verdict] = []
    if "parallel_logits" in implementation.offered:
        verdicts += judge_logits(implementation, TorchrunRanks(implementation, watch), watch)
    verdicts += judge_heads(implementation, watch)
    if options.parallel_sample:
        module, _, function = options.parallel_sample.partition(":")
        sampler = getattr(importlib.import_module(module), function)
        findings = judge_sharded(sampler, device, draws=options.draws, tell=watch.at)
        verdicts.append((f"sharded sampling   {options.parallel_sample}", "\n".join(findings)))
    watch.at("ending")
    if dist.get_rank() == 0:
        print(f"{implementation.name} on {dist.get_world_size()} ranks over {dist.get_backend()}")
        for what, text in verdicts:
            print(f"{'fail' if text else 'pass'}   {what}" + (f"\n{text}" if text else ""))
        sys.stdout.flush()
    dist.destroy_process_group()
    return 1 if any(text for _, text in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
