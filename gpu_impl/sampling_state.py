"""What a race needs besides its tensors: a seed that costs no launch, and counters that are 0 between launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu_impl.launch import require

UINT64 = 2**64 - 1
PER_CALL = 4  # what a call takes from the generator's offset, which torch keeps a multiple of 4
ALIGNED = 32  # counters of a slice are a multiple of this: every slice begins on 128 bytes
FOR_GRAPHS = 65_536  # counters of a device that captured calls share out


class Seed(NamedTuple):
    mode: str  # given: low and high · read: from the tensor · advanced: read from the tensor, and raised by 1 there
    low: int = 0  # signed 32 bits each
    high: int = 0
    tensor: torch.Tensor | None = None


def seed_for(seed: int | torch.Tensor | None, device: torch.device) -> Seed:
    """The 64 bits of one call. Without a seed they are those of torch's generator of the device, which goes on by one call."""
    if isinstance(seed, torch.Tensor):
        require(
            seed.shape == (1,) and seed.dtype == torch.int64 and seed.device == device,
            f"seed is {seed.dtype} of shape {tuple(seed.shape)} on {seed.device}, it must be (1,) int64 on {device}",
        )
        return Seed("advanced", tensor=seed)
    if seed is not None:
        return halves(int(seed))
    if device.type != "cuda":
        return halves(int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)))
    if torch.cuda.is_current_stream_capturing():  # torch's own kernel reads the generator anew at each replay
        return Seed("read", tensor=torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device))
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + PER_CALL)
    return halves(mixed(generator.initial_seed(), offset))


def halves(seed: int) -> Seed:
    """The low 64 bits in two, signed: a kernel argument of 32 bits has one type, whatever its value."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    return Seed("given", low - (low >> 31 << 32), high - (high >> 31 << 32))


def mixed(a: int, b: int) -> int:
    """64 bits of two numbers, as SplitMix64 mixes them: neighbours have nothing in common."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & UINT64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & UINT64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & UINT64
    return x ^ x >> 31


_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_for_graphs: dict[int, tuple[torch.Tensor, int]] = {}  # device -> its counters, how many are given away


def counters_for(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` int32 counters that are 0 and that no launch under way uses; a kernel leaves them at 0.

    Calls of one stream come after each other and share theirs. A captured call keeps its own, because its graph may be replayed on any
    stream; where none are left, the graph sets new ones to 0 with each replay.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    count = -(-count // ALIGNED) * ALIGNED
    if torch.cuda.is_current_stream_capturing():
        shared, taken = _for_graphs.get(index, (None, 0))
        if shared is None or taken + count > len(shared):
            return torch.zeros(count, dtype=torch.int32, device=device)
        _for_graphs[index] = shared, taken + count
        return shared[taken : taken + count]
    if index not in _for_graphs:
        _for_graphs[index] = torch.zeros(FOR_GRAPHS, dtype=torch.int32, device=device), 0
        torch.cuda.synchronize(device)  # they are 0 before any stream sees them
    stream = torch.cuda.current_stream(device).cuda_stream
    counters = _of_streams.get((index, stream))
    if counters is None or len(counters) < count:
        counters = _of_streams[index, stream] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
    return counters
