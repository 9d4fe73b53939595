"""KV-6: caches of more than 2^31 elements. Memory of the CPU is committed where it is touched, so no machine is too small.

A kernel that is wrong here dies, or writes far outside the cache: the call is made in a child process, whose death is the finding. On the
CPU the child is forked, which is quick; for CUDA it is a Python of its own.
"""

from __future__ import annotations

import inspect
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.checks import huge_cache
from conformance.checks.huge_cache import HUGE
from conformance.findings import Broken, Refused
from conformance.implementation import REFUSALS, load_implementation, one_line
from conformance.judge import Judge

SECONDS = 60  # a child that takes longer hangs
OVERFLOW = "offsets overflow 32 bits: slot * Hk * D, or block * stride, is computed in int32"


@dataclass(frozen=True)
class HugeStoreCase:
    index_dtype: torch.dtype
    block_size: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.float16
    function: str = "store_kvcache"
    longest: int = 10**9  # tokens of a sequence

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_blocks(self) -> int:
        return -(-HUGE // (self.block_size * self.width)) + 3

    @property
    def slots(self) -> list[int]:
        """The first and the last slot, and those just under, at and over the one whose element offset is 2^31; then where a skip lies."""
        edge, last = -(-HUGE // self.width), self.num_blocks * self.block_size - 1
        slots = [edge, edge - 1, last, -1, edge + 1, 0, edge + self.block_size + 1, edge - self.block_size, 5]
        return list(dict.fromkeys(slots))  # some are the same one where a block is a single slot

    def headline(self, implementation: str, device: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"Hk {self.num_kv_heads} · D {self.head_dim}"
        return f"{implementation}.{self.function}   {dtype} · S {self.block_size} · {heads} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        elements = self.num_blocks * self.block_size * self.width
        if self.function == "store_kvcache":
            asked = [("slot_mapping", f"{self.slots} {str(self.index_dtype).removeprefix('torch.')}")]
        else:
            tables, lens = huge_cache.tables_and_lens(self.shape, self.longest)
            asked = [("block_tables", str(tables)), ("keys of each sequence", str(lens))]
        return [
            *asked,
            ("caches", f"{self.num_blocks} blocks = {elements} elements each, 2^31 = {HUGE}"),
            ("so that", f"slot {-(-HUGE // self.width)} begins at element {-(-HUGE // self.width) * self.width}"),
        ]

    def size(self) -> int:
        return len(self.slots)


def huge_case(judge: Judge, index_dtype: torch.dtype) -> HugeStoreCase:
    """Rows of 1,024 elements or so, in a dtype, a block size and a head dimension that the implementation takes."""
    takes = judge.capabilities
    head_dim = takes.allowed("head_dims", (128, 64))[0]
    return HugeStoreCase(
        index_dtype,
        block_size=takes.allowed("block_sizes", (16, 64, 256))[0],
        num_kv_heads=max(1, 1024 // head_dim),
        head_dim=head_dim,
        dtype=next((dtype for dtype in takes.dtypes if dtype.itemsize == 2), takes.dtypes[0]),
        function=judge.function,
        longest=takes.max_context or HugeStoreCase.longest,
    )


def check_huge_cache(judge: Judge, case: HugeStoreCase) -> None:
    dtype, index_dtype = (str(t).removeprefix("torch.") for t in (case.dtype, case.index_dtype))
    require_holds(judge, "store_kvcache", "store_and_look", (case.shape, dtype, case.slots, index_dtype, str(judge.device)))


def check_huge_pool(judge: Judge, case: HugeStoreCase) -> None:
    """The read side: attention over blocks at the top of such a pool (judge.function says which)."""
    group_size = judge.capabilities.allowed("group_sizes", (2,))[0]
    dtype = str(case.dtype).removeprefix("torch.")
    arguments = judge.function == "decode_attention", case.shape, dtype, group_size, case.longest, str(judge.device)
    require_holds(judge, judge.function, "attend_and_look", arguments)


def require_holds(judge: Judge, function: str, look: str, arguments: tuple[Any, ...]) -> None:
    """Make the call in a child, and tell its end."""
    if judge.is_cuda:
        outcome, told = in_a_python(judge, function, look, arguments)
    else:
        outcome, told = in_a_fork(lambda: outcome_of(judge.implementation.offered[function], look, arguments))
    if outcome == "refused":
        raise Refused(told)
    if outcome == "memory":
        raise MemoryError(told)
    if outcome != "holds":
        label, text = {
            "wrong": ("found", told),
            "raised": ("raised", told),
            "killed": ("the process died", f"with {told}, in a call whose slots and blocks all lie in the caches"),
            "hung": ("the process hung", f"and was ended after {SECONDS} s"),
        }[outcome]
        broken = Broken((label, text), likely=OVERFLOW if outcome in ("wrong", "killed") else "")
        broken.finding.script = script(function, look, arguments)
        raise broken


def script(function: str, look: str, arguments: tuple[Any, ...]) -> str:
    """The body of a replay: the very code that the child ran."""
    source = inspect.getsource(huge_cache)
    return "\n".join([
        source[source.index("import torch") :], "",
        f"found = {look}(load(SPEC).{function}, *{arguments!r})",
        "print(found or 'right: every slot that was looked at holds what it must')",
        "if found:", f"    print(f'wrong: {{SPEC}}.{function} gives another result than the contract')",
        "sys.exit(1 if found else 0)", "",
    ])  # fmt: skip


def outcome_of(function: Callable[..., Any], look: str, arguments: tuple[Any, ...]) -> tuple[str, str]:
    """(outcome, what there is to tell), in the child."""
    try:
        found = getattr(huge_cache, look)(function, *arguments)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return "memory", one_line(error)
    except REFUSALS as error:
        return "refused", one_line(error)
    except Exception as error:  # whatever an implementation raises is a finding about it
        return "raised", one_line(error)
    return ("wrong", found) if found else ("holds", "")


def in_a_fork(work: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """What `work` returns in a fork of this process, or how the fork ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.alarm(0)
            for number in (signal.SIGSEGV, signal.SIGBUS):
                signal.signal(number, signal.SIG_DFL)  # pytest's faulthandler would print a screen of frames
            os.write(writer, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writer)
    told, ends, status = b"", time.monotonic() + SECONDS, 0
    try:
        while select.select([reader], [], [], max(0.0, ends - time.monotonic()))[0]:
            part = os.read(reader, 65536)
            told += part
            if not part:
                break
        else:
            return "hung", ""
        _, status = os.waitpid(child, 0)
        child = 0
    finally:
        os.close(reader)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return killed(os.WTERMSIG(status))
    return pickle.loads(told) if told else ("killed", "no word")


def killed(number: int) -> tuple[str, str]:
    """SIGKILL is how Linux ends a process for which there is no memory."""
    name = signal.Signals(number).name
    if name == "SIGKILL":
        return "memory", f"the process that held two caches of more than 2^31 elements ended with {name}"
    return "killed", name


def in_a_python(judge: Judge, function: str, look: str, arguments: tuple[Any, ...]) -> tuple[str, str]:
    """The same in a process that has its own CUDA context: what a wild write leaves behind dies with it."""
    command = [sys.executable, "-m", "conformance.checks.large_offsets", judge.implementation.name, function, look, repr(arguments)]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        ran = subprocess.run(command, capture_output=True, timeout=SECONDS, env={**os.environ, "PYTHONPATH": path})
    except subprocess.TimeoutExpired:
        return "hung", ""
    if ran.returncode < 0:
        return killed(-ran.returncode)
    try:
        outcome, told = pickle.loads(ran.stdout[ran.stdout.index(b"\x80") :])
    except (ValueError, pickle.UnpicklingError, EOFError):
        told_last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {ran.returncode}"]
        return "raised", told_last[0]
    return outcome, told


if __name__ == "__main__":
    import ast

    spec, function, look, stated = *sys.argv[1:4], ast.literal_eval(sys.argv[4])
    loaded = load_implementation(spec, torch.device(stated[-1]))
    sys.stdout.buffer.write(pickle.dumps(outcome_of(loaded.offered[function], look, stated)))
