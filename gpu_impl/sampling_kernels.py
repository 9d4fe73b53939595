"""The Triton kernels behind `gpu_impl.sampling`: the mass of each tile of the vocabulary, and the races."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_or_lowest(x):
    """float32 logits without NaN (to -inf, never drawn) and without +inf (to the largest finite number, so that x - max is no NaN)."""
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    return tl.minimum(x, 3.4028234663852886e38)


@triton.jit
def below(x, largest):
    """x - largest, where a largest of -inf stands for an empty row or tile: -inf - -inf would be NaN."""
    return x - tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def minus_log_exponential(seed, counter, row, STREAM: tl.constexpr):
    """-log E with E ~ Exp(1) of 63 random bits, in (-4, 46): fine where E is small, which is what the tail of a distribution lives on.

    h is uniform on (0, 1/2]. With one more random bit, E = -log(1 - h) near 0 or E = -log(h) above log 2, each exact to rounding; the naive
    -log(u) of a float32 u knows no E under 2**-24. Counters are (token or tile, row, stream); a call has its own seed.
    """
    zero = counter * 0
    bits, low, _, _ = tl.philox(seed, counter, row + zero, zero + STREAM, zero)
    h = ((bits >> 1).to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10) * 2.3283064365386963e-10
    series = h * (1.0 + h * (0.5 + h * (0.3333333333333333 + h * (0.25 + h * 0.2))))
    early = tl.where(h < 0.015625, series, -tl.log(1.0 - tl.minimum(h, 0.5)))
    return -tl.log(tl.where((bits & 1) == 1, early, -tl.log(h)))


@triton.jit
def tile_mass_kernel(
    logits, temperatures, tile_max, tile_sum, num_rows, vocab_size, num_tiles, stride_b, stride_v, stride_t,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """tile_max, tile_sum (B, tiles) float32: the largest logit of each tile, and its sum of exp((logit - largest) / T)."""
    program = tl.program_id(0)
    tile = program % num_tiles
    row = (program // num_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = row < num_rows
    token = tile * TILE + tl.arange(0, TILE)
    ptr = logits + (row * stride_b)[:, None] + (token.to(tl.int64) * stride_v)[None, :]
    x = finite_or_lowest(tl.load(ptr, mask=row_ok[:, None] & (token < vocab_size)[None, :], other=float("-inf")))
    largest = tl.max(x, 1)
    temperature = tl.load(temperatures + row * stride_t, mask=row_ok, other=1.0)
    mass = tl.sum(tl.exp(below(x, largest[:, None]) / temperature[:, None]), 1)
    tl.store(tile_max + row * num_tiles + tile, largest, mask=row_ok)
    tl.store(tile_sum + row * num_tiles + tile, mass, mask=row_ok)


@triton.jit
def race_rows_kernel(
    logits, temperatures, noise, seed, tile_max, tile_sum, tokens, num_rows, vocab_size, num_tiles,
    stride_b, stride_v, stride_nb, stride_nv, stride_t,
    HAS_NOISE: tl.constexpr, SEVERAL_TILES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """tokens (B,) int64. Without noise: race the tiles, then the tokens of the winning one. With it: the argmax of p / noise over all."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = row < num_rows
    temperature = tl.load(temperatures + row * stride_t, mask=row_ok, other=1.0)
    row32 = row.to(tl.int32)[:, None]
    lane = tl.arange(0, TILE)
    tile = tl.zeros([ROWS], tl.int32)
    if SEVERAL_TILES:
        each = tl.arange(0, BLOCK_TILES)
        entry = (row * num_tiles)[:, None] + each[None, :]
        entry_ok = row_ok[:, None] & (each < num_tiles)[None, :]
        peaks = tl.load(tile_max + entry, mask=entry_ok, other=float("-inf"))
        sums = tl.load(tile_sum + entry, mask=entry_ok, other=0.0)
        largest = tl.max(peaks, 1)
        distance = below(peaks, largest[:, None]) / temperature[:, None]
        if HAS_NOISE:
            total = tl.sum(sums * tl.exp(distance), 1)
        else:
            # a tile that is all -inf has sum 0 and no part in the race
            log_mass = distance + tl.log(tl.where(sums > 0.0, sums, 1.0))
            arrival = log_mass + minus_log_exponential(tl.load(seed), row32 * 0 + each[None, :], row32, 1)
            tile = tl.argmax(tl.where(peaks == float("-inf"), float("-inf"), arrival), 1)
    if HAS_NOISE:
        best = tl.full([ROWS], float("-inf"), tl.float64)
        winner = tl.zeros([ROWS], tl.int32)
        for i in range(0, num_tiles):
            token = i * TILE + lane
            ok = row_ok[:, None] & (token < vocab_size)[None, :]
            column = token.to(tl.int64)[None, :]
            x = finite_or_lowest(tl.load(logits + (row * stride_b)[:, None] + column * stride_v, mask=ok, other=float("-inf")))
            time = tl.load(noise + (row * stride_nb)[:, None] + column * stride_nv, mask=ok, other=1.0).to(tl.float64)
            if not SEVERAL_TILES:
                largest = tl.max(x, 1)
                total = tl.sum(tl.exp(below(x, largest[:, None]) / temperature[:, None]), 1)
            # float64, so that no rounding reorders a race whose noise is given
            log_p = below(x, largest[:, None]).to(tl.float64) / temperature.to(tl.float64)[:, None]
            log_p -= tl.log(tl.maximum(total, 1.0))[:, None]
            arrival = tl.where(time == 0.0, float("inf"), log_p - tl.log(tl.where(time == 0.0, 1.0, time)))
            # p under the smallest float32 is 0 and never arrives; an infinite time comes after every finite one
            arrival = tl.where(log_p > -103.97, tl.maximum(arrival, -1e300), float("-inf"))
            first = tl.max(arrival, 1)
            here = tl.argmax(arrival, 1)
            winner = tl.where(first > best, i * TILE + here, winner)
            best = tl.maximum(best, first)
    else:
        token = tile[:, None] * TILE + lane[None, :]
        ok = row_ok[:, None] & (token < vocab_size)
        ptr = logits + (row * stride_b)[:, None] + token.to(tl.int64) * stride_v
        x = finite_or_lowest(tl.load(ptr, mask=ok, other=float("-inf")))
        distance = below(x, tl.max(x, 1)[:, None]) / temperature[:, None]
        arrival = distance + minus_log_exponential(tl.load(seed), token, row32, 0)
        # a finite logit far down at a tiny T is at -inf too, and still comes before a forbidden token
        arrival = tl.where(x == float("-inf"), float("-inf"), tl.maximum(arrival, -3e38))
        winner = tile * TILE + tl.argmax(arrival, 1)
    tl.store(tokens + row, tl.minimum(winner, vocab_size - 1).to(tl.int64), mask=row_ok)
