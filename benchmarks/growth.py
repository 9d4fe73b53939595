"""`python -m benchmarks.growth`: what a life costs by its tokens, 1e3 to 1e6: the block manager, and the expected image of the cache.

Both must be linear: seconds over tokens, and the exponent of tokens that fits each step from one row to the next (1.0 is linear).
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from conformance.checks.contents import KEY, VALUE, rows_of
from reference import BlockManager

TOKENS = (1_000, 10_000, 100_000, 1_000_000)
CHUNK = 8192  # tokens of a prefill step
IMAGE_SLOTS = 16384  # compared at a time
HEADS, HEAD_DIM = 1, 16
BEST_OF = 3


def manage(num_tokens: int, block_size: int) -> None:
    """A prompt is prefilled in chunks and freed, hit by another to its last block, which then generates a token."""
    manager = BlockManager(num_tokens // block_size + 3, block_size)
    tokens = list(range(num_tokens))
    manager.admit(0, tokens)
    for start in range(0, num_tokens, CHUNK):
        count = min(CHUNK, num_tokens - start)
        manager.schedule(0, count)
        manager.computed(0, count)
    manager.free(0)
    cached = manager.admit(1, tokens)
    manager.schedule(1, num_tokens - cached)
    manager.computed(1, num_tokens - cached)
    manager.append(1, -1)
    manager.schedule(1, 1)
    manager.free(1)


def compare_image(num_tokens: int, device: torch.device) -> None:
    """Every slot's keys and values are computed from its name, and compared with the cache."""
    names = torch.randperm(num_tokens, device=device)
    cache = torch.zeros((2, num_tokens, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device)
    for writing in (True, False):
        for first in range(0, num_tokens, IMAGE_SLOTS):
            for side, kind in enumerate((KEY, VALUE)):
                rows = rows_of(names[first : first + IMAGE_SLOTS], HEADS, HEAD_DIM, torch.bfloat16, kind)
                if writing:
                    cache[side, first : first + IMAGE_SLOTS] = rows
                else:
                    assert torch.equal(cache[side, first : first + IMAGE_SLOTS], rows)


def seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """The best time of a call, without garbage collection, as timeit measures."""
    best = math.inf
    for _ in range(BEST_OF):
        gc.collect()
        gc.disable()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
        gc.enable()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    table = Table(title=f"blocks of {options.block_size} tokens, {device}, torch {torch.__version__}, best of {BEST_OF}")
    for column in ("tokens", "block manager ms", "ns a token", "exponent", "expected image ms", "ns a token", "exponent"):
        table.add_column(column, justify="right")
    before: tuple[float, ...] = ()
    for num_tokens in TOKENS:
        now = (
            seconds_of(lambda: manage(num_tokens, options.block_size), device),
            seconds_of(lambda: compare_image(num_tokens, device), device),
        )
        cells = [f"{num_tokens:,}"]
        for i, seconds in enumerate(now):
            exponent = f"{math.log10(seconds / before[i]):.2f}" if before else ""
            cells += [f"{seconds * 1e3:,.2f}", f"{seconds / num_tokens * 1e9:,.0f}", exponent]
        table.add_row(*cells)
        before = now
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
