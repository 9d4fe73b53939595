"""The Triton kernels behind `gpu_impl.sampling`: the race whose noise is drawn inside, and the one whose noise is given."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
LARGEST_LEVEL = tl.constexpr(1048576.0)  # of x * rate, that is of x / T in bits
UNROLL = tl.constexpr(4)  # wide loads of a thread that are under way at once


@triton.jit
def below(x, largest):
    """x - largest, where a largest of -inf stands for an empty row or tile: -inf - -inf would be NaN."""
    return x - tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def minus_log_exponential(seed, counter, row, STREAM: tl.constexpr):
    """-log E with E ~ Exp(1) of 63 random bits, in (-4, 46): fine where E is small, which is what the tail of a distribution lives on.

    h is uniform on (0, 1/2]. With one more random bit, E = -log(1 - h) near 0 or E = -log(h) above log 2, each exact to rounding; the naive
    -log(u) of a float32 u knows no E under 2**-24. Counters are (token or lane, row, stream); a call has its own seed.
    """
    zero = counter * 0
    bits, low, _, _ = tl.philox(seed, counter, row + zero, zero + STREAM, zero)
    h = ((bits >> 1).to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10) * 2.3283064365386963e-10
    series = h * (1.0 + h * (0.5 + h * (0.3333333333333333 + h * (0.25 + h * 0.2))))
    early = tl.where(h < 0.015625, series, -tl.log(1.0 - tl.minimum(h, 0.5)))
    return -tl.log(tl.where((bits & 1) == 1, early, -tl.log(h)))


@triton.jit
def load_tokens(base, token, vocab_size, stride_v, row_ok, MASKED: tl.constexpr):
    """float32 logits as they are."""
    ptr = base + token.to(tl.int64) * stride_v
    if MASKED:
        x = tl.load(ptr, mask=row_ok & (token < vocab_size), other=float("-inf"))
    else:
        x = tl.load(ptr)
    return x.to(tl.float32)


@triton.jit
def numbers_of(x):
    """NaN becomes -inf, which is never drawn, and +inf the largest finite number, so that x - max is no NaN."""
    # maximum and minimum give the other operand where one is NaN
    return tl.minimum(tl.maximum(x, float("-inf")), 3.4028234663852886e38)


@triton.jit
def take_step(
    base, step, lane, largest, level, mass, rate, vocab_size, stride_v, row_ok,
    LANES: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(lanes,), after one more step, or the first half of one: four or two times WIDTH tokens side by side for each lane. largest: the largest
    logit; mass: sum of 2**(x * rate - level), where level is the largest x * rate, rounded. It is taken for exact, so that its rounding is none
    of the sum's.
    """
    stride: tl.constexpr = LANES * WIDTH
    token = (lane * WIDTH + step * (stride * UNROLL))[:, None] + tl.arange(0, WIDTH)[None, :]
    x0 = load_tokens(base, token, vocab_size, stride_v, row_ok, MASKED)
    x1 = load_tokens(base, token + stride, vocab_size, stride_v, row_ok, MASKED)
    if CLEAN:
        x0, x1 = numbers_of(x0), numbers_of(x1)
    tops = tl.maximum(x0, x1)
    if WHOLE:
        x2 = load_tokens(base, token + 2 * stride, vocab_size, stride_v, row_ok, MASKED)
        x3 = load_tokens(base, token + 3 * stride, vocab_size, stride_v, row_ok, MASKED)
        if CLEAN:
            x2, x3 = numbers_of(x2), numbers_of(x3)
        tops = tl.maximum(tops, tl.maximum(x2, x3))
    top = tl.maximum(largest, tl.max(tops, 1))
    per_nat = rate[:, None]
    if CLEAN:  # the level is left at the largest logit itself: x * rate may be no float32
        finite_top = tl.maximum(top, LOWEST)  # where all are -inf: -inf - -inf would be NaN
        peak = finite_top[:, None]
        weights = tl.exp2((x0 - peak) * per_nat) + tl.exp2((x1 - peak) * per_nat)
        if WHOLE:
            weights = weights + tl.exp2((x2 - peak) * per_nat) + tl.exp2((x3 - peak) * per_nat)
        return top, level, mass * tl.exp2((largest - finite_top) * rate) + tl.sum(weights, 1)
    new_level = tl.maximum(level, top * rate)
    finite_level = tl.where(new_level == float("-inf"), 0.0, new_level)
    down = finite_level[:, None]
    weights = tl.exp2(x0 * per_nat - down) + tl.exp2(x1 * per_nat - down)
    if WHOLE:
        weights = weights + tl.exp2(x2 * per_nat - down) + tl.exp2(x3 * per_nat - down)
    return top, new_level, mass * tl.exp2(level - finite_level) + tl.sum(weights, 1)


