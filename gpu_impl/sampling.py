"""Sampling from softmax(logits / T) as an exponential race, fused into one pass over the logits; no softmax is written out.

Token v arrives at time E / p[v] with E ~ Exp(1); the first to arrive is a draw from p. A long row is cut into tiles, and the race is run
twice: the tiles race with their total masses (one random number a tile), then the tokens of the winning tile. That is the same
distribution, since p[v] = P(tile) * P(v | tile), for a thousandth of the random numbers. In logarithms, arrival order is the order of
log p - log E, so that nothing overflows. The kernels are in `gpu_impl.sampling_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from gpu_impl.launch import INTERPRET, ceil_div, on_device_of, power_of_two, require, require_one_device
from gpu_impl.sampling_kernels import race_rows_kernel, tile_mass_kernel

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# tokens of a tile: enough loads in flight to fill a GPU from one row, few enough for the second race to be short
TILE = 2**16 if INTERPRET else 4096


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, *, noise: torch.Tensor | None = None, seed: int | None = None
) -> torch.Tensor:
    """(B,) int64: one token a row, distributed as softmax(logits / T) in float32 (clauses SAMPLE-1...9).

    logits: (B, V) of any float dtype, any strides; temperatures: (B,) above 0, down to the argmax as T goes to 0; noise: (B, V) of Exp(1)
    draws, then the result is the argmax of p / noise, the lowest id of a tie. seed repeats a draw; without it one is drawn from torch's
    generator of the device, which torch.manual_seed governs and a CUDA graph advances with each replay. NaN logits count as -inf, +inf as
    the largest float32; a row without any finite logit gives 0. Values on a device are not checked: that would wait for it. Raises
    ValueError for shapes, dtypes and devices that do not fit.
    """
    require(logits.dim() == 2 and logits.shape[1] > 0, f"logits have shape {tuple(logits.shape)}, they must be (B, V) with V > 0")
    num_rows, vocab_size = logits.shape
    require(temperatures.shape == (num_rows,), f"logits have {num_rows} rows, temperatures have shape {tuple(temperatures.shape)}")
    require(logits.dtype in FLOATS, f"logits are {logits.dtype}, they must be one of float64, float32, float16 and bfloat16")
    require_one_device(logits=logits, temperatures=temperatures)
    if noise is not None:
        require(noise.shape == logits.shape, f"noise has shape {tuple(noise.shape)}, logits {tuple(logits.shape)}")
        require_one_device(logits=logits, noise=noise)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    tile = min(TILE, power_of_two(vocab_size))
    num_tiles = ceil_div(vocab_size, tile)
    rows = min(power_of_two(num_rows), max(1, (2**17 if INTERPRET else 1024) // tile))
    if noise is None:
        key = _random_seed(logits.device) if seed is None else torch.full((1,), _as_int64(seed), dtype=torch.int64, device=logits.device)
    else:
        key = tokens  # not read
    logits, temperatures = _readable(logits), temperatures.float()
    times = logits if noise is None else _readable(noise)  # without noise not read
    with on_device_of(logits):
        if num_tiles > 1:
            tile_max, tile_sum = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=logits.device)
            tile_mass_kernel[(ceil_div(num_rows, rows) * num_tiles,)](
                logits, temperatures, tile_max, tile_sum, num_rows, vocab_size, num_tiles, *logits.stride(), temperatures.stride(0),
                ROWS=rows, TILE=tile, num_warps=8,
            )  # fmt: skip
        else:
            tile_max = tile_sum = temperatures  # neither written nor read
        race_rows_kernel[(ceil_div(num_rows, rows),)](
            logits, temperatures, times, key, tile_max, tile_sum, tokens,
            num_rows, vocab_size, num_tiles, *logits.stride(), *times.stride(), temperatures.stride(0),
            HAS_NOISE=noise is not None, SEVERAL_TILES=num_tiles > 1, ROWS=rows, TILE=tile, BLOCK_TILES=power_of_two(num_tiles),
            num_warps=8,
        )  # fmt: skip
    return tokens


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
    return torch.compile(_race, dynamic=True) if torch.cuda.is_available() else _race


def _random_seed(device: torch.device) -> torch.Tensor:
    """(1,) int64 on the device, so that neither the host waits nor a captured graph replays one seed for ever."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _as_int64(seed: int) -> int:
    """The low 64 bits of a seed, signed."""
    return (seed + 2**63) % 2**64 - 2**63


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """As the kernels take it: they widen to float32 on load, but the interpreter is slow at bfloat16, and float64 is cut down first."""
    if tensor.dtype in (torch.float32, torch.float16) or (tensor.dtype == torch.bfloat16 and not INTERPRET):
        return tensor
    return tensor.float()
