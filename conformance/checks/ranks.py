"""parallel_logits on real processes: the ranks of one world are started once, and every case is sent to all of them.

A rank that does not answer in time is a finding and never a hang: its process is ended. On the CPU the processes are forked, so that they
need not import torch again; where CUDA is in use they are spawned, and load the implementation by its name.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from conformance.findings import Broken, Refused
from conformance.implementation import Implementation, load_implementation

START_SECONDS = 60.0  # for all ranks to find each other
ANSWER_SECONDS = 20.0  # for one case
GRACE_SECONDS = 5.0  # for the other ranks, once one has raised
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # hidden, weight_shard, cu_seqlens_q


@dataclass
class Answer:
    """What one rank gave."""

    kind: str  # tensor, none, other, refused, raised, silent
    text: str = ""
    tensor: torch.Tensor | None = None
    changed: str = ""  # the name of an input that was written

    def told(self) -> str:
        if self.kind == "tensor":
            assert self.tensor is not None
            return f"returned a tensor of shape {tuple(self.tensor.shape)}"
        verbs = {"none": "returned None", "other": "returned", "silent": "did not come back: it waits for the others, or runs for ever"}
        return f"{verbs.get(self.kind, 'raised')} {self.text}".rstrip()


class World(Protocol):
    """What LOGIT-4 and LOGIT-5 are judged on: processes that were started here, or by torchrun."""

    world_size: int

    def run(self, ranks: tuple[int, ...] | None, given: dict[int, Given]) -> dict[int, Answer]: ...


class Ranks:
    """A world of `world_size` processes, alive between enter and exit."""

    def __init__(self, implementation: Implementation, world_size: int) -> None:
        self.implementation = implementation
        self.world_size = world_size
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        # a forked process cannot use CUDA if this one does, or would: the implementation lies on a GPU here
        spawned = self.implementation.device.type == "cuda" or (torch.cuda.is_available() and torch.cuda.is_initialized())
        on_gpus = self.implementation.device.type == "cuda" and torch.cuda.device_count() >= self.world_size
        context: Any = mp.get_context("spawn" if spawned else "fork")
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self.folder.name) / "store")
        loaded = self.implementation.name if spawned else self.implementation
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(rank, self.world_size, store, on_gpus, loaded, theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
            for rank, answer in self._receive(START_SECONDS).items():
                if answer.kind != "none":
                    raise RuntimeError(f"rank {rank} of {self.world_size} did not start: {answer.text or answer.kind}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def run(self, ranks: tuple[int, ...] | None, given: dict[int, Given]) -> dict[int, Answer]:
        """One case: every process of the world makes the group, its members call the implementation. A silent rank ends the world."""
        if not self.processes:
            raise RuntimeError("the ranks were ended after an earlier case")
        for rank, pipe in enumerate(self.pipes):
            pipe.send((ranks, plain(given.get(rank))))
        answers = self._receive(ANSWER_SECONDS)
        if any(answer.kind == "silent" for answer in answers.values()):
            self._end()
        return answers

    def _receive(self, seconds: float) -> dict[int, Answer]:
        """One answer of every rank. Once a rank has raised, the others get little more time: they are likely to wait for it."""
        deadline = time.monotonic() + seconds
        answers: dict[int, Answer] = {}
        while len(answers) < self.world_size and time.monotonic() < deadline:
            open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            for ready in wait(list(open_pipes), deadline - time.monotonic()):
                rank = open_pipes[ready]  # type: ignore[index]  # wait gives back what it was given
                try:
                    kind, text, tensor, changed = self.pipes[rank].recv()
                    answers[rank] = Answer(kind, text, None if tensor is None else rebuilt(*tensor), changed)
                except (EOFError, ConnectionError):
                    answers[rank] = Answer("raised", "the process died")
                if answers[rank].kind in ("refused", "raised"):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return {rank: answers.get(rank, Answer("silent")) for rank in range(self.world_size)}

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(5)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        self.folder.cleanup()


def plain(given: Given | None) -> Any:
    """Tensors as bytes: what torch would send instead are handles of shared memory."""
    return None if given is None else tuple(None if tensor is None else flattened(tensor) for tensor in given)


def flattened(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.dtype, tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def rebuilt(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


# --- in the child -----------------------------------------------------------------------------------------------------------------------


def serve(rank: int, world_size: int, store: str, on_gpus: bool, loaded: str | Implementation, pipe: Connection) -> None:
    """Join the world, then answer one case after the other until the pipe is closed."""
    try:
        torch.set_num_threads(1)
        device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
        if on_gpus:
            torch.cuda.set_device(device)
        if not on_gpus and "GLOO_SOCKET_IFNAME" not in os.environ and "lo" in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        implementation = load_implementation(loaded, device) if isinstance(loaded, str) else loaded
        dist.init_process_group(
            "nccl" if on_gpus else "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=START_SECONDS),
        )  # fmt: skip
        pipe.send(("none", "", None, ""))
    except BaseException as error:
        pipe.send(("raised", f"{type(error).__name__}: {error}", None, ""))
        return
    while True:
        try:
            ranks, given = pipe.recv()
        except (EOFError, ConnectionError):
            return
        group = None if ranks is None else dist.new_group(list(ranks))
        pipe.send(("none", "", None, "") if given is None else answered(implementation, device, group, given))


def answered(implementation: Implementation, device: torch.device, group: Any, given: Any) -> tuple[str, str, Any, str]:
    tensors = [None if tensor is None else rebuilt(*tensor).to(device) for tensor in given]
    before = [None if tensor is None else tensor.clone() for tensor in tensors]
    try:
        result = implementation.call("parallel_logits", *tensors, **({} if group is None else {"group": group}))
    except Refused as refusal:
        inside = inside_torch_distributed(refusal.__cause__)
        return ("raised", f"{refusal} inside torch.distributed", None, "") if inside else ("refused", str(refusal), None, "")
    except Broken as broken:
        return "raised", "; ".join(text for _, text in broken.finding.facts), None, ""
    except Exception as error:  # told to the judging process, which would otherwise wait for this rank
        return "raised", f"{type(error).__name__}: {error}", None, ""
    names = ("hidden", "weight_shard", "cu_seqlens_q")
    changed = [name for name, a, b in zip(names, tensors, before, strict=True) if a is not None and b is not None and not torch.equal(a, b)]
    if result is None:
        return "none", "", None, ", ".join(changed)
    if not isinstance(result, torch.Tensor):
        return "other", f"a {type(result).__name__}", None, ""
    return "tensor", "", flattened(result), ", ".join(changed)


def inside_torch_distributed(error: BaseException | None) -> bool:
    """Whether the error came out of a collective: that is no refusal of the implementation's own."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return bool(frames) and "torch/distributed" in frames[-1].filename.replace(os.sep, "/")