@triton.jit
def masses(
    base, split, num_splits, lane, rate, vocab_size, stride_v, row_ok,
    LANES: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """(lanes,) of every num_splits-th step of the vocabulary: log2 of the total mass in two parts, float64 and float32, the first -inf where
    there is none; NaN where a NaN, +inf or an x * rate beyond LARGEST_LEVEL was met, unless CLEAN.
    """
    largest = lane * 0.0 + float("-inf")
    level = lane * 0.0 + float("-inf")
    mass = lane * 0.0
    full_steps = vocab_size // (LANES * WIDTH * UNROLL)
    for step in tl.range(split, full_steps, num_splits, num_stages=STAGES):
        largest, level, mass = take_step(
            base, step, lane, largest, level, mass, rate, vocab_size, stride_v, row_ok, LANES, WIDTH, False, CLEAN, True
        )
    if full_steps % num_splits == split:  # whose turn is the last, shorter step
        if vocab_size - full_steps * (LANES * WIDTH * UNROLL) > LANES * WIDTH * 2:
            largest, level, mass = take_step(
                base, full_steps, lane, largest, level, mass, rate, vocab_size, stride_v, row_ok, LANES, WIDTH, True, CLEAN, True
            )
        else:
            largest, level, mass = take_step(
                base, full_steps, lane, largest, level, mass, rate, vocab_size, stride_v, row_ok, LANES, WIDTH, True, CLEAN, False
            )
    if CLEAN:
        return largest.to(tl.float64) * rate.to(tl.float64), mass
    # beyond it 2**(rounding of the level) would be far from 1
    known = (largest == float("-inf")) | (tl.abs(level) <= LARGEST_LEVEL)
    return level.to(tl.float64), tl.where(known, mass, float("nan"))


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def race_kernel(
    logits, temperatures, seeds, seed_low, seed_high, entries, counters, tokens, arrivals,
    num_rows, vocab_size, num_splits, stride_b, stride_v, stride_t,
    SEEDS: tl.constexpr, EARLY: tl.constexpr, KEEP_ARRIVALS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, LANE_TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """tokens (B,) int64; arrivals (B,) float64 where asked for: log(sum of exp(x / T)) + Gumbel, the order of arrival across shards.

    A program reads every num_splits-th step of its rows. A lane is what one thread reads: lanes race by their mass, then the tokens of the
    winning lane race each other, and the program's winner goes to entries (2, B, splits). The program that is the last of its rows to come
    so far lets the splits' winners race. SEEDS: "given" in two halves, "read" from `seeds`, or "advanced": read, and one more afterwards.
    """
    if EARLY:  # launched before the kernel that writes the logits has ended
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0) % num_splits
    block = tl.program_id(0) // num_splits
    each = tl.arange(0, ROWS * LANES)
    lane, row = each % LANES, block * ROWS + each // LANES
    row_ok = row < num_rows
    temperature = tl.load(temperatures + row.to(tl.int64) * stride_t, mask=row_ok, other=1.0).to(tl.float32)
    rate = tl.minimum(1.4426950408889634 / temperature, 3e38)  # bits per nat; finite, since 0 * inf is NaN
    base = (logits + tl.minimum(row, num_rows - 1).to(tl.int64) * stride_b)[:, None]
    step_size: tl.constexpr = LANES * WIDTH * UNROLL
    if SEEDS == "given":
        seed = (seed_high.to(tl.int64) << 32) | (seed_low.to(tl.int64) & 0xFFFFFFFF)
    else:
        seed = tl.load(seeds)
    lane_noise = minus_log_exponential(seed, split * LANES + lane, row, 1)  # while the first logits are on their way
    level, mass = masses(base, split, num_splits, lane, rate, vocab_size, stride_v, row_ok[:, None], LANES, WIDTH, STAGES, False)
    if tl.max((mass != mass).to(tl.int32), 0) > 0:  # rare, and slower: so the usual logits pay nothing for it
        level, mass = masses(base, split, num_splits, lane, rate, vocab_size, stride_v, row_ok[:, None], LANES, WIDTH, 1, True)

    if EARLY:  # all is read: the next kernel of the stream may take its place, and wait there
        tl.extra.cuda.gdc_launch_dependents()
    # float64, because max / T may be large, and lanes that do not know each other's maximum are compared
    arrival = level * 0.6931471805599453
    arrival += tl.log(tl.where(mass > 0.0, mass, 1.0)) + lane_noise
    arrival = tl.reshape(tl.where(mass > 0.0, arrival, float("-inf")), [ROWS, LANES])
    first, winner = tl.max(arrival, 1, return_indices=True)

    row = block * ROWS + tl.arange(0, ROWS)
    row_ok = row < num_rows
    temperature = tl.load(temperatures + row.to(tl.int64) * stride_t, mask=row_ok, other=1.0).to(tl.float32)
    j = tl.arange(0, LANE_TOKENS)
    place = (split + j // (UNROLL * WIDTH) * num_splits) * step_size + j // WIDTH % UNROLL * (LANES * WIDTH) + j % WIDTH
    token = winner.to(tl.int32)[:, None] * WIDTH + place[None, :]
    x = numbers_of(load_tokens((logits + row.to(tl.int64) * stride_b)[:, None], token, vocab_size, stride_v, row_ok[:, None], True))
    distance = below(x, tl.max(x, 1)[:, None]) / temperature[:, None]
    # a finite logit far down at a tiny T is at -inf too, and still comes before a forbidden token
    race = tl.where(x == float("-inf"), float("-inf"), tl.maximum(distance + minus_log_exponential(seed, token, row[:, None], 0), LOWEST))
    best = tl.argmax(race, 1)
    place = (split + best // (UNROLL * WIDTH) * num_splits) * step_size + best // WIDTH % UNROLL * (LANES * WIDTH) + best % WIDTH
    drawn = tl.minimum(winner.to(tl.int32) * WIDTH + place, vocab_size - 1).to(tl.int64)

    finished = True
    if SPLITS > 1:
        entry = row.to(tl.int64) * num_splits
        tokens_of_splits = entries + tl.cast(num_rows, tl.int64) * num_splits
        tl.store(entries + entry + split, first, mask=row_ok)
        tl.store(tokens_of_splits + entry + split, drawn.to(tl.float64), mask=row_ok)
        tl.debug_barrier()
        finished = tl.atomic_add(counters + block, 1) == num_splits - 1
    if finished:
        if SPLITS > 1:
            tl.store(counters + block, 0)
            s = tl.arange(0, SPLITS)
            ok = row_ok[:, None] & (s < num_splits)[None, :]
            all_first = tl.load(entries + entry[:, None] + s[None, :], mask=ok, other=float("-inf"), cache_modifier=".cg")
            all_drawn = tl.load(tokens_of_splits + entry[:, None] + s[None, :], mask=ok, other=0.0, cache_modifier=".cg")
            first, winner = tl.max(all_first, 1, return_indices=True)
            drawn = tl.sum(tl.where(s[None, :] == winner[:, None], all_drawn, 0.0), 1).to(tl.int64)
        tl.store(tokens + row, drawn, mask=row_ok)
        if KEEP_ARRIVALS:
            tl.store(arrivals + row, first, mask=row_ok)
        if SEEDS == "advanced":
            num_blocks = tl.num_programs(0) // num_splits
            if tl.atomic_add(counters + num_blocks, 1) == num_blocks - 1:
                tl.store(counters + num_blocks, 0)
                tl.store(seeds, seed + 1)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "stride_t"])
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
    x = numbers_of(load_tokens(logits + (row * stride_b)[:, None], token[None, :], vocab_size, stride_v, row_ok[:, None], True))
    largest = tl.max(x, 1)
    temperature = tl.load(temperatures + row * stride_t, mask=row_ok, other=1.0)
    mass = tl.sum(tl.exp(below(x, largest[:, None]) / temperature[:, None]), 1)
    tl.store(tile_max + row * num_tiles + tile, largest, mask=row_ok)
    tl.store(tile_sum + row * num_tiles + tile, mass, mask=row_ok)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "stride_t"])
