"""Sampling from softmax(logits / T) as an exponential race, fused into one pass over the logits; no softmax is written out.

Token v arrives at time E / p[v] with E ~ Exp(1); the first to arrive is a draw from p. The race is run by groups: lanes of tokens race with
their total masses (one random number a lane), then the tokens of the winning lane. That is the same distribution, since
p[v] = P(lane) * P(v | lane), for a hundredth of the random numbers. In logarithms, arrival order is the order of log p - log E, so that
nothing overflows. The kernels are in `gpu_impl.sampling_kernels`, the state that a launch needs in `gpu_impl.sampling_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from gpu_impl.launch import INTERPRET, ceil_div, launches_early, num_multiprocessors, on_device_of, power_of_two, require, require_one_device
from gpu_impl.sampling_kernels import UNROLL, given_race_kernel, race_kernel, tile_mass_kernel
from gpu_impl.sampling_state import Seed, counters_for, seed_for

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TILE = 2**16 if INTERPRET else 4096  # tokens of a tile where the noise is given
LEAST_TILE = 256  # of those: few sizes are compiled
# in the interpreter programs are wide and few, and still every seam of the kernel is in use
STEPS_IN_INTERPRETER, LOGITS_IN_INTERPRETER, SPLITS_IN_INTERPRETER = 6, 2**20, 2


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, *, noise: torch.Tensor | None = None, seed: int | torch.Tensor | None = None
) -> torch.Tensor:
    """(B,) int64: one token a row, distributed as softmax(logits / T) in float32 (clauses SAMPLE-1...9).

    logits: (B, V) of any float dtype, any strides; temperatures: (B,) above 0, down to the argmax as T goes to 0; noise: (B, V) of Exp(1)
    draws, then the result is the argmax of p / noise, the lowest id of a tie. seed repeats a draw; without it one comes from torch's
    generator of the device, which torch.manual_seed governs, and which a CUDA graph advances with each replay. seed may be a (1,) int64
    tensor on the device: the call reads it and adds 1, so that replays of a graph differ at no cost, and repeat once it is set back.
    NaN logits count as -inf, +inf as the largest float32; a row without any finite logit gives 0. Values on a device are not checked: that
    would wait for it. Raises ValueError for shapes, dtypes and devices that do not fit.
    """
    require_logits(logits, temperatures)
    if noise is not None:
        require(noise.shape == logits.shape, f"noise has shape {tuple(noise.shape)}, logits {tuple(logits.shape)}")
        require_one_device(logits=logits, noise=noise)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if not len(tokens):
        return tokens
    with on_device_of(logits):
        if noise is None:
            race(logits, temperatures, tokens, seed_for(seed, logits.device))
        else:
            given_race(logits, temperatures, noise, tokens)
    return tokens


def require_logits(logits: torch.Tensor, temperatures: torch.Tensor) -> None:
    require(logits.dim() == 2 and logits.shape[1] > 0, f"logits have shape {tuple(logits.shape)}, they must be (B, V) with V > 0")
    num_rows = logits.shape[0]
    require(temperatures.shape == (num_rows,), f"logits have {num_rows} rows, temperatures have shape {tuple(temperatures.shape)}")
    require(logits.dtype in FLOATS, f"logits are {logits.dtype}, they must be one of float64, float32, float16 and bfloat16")
    require_one_device(logits=logits, temperatures=temperatures)


REGISTERS, MOST_REGISTERS = 65_536, 255  # of a multiprocessor, of a thread


class Shape(NamedTuple):
    """What a launch is made of, as swept on an H200."""

    warps: int  # of a program
    programs: int  # a multiprocessor
    stages: int  # steps whose loads are under way at once


# with a row for each multiprocessor a program reads a whole one, and there are warps enough to hide what a load takes; fewer rows are split,
# and what is left to gain is the launch
WHOLE_ROWS, SPLIT_ROWS = Shape(16, 2, 1), Shape(4, 2, 5)


class Plan(NamedTuple):
    """How a race is launched."""

    rows: int  # of a program
    lanes: int  # that race for a row in a program
    width: int  # tokens side by side that a lane loads at once
    splits: int  # programs that share a row
    lane_tokens: int  # at least as many as a lane of a split has, a power of two
    warps: int
    stages: int
    early: bool  # launched before the kernel ahead has ended, where the device can
    registers: int  # of a thread, at most; 0: as many as the compiler likes


@cache
def plan(num_rows: int, vocab_size: int, itemsize: int, device: torch.device) -> Plan:
    whole = num_rows >= num_multiprocessors(device) and not INTERPRET
    warps, programs, stages = WHOLE_ROWS if whole else SPLIT_ROWS
    width = max(1, 16 // itemsize)
    most_lanes = power_of_two(max(2, vocab_size // (width * UNROLL.value * STEPS_IN_INTERPRETER))) if INTERPRET else 32 * warps
    lanes = min(most_lanes, power_of_two(ceil_div(vocab_size, width * UNROLL.value)))
    # a thread holds at most four tokens of the winning lanes: with 32 of them the assembler took 95 s and spilled 9 KB
    most_rows = LOGITS_IN_INTERPRETER // power_of_two(vocab_size) if INTERPRET else 32 * warps * min(4 / (width * UNROLL.value), 1 / lanes)
    rows = min(power_of_two(num_rows), max(1, int(most_rows)))
    steps = ceil_div(vocab_size, lanes * width * UNROLL.value)
    wanted = SPLITS_IN_INTERPRETER if INTERPRET else programs * num_multiprocessors(device) // ceil_div(num_rows, rows)
    splits = min(steps, max(1, wanted))
    lane_tokens = power_of_two(ceil_div(steps, splits) * UNROLL.value * width)
    registers = 0 if INTERPRET else min(MOST_REGISTERS, REGISTERS // (32 * warps * programs))
    warps = max(1, min(warps, rows * max(lanes, width * UNROLL.value // 4) // 32))
    return Plan(rows, lanes, width, splits, lane_tokens, warps, stages, launches_early(device), registers)


def race(
    logits: torch.Tensor, temperatures: torch.Tensor, tokens: torch.Tensor, seed: Seed, arrivals: torch.Tensor | None = None
) -> None:
    """Fill tokens (B,) int64 and, where given, arrivals (B,) float64: the winner's log of mass + Gumbel, comparable across shards."""
    (num_rows, vocab_size), logits = logits.shape, readable(logits)
    rows, lanes, width, splits, lane_tokens, warps, stages, early, registers = plan(num_rows, vocab_size, logits.element_size(), logits.device)
    blocks = ceil_div(num_rows, rows)
    entries = counters = tokens  # neither written nor read
    if splits > 1:
        entries = torch.empty((2, num_rows, splits), dtype=torch.float64, device=logits.device)
    if splits > 1 or seed.mode == "advanced":
        counters = counters_for(blocks + 1, logits.device)
    race_kernel[(blocks * splits,)](
        logits, temperatures, tokens if seed.tensor is None else seed.tensor, seed.low, seed.high, entries, counters, tokens,
        tokens if arrivals is None else arrivals, num_rows, vocab_size, splits, *logits.stride(), temperatures.stride(0),
        SEEDS=seed.mode, EARLY=early, KEEP_ARRIVALS=arrivals is not None, ROWS=rows, LANES=lanes, WIDTH=width, SPLITS=power_of_two(splits),
        LANE_TOKENS=lane_tokens, STAGES=stages, num_warps=warps, **({"launch_pdl": True} if early else {}),
        **({"maxnreg": registers} if registers else {}),
    )  # fmt: skip


