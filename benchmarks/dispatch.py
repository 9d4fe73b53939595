"""`python -m benchmarks.dispatch --write`: who is the fastest at attention, shape by shape, for `gpu_impl/dispatch_table.json`. Needs a GPU.

First the suite judges every FlashAttention that is installed on the path that gpu_impl would call, with gpu_impl's claims: what breaks one is not
timed. Then the grid: judged correct, timed as the benchmarks time, a line an entry. Shapes of a table that was written on the same GPU with
the same libraries are kept unless they are timed again, so that a grid may be done in parts: `--functions decode_attention --models phi_2`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import trace
from benchmarks.attention_calls import Inputs, inputs_of
from benchmarks.cases import LLAMA_1B, LLAMA_8B, PHI_2, AttentionCase, Model, real_attention, real_batch
from benchmarks.contenders import ON_GPU, why_not_usable
from benchmarks.machine import device_name, gpu_state, library_versions
from benchmarks.timing import time_on_device
from conformance.implementation import one_line
from conformance.verdicts import BAD
from gpu_impl import attention, flash_paths
from gpu_impl.dispatch import line_of
from gpu_impl.dispatch_table import OWN, TABLE, Entry, Heads, Shape, Table, decode_shape, heads_of, prefill_shape, read_table, write_table

FUNCTIONS = ("decode_attention", "prefill_attention")
MODELS = {"llama_8b": LLAMA_8B, "llama_1b": LLAMA_1B, "phi_2": PHI_2}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PAGES = (16, 64, 256)
DECODES = [(b, n) for b in (1, 8, 64, 256) for n in (512, 2048, 8192, 32768)]  # sequences, tokens of each
PREFILLS = ((1, 8192, 0), (4, 8192, 0), (16, 2048, 0), (64, 512, 0), (16, 512, 7680), (4, 64, 960))  # sequences, queries, cached
MOST_CACHE_BYTES = 10 * 2**30
MOST_NAMED = 6
KEEPS, NAN_TAIL, EMPTY_ZERO = "keeps the claims", "CLAIM-1", "CLAIM-2"
VERDICTS = Path(".whichslot/dispatch")


def grid(function: str, model: Model, pages: Iterable[int], dtype: torch.dtype) -> Iterator[AttentionCase]:
    for block_size in pages:
        if function == "decode_attention":
            cases = [real_attention(b, 1, n - 1, block_size, model) for b, n in DECODES]
            cases.append(real_batch("trace-64", trace.decoding(64), block_size, model))
        else:
            cases = [real_attention(b, q_len, cached, block_size, model) for b, q_len, cached in PREFILLS]
            cases.append(real_batch("trace-chunks-16", trace.prefilling(16, 2048), block_size, model))
            cases.append(real_batch("trace-mixed-4+60", trace.mixed(4, 2048, 60), block_size, model))
        yield from (case._replace(dtype=dtype) for case in cases if cache_bytes(case) <= MOST_CACHE_BYTES)
    if function == "prefill_attention":
        yield from (real_attention(b, q_len, 0, None, model)._replace(dtype=dtype) for b, q_len, cached in PREFILLS if not cached)


def cache_bytes(case: AttentionCase) -> int:
    return 2 * sum(case.k_lens) * case.model.kv_heads * case.model.head_dim * case.dtype.itemsize


def broken_by(clauses: Iterable[Mapping[str, Any]], function: str) -> list[str]:
    """Ids of the clauses in a verdict file that a function breaks; both functions answer for a test that has neither's name."""
    others = "prefill" if function == "decode_attention" else "decode"
    broken = []
    for clause in clauses:
        bad = [test["nodeid"] for test in clause["tests"] if test["verdict"] in BAD]
        if any(others not in nodeid for nodeid in bad) or (clause["verdict"] in BAD and not bad):
            broken.append(clause["id"])
    return broken