def given_race_kernel(
    logits, temperatures, noise, tile_max, tile_sum, tokens, num_rows, vocab_size, num_tiles, stride_b, stride_v, stride_nb, stride_nv, stride_t,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """tokens (B,) int64: the argmax of p / noise, from the masses of the tiles; in float64, so that no rounding reorders a given race."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = row < num_rows
    temperature = tl.load(temperatures + row * stride_t, mask=row_ok, other=1.0)
    lane = tl.arange(0, TILE)
    each = tl.arange(0, BLOCK_TILES)
    entry = (row * num_tiles)[:, None] + each[None, :]
    entry_ok = row_ok[:, None] & (each < num_tiles)[None, :]
    peaks = tl.load(tile_max + entry, mask=entry_ok, other=float("-inf"))
    largest = tl.max(peaks, 1)
    weights = tl.exp(below(peaks, largest[:, None]) / temperature[:, None])
    total = tl.sum(tl.load(tile_sum + entry, mask=entry_ok, other=0.0) * weights, 1)
    best = tl.full([ROWS], float("-inf"), tl.float64)
    winner = tl.zeros([ROWS], tl.int32)
    for i in range(0, num_tiles):
        token = (i * TILE + lane)[None, :]
        x = numbers_of(load_tokens(logits + (row * stride_b)[:, None], token, vocab_size, stride_v, row_ok[:, None], True))
        ptr = noise + (row * stride_nb)[:, None] + token.to(tl.int64) * stride_nv
        time = tl.load(ptr, mask=row_ok[:, None] & (token < vocab_size), other=1.0).to(tl.float64)
        log_p = below(x, largest[:, None]).to(tl.float64) / temperature.to(tl.float64)[:, None]
        log_p -= tl.log(tl.maximum(total, 1.0))[:, None]
        arrival = tl.where(time == 0.0, float("inf"), log_p - tl.log(tl.where(time == 0.0, 1.0, time)))
        # p under the smallest float32 is 0 and never arrives; an infinite time comes after every finite one
        arrival = tl.where(log_p > -103.97, tl.maximum(arrival, -1e300), float("-inf"))
        first = tl.max(arrival, 1)
        here = tl.argmax(arrival, 1)
        winner = tl.where(first > best, i * TILE + here, winner)
        best = tl.maximum(best, first)
    tl.store(tokens + row, tl.minimum(winner, vocab_size - 1).to(tl.int64), mask=row_ok)


@triton.jit
def first_to_arrive_kernel(tokens, arrivals, winners, num_rows, RANKS: tl.constexpr, ROWS: tl.constexpr):
    """winners (B,) int64: of each row the token that arrives first on any rank, the first such rank's, in the whole vocabulary's numbering.

    tokens, arrivals: the same memory as int64 and as float64; of each rank B tokens, B arrivals, and the width of its shard.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = row < num_rows
    length = 2 * num_rows + 1
    best = tl.load(arrivals + num_rows + row, mask=row_ok, other=0.0)
    winner = tl.load(tokens + row, mask=row_ok, other=0)
    first_token = tl.load(tokens + length - 1)
    for rank in tl.static_range(1, RANKS):
        base = rank * length
        arrival = tl.load(arrivals + base + num_rows + row, mask=row_ok, other=0.0)
        token = tl.load(tokens + base + row, mask=row_ok, other=0)
        earlier = arrival > best
        best = tl.where(earlier, arrival, best)
        winner = tl.where(earlier, token + first_token, winner)
        first_token += tl.load(tokens + base + length - 1)
    tl.store(winners + row, winner, mask=row_ok)