def given_race(logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor, tokens: torch.Tensor) -> None:
    """Fill tokens (B,) with the argmax of p / noise: one pass for the masses of the tiles, one for the race."""
    (num_rows, vocab_size), logits, noise, temperatures = logits.shape, readable(logits), readable(noise), temperatures.float()
    tile = min(TILE, power_of_two(vocab_size if INTERPRET else max(vocab_size, LEAST_TILE)))
    num_tiles = ceil_div(vocab_size, tile)
    rows = min(power_of_two(num_rows), max(1, 2**17 // tile)) if INTERPRET else max(1, 4 * LEAST_TILE // tile)
    tile_max, tile_sum = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    tile_mass_kernel[(ceil_div(num_rows, rows) * num_tiles,)](
        logits, temperatures, tile_max, tile_sum, num_rows, vocab_size, num_tiles, *logits.stride(), temperatures.stride(0),
        ROWS=rows, TILE=tile, num_warps=8,
    )  # fmt: skip
    given_race_kernel[(ceil_div(num_rows, rows),)](
        logits, temperatures, noise, tile_max, tile_sum, tokens, num_rows, vocab_size, num_tiles, *logits.stride(), *noise.stride(),
        temperatures.stride(0), ROWS=rows, TILE=tile, BLOCK_TILES=power_of_two(num_tiles), num_warps=8,
    )  # fmt: skip


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """As the kernels take it: they widen to float32 on load, but the interpreter is slow at bfloat16, and float64 is cut down first."""
    if tensor.dtype in (torch.float32, torch.float16) or (tensor.dtype == torch.bfloat16 and not INTERPRET):
        return tensor
    return tensor.float()


def _race(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    below_largest = logits.float() - logits.float().amax(dim=1, keepdim=True)
    p = torch.softmax(below_largest / temperatures.float()[:, None], dim=1)
    return (p / torch.empty_like(p).exponential_(1).clamp_min_(1e-10)).argmax(dim=1)


def sample_compiled(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """(B,) int64: the same race in plain torch, as engines write it, under torch.compile on a GPU; a yardstick for `sample`.

    It loses tail mass: float32 `exponential_` on CUDA never goes under 2**-24, so a token 16 nats under the top is drawn 10 % too rarely,
    one 18 nats under it 90 %. On the CPU it runs eagerly, because inductor of torch 2.13 does not compile it there.
    """
    return _compiled_race()(logits, temperatures)


@cache
def _compiled_race() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return torch.compile(_race, dynamic=False) if torch.cuda.is_available() else _race