def judge_path(name: str, effort: str, reuse: bool) -> list[dict[str, Any]]:
    """Every clause of the suite on one path, with its tests and their verdicts."""
    told = VERDICTS / f"{name}.json"
    if not (reuse and told.exists()):
        told.parent.mkdir(parents=True, exist_ok=True)
        told.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "conformance/", "-q", "-p", "no:benchmark", "--impl", f"gpu_impl.flash_paths:{name}"]
        run = subprocess.run([*command, "--effort", effort, "--verdict-json", str(told)], capture_output=True, text=True)
        if not told.exists():
            raise SystemExit(f"{name} could not be judged:\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    return json.loads(told.read_text())["clauses"]


def judged_paths(effort: str, reuse: bool) -> dict[str, dict[str, str]]:
    """function -> path -> KEEPS, or the clauses that it breaks. Where a library only leaves empty rows as they are, its zeroed path is judged."""
    judged: dict[str, dict[str, str]] = {function: {} for function in FUNCTIONS}
    for library in flash_paths.library_versions():
        if reason := why_not_usable(flash_paths.PATHS[library]):
            for function in FUNCTIONS:
                judged[function][library] = f"is not usable: {reason}"
            continue
        clauses = judge_path(library, effort, reuse)
        for function in FUNCTIONS:
            broken = broken_by(clauses, function)
            judged[function][library] = verdict(broken)
            if broken == [EMPTY_ZERO]:
                judged[function][f"{library}_zeroed"] = verdict(broken_by(judge_path(f"{library}_zeroed", effort, reuse), function))
    return judged


def verdict(broken: list[str]) -> str:
    more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
    return f"breaks {', '.join(broken[:MOST_NAMED])}{more}" if broken else KEEPS


def admitted(judged: Mapping[str, str], cached: bool = True) -> dict[str, Any]:
    """Who is timed: the own kernel, and the paths that keep the claims. Where there is no cache, no slot was never written."""
    kept = (KEEPS,) if cached else (KEEPS, verdict([NAN_TAIL]))
    return {OWN: attention, **{name: flash_paths.PATHS[name] for name, told in judged.items() if told in kept}}


def time_entry(inputs: Inputs, contenders: Mapping[str, Any]) -> Entry:
    us = {}
    for name, functions in contenders.items():
        try:
            out = inputs.call(functions)
            inputs.judge(out, name)
            if name == OWN or inputs.function == "decode_attention" or heads_stand_alone(inputs, functions, out):
                us[name] = round(time_on_device(inputs.calls(functions)).us, 2)
        except Exception as error:  # whatever a library raises; a wrong result too keeps it out of the table
            if name == OWN:
                raise
            if not isinstance(error, NotImplementedError):
                print(f"{inputs.function} {inputs.case.name}: {name} left out, {one_line(error)}", flush=True)
    return Entry(*key_of(inputs), us)


def heads_stand_alone(inputs: Inputs, functions: Any, out: torch.Tensor) -> bool:
    """Half of the kv heads give the same bits as all of them: ranks that share the heads agree with one that has them all."""
    q, k, v = inputs.qkv
    half, half_q = k.shape[-2] // 2, q.shape[-2] // 2
    parts = [
        inputs.call(functions, (q[:, rows], k[..., heads, :], v[..., heads, :]))
        for rows, heads in ((slice(0, half_q), slice(0, half)), (slice(half_q, None), slice(half, None)))
    ]
    return torch.equal(torch.cat(parts, dim=1), out)


def key_of(inputs: Inputs) -> tuple[Heads, Shape]:
    q, k, _ = inputs.qkv
    heads, metadata = heads_of(inputs.function, q, k, inputs.case.block_size), inputs.metadata
    if inputs.function == "decode_attention":
        return heads, decode_shape(q, k, metadata["block_tables"])
    return heads, prefill_shape(q, k, inputs.case.num_sequences, metadata["max_seqlen_q"], metadata["max_seqlen_k"])


def merged(before: Table, now: Table) -> Table:
    """What was timed now, and from before the shapes that were not, if they are figures of the same GPU and libraries."""
    if (before.gpu, before.about, before.libraries) != (now.gpu, now.about, now.libraries):
        return now
    entries = {entry[:2]: entry for entry in (*before.entries, *now.entries)}
    return now._replace(judged={**before.judged, **now.judged}, entries=tuple(entries.values()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into gpu_impl/{TABLE.name}; without it the table is only printed")
    parser.add_argument("--functions", nargs="+", default=FUNCTIONS, choices=FUNCTIONS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--pages", nargs="+", type=int, default=PAGES)
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=DTYPES)
    parser.add_argument("--effort", default="quick", help="of the judgement of the claims")
    parser.add_argument("--reuse-verdicts", action="store_true", help=f"of an earlier call, in {VERDICTS}")
    options = parser.parse_args()
    if not ON_GPU:
        print("the dispatch table is written on a GPU, there is none here", file=sys.stderr)
        return 4
    judged = judged_paths(options.effort, options.reuse_verdicts)
    for function, paths in judged.items():
        print(*(f"{function}: {name} {told}" for name, told in paths.items()), sep="\n", flush=True)
    libraries = library_versions()
    about = {name: told for name, told in {**gpu_state(), **libraries}.items() if name in ("driver", "torch", "triton", "cuda")}
    table = Table(device_name(), datetime.date.today().isoformat(), about, flash_paths.library_versions(), judged, ())
    for function in options.functions:
        for name in options.models:
            for dtype in options.dtypes:
                entries = list(table.entries)
                for case in grid(function, MODELS[name], options.pages, DTYPES[dtype]):
                    contenders = admitted(judged[function], cached=case.block_size is not None)
                    entries.append(time_entry(inputs_of(function, case), contenders))
                    print(f"{function} {case.name}: {line_of(entries[-1], '')}", flush=True)
                table = table._replace(entries=tuple(entries))
                if options.write:  # as it goes, for a machine that is lent for a while
                    write_table(merged(read_table(), table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
