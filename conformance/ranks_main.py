"""`torchrun --nproc-per-node 2 -m conformance.ranks_main --impl gpu_impl`: LOGIT-4 and LOGIT-5 on ranks that torchrun started.

The same cases and the same judgement as in the suite, over NCCL where every rank has a GPU, else over gloo. With `--parallel-sample
pkg.module:function` sharded sampling is held to the unsharded race too. Rank 0 prints; the exit status is 0 if all holds, else 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.cases.logits import parallel_cases, uneven_cases
from conformance.checks.logits import parallel
from conformance.checks.ranks import Answer, Given, answered, plain, rebuilt
from conformance.checks.sharded import judge_sharded
from conformance.clauses import CLAUSES
from conformance.findings import Broken
from conformance.implementation import CannotLoad, Implementation, load_implementation
from conformance.judge import Judge
from conformance.verdicts import render_finding

WAIT_SECONDS = 60.0


class TorchrunRanks:
    """Stands where `Ranks` does, inside every rank: each calls, and all know every answer."""

    def __init__(self, implementation: Implementation, talk: Any) -> None:
        self.implementation = implementation
        self.talk = talk  # a gloo group of all ranks, beside the one that is judged
        self.world_size = dist.get_world_size()

    def run(self, ranks: tuple[int, ...] | None, given: dict[int, Given]) -> dict[int, Answer]:
        group = None if ranks is None else dist.new_group(list(ranks))
        own = given.get(dist.get_rank())
        told = ("none", "", None, "") if own is None else answered(self.implementation, self.implementation.device, group, plain(own))
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, told, group=self.talk)
        answers = {}
        for rank, (kind, text, tensor, changed) in enumerate(every):
            answers[rank] = Answer(kind, text, None if tensor is None else rebuilt(*tensor), changed)
        return answers


def judge_logits(implementation: Implementation, ranks: TorchrunRanks) -> list[tuple[str, str]]:
    """(clause, "" or what is wrong), the same on every rank."""
    world_size = ranks.world_size
    dtype = torch.float32 if torch.float32 in implementation.capabilities.dtypes else implementation.capabilities.dtypes[0]
    takes_group = implementation.takes("parallel_logits", "group")
    verdicts = []
    for clause, cases in (("LOGIT-4", parallel_cases(world_size, dtype)), ("LOGIT-5", uneven_cases(world_size, dtype))):
        judge, text = Judge(implementation, CLAUSES[clause], "parallel_logits"), ""
        try:
            judge.for_each([case for case in cases if case.ranks is None or takes_group], functools.partial(parallel, judge, ranks))
        except Broken as broken:
            text = render_finding(CLAUSES[clause], broken.finding, implementation.name, str(implementation.device), "parallel_logits")
        refused = sum(judge.record.refusals.values())
        verdicts.append((f"{clause}   {judge.record.examples} cases, {refused} refused", text))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(prog="torchrun -m conformance.ranks_main", description=__doc__)
    parser.add_argument("--impl", default="gpu_impl", help="what is judged, as in pytest conformance/ --impl")
    parser.add_argument("--parallel-sample", metavar="PKG.MODULE:FUNCTION", help="sharded sampling, judged too")
    parser.add_argument("--draws", type=int, default=4_000, help="tokens drawn from each law of sharded sampling (default 4000)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print("this is started by torchrun: torchrun --nproc-per-node 2 -m conformance.ranks_main", file=sys.stderr)
        return 4
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
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
        print(error, file=sys.stderr)
        return 4
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=WAIT_SECONDS))
    talk = dist.new_group(backend="gloo") if on_gpus else None
    verdicts = judge_logits(implementation, TorchrunRanks(implementation, talk)) if "parallel_logits" in implementation.offered else []
    if options.parallel_sample:
        module, _, function = options.parallel_sample.partition(":")
        findings = judge_sharded(getattr(importlib.import_module(module), function), device, draws=options.draws)
        verdicts.append((f"sharded sampling   {options.parallel_sample}", "\n".join(findings)))
    if dist.get_rank() == 0:
        print(f"{implementation.name} on {dist.get_world_size()} ranks over {dist.get_backend()}")
        for what, text in verdicts:
            print(f"{'fail' if text else 'pass'}   {what}" + (f"\n{text}" if text else ""))
    dist.destroy_process_group()
    return 1 if any(text for _, text in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
