"""`python -m conformance.replay_trace --impl pkg.kernels --requests 1000`: a real request trace through an implementation, judged as it goes.

Prefix hits, chunked prefill, continuous batching and preemption under a block manager (the implementation's, else the reference's); what is
judged is clause STEP-2, in every step. On a CPU prompts are scaled down, on a GPU they have their full length. Exit status: 0 if all of it
held, 1 if something is wrong (it is told), 4 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from conformance.capabilities import read_dtype
from conformance.cases.requests import TOKENS_PER_HASH, read_requests
from conformance.checks.request_engine import Engine, Tally
from conformance.checks.requests import RequestReplay
from conformance.clauses import CLAUSES
from conformance.findings import Broken, Refused
from conformance.implementation import CannotLoad, load_implementation
from conformance.judge import EFFORTS, Judge
from conformance.verdicts import render_finding


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.replay_trace", description=__doc__)
    parser.add_argument("--impl", default="gpu_impl", help="as in pytest conformance/ --impl")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default: the GPU if there is one)")
    parser.add_argument("--requests", type=int, help="how many of the trace's 1,000 (default: all on a GPU, 200 on a CPU)")
    parser.add_argument("--tokens-per-hash", type=int, help="tokens of a 512-token prompt block (default: 512 on a GPU, one cache block on a CPU)")
    parser.add_argument("--block-size", type=int, help="tokens of a cache block (default 16 on a GPU, 4 on a CPU, or what the implementation takes)")
    parser.add_argument("--pool-tokens", type=int, help="tokens that the cache holds (default: 1,000,000 on a GPU, the longest request's and some)")
    parser.add_argument("--max-batch", type=int, help="requests that run at a time (default 128 on a GPU, 32 on a CPU)")
    parser.add_argument("--chunk", type=int, help="tokens of a prefill step (default 8195 on a GPU, 387 on a CPU)")
    parser.add_argument("--kv-heads", type=int, help="default 8 on a GPU, 1 on a CPU")
    parser.add_argument("--group-size", type=int, help="query heads of a kv head (default 4 on a GPU, 2 on a CPU)")
    parser.add_argument("--head-dim", type=int, help="default 128 on a GPU, 16 on a CPU")
    parser.add_argument("--dtype", help="float16, bfloat16 or float32 (default: bfloat16 on a GPU, else the first that the implementation takes)")
    parser.add_argument("--image-every", type=int, default=200, help="steps between two comparisons of the whole cache (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        torch.set_num_threads(1)
    try:
        implementation = load_implementation(options.impl, device)
        dtypes = implementation.capabilities.dtypes
        preferred = torch.bfloat16 if on_gpu and torch.bfloat16 in dtypes else dtypes[0]
        dtype = preferred if options.dtype is None else read_dtype(options.dtype)
    except (CannotLoad, ValueError) as error:
        print(error, file=sys.stderr)
        return 4
    takes = implementation.capabilities.allowed
    block_size = options.block_size or takes("block_sizes", (16, 64, 256) if on_gpu else (4, 16, 8))[0]
    per_hash = options.tokens_per_hash or (TOKENS_PER_HASH if on_gpu else block_size)
    requests = read_requests(per_hash, options.requests or (1000 if on_gpu else 200))
    longest = max(request.num_tokens + request.num_generated for request in requests)
    pool_tokens = options.pool_tokens or max(1_000_000 if on_gpu else 0, longest + 40 * block_size)
    engine = Engine(
        dtype=dtype,
        block_size=block_size,
        num_blocks=-(-pool_tokens // block_size) + implementation.capabilities.reserved_blocks,
        num_kv_heads=options.kv_heads or (8 if on_gpu else 1),
        group_size=options.group_size or takes("group_sizes", (4, 8, 1) if on_gpu else (2, 1))[0],
        head_dim=options.head_dim or takes("head_dims", (128, 64) if on_gpu else (16, 64))[0],
        max_batch=options.max_batch or (128 if on_gpu else 32),
        chunk=options.chunk or (8195 if on_gpu else 96 * block_size + 3),  # ends inside a block
        rows_judged=2 if on_gpu else 8,
        image_every=options.image_every,
    )
    judge = Judge(implementation, CLAUSES["STEP-2"], "prefill_attention", effort=next(reversed(EFFORTS)), seed=options.seed)
    console = Console(width=150, highlight=False)
    console.print(
        f"{len(requests)} requests, {sum(r.num_tokens for r in requests):,} prompt tokens "
        f"(the longest prompt has {max(r.num_tokens for r in requests):,}), {sum(r.num_generated for r in requests):,} to generate\n"
        f"one layer: {engine.num_kv_heads} kv heads x {engine.group_size} x {engine.head_dim}, {str(dtype).removeprefix('torch.')}; "
        f"pool {engine.num_blocks:,} blocks of {block_size} tokens, {engine.pool_bytes / 2**20:,.0f} MiB; block manager of "
        f"{implementation.name if 'BlockManager' in implementation.offered else 'the reference'}"
    )
    bar = Progress(
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"), console=console,
    )  # fmt: skip
    started = time.monotonic()
    report = ""
    with bar:
        task = bar.add_task("", total=len(requests), now="")

        def finished(tally: Tally) -> None:
            tokens = tally.computed_tokens / (time.monotonic() - started)
            bar.update(task, completed=tally.requests, now=f"{tally.hit_rate:.0%} hits, {tokens:,.0f} tokens/s")

        replay = RequestReplay(judge, engine, per_hash, finished=finished)
        try:
            replay.run(requests)
        except Broken as broken:
            report = render_finding(judge.clause, broken.finding, implementation.name, str(device), judge.function)
        except Refused as refusal:
            report = f"refused: {refusal}"
    seconds, tally = time.monotonic() - started, replay.tally
    if report:
        console.print(report, markup=False)
    console.print(
        f"{tally.requests} of {len(requests)} requests in {seconds:.1f} s: {tally.prefill_steps:,} prefill steps, "
        f"{tally.decode_steps:,} decode steps, {tally.preemptions:,} preemptions\n"
        f"prefix hits {tally.hit_rate:.1%} of {tally.prompt_tokens:,} prompt tokens; {tally.computed_tokens:,} tokens computed, "
        f"{tally.decoded_tokens:,} of them decoded: {tally.computed_tokens / seconds:,.0f} tokens/s with everything that is judged\n"
        f"judged: {tally.rows_judged:,} rows against dense attention (worst error / budget "
        f"{max(judge.record.worst_budget.values(), default=0.0):.2f}), every stored row, {tally.images:,} images of the whole cache; {memory(device)}"
    )
    return 1 if report else 0


def memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"GPU memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB at most on {torch.cuda.get_device_name(device)}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB resident at most"


if __name__ == "__main__":
    sys.exit(main())
