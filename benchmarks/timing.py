"""Time on the device: CUDA events around replays of a graph that holds one call for each of several sets of inputs.

A graph, because engines replay graphs, and because launching from Python costs more than small kernels run. Several sets, so that what a
call reads is not left in the L2 cache by the call before: together they are three times as large.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

TIMES_L2 = 3  # what the sets hold together
MOST_SETS = 256
REPLAYS = 15
LEAST_CALLS = 4  # in a graph: its own launch is shared out among them
LEAST_MS = 5.0  # of one timed stretch
MOST_MS = 100.0  # of a stretch that is launched from Python: such calls are long, and fewer sets of inputs do

Call = Callable[[], object]


class Timing(NamedTuple):
    us: float  # median of the stretches, for one call
    spread_us: float  # between the quartiles
    graphed: bool  # False: the call cannot be captured, and was launched from Python


def sets_needed(bytes_moved: int) -> int:
    """How many sets of inputs a case needs; 1 on the CPU, where nothing is timed that could be in a GPU's cache."""
    if not torch.cuda.is_available():
        return 1
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    return min(MOST_SETS, max(1, -(-TIMES_L2 * cache_bytes // max(1, bytes_moved))))


def time_on_device(calls: Sequence[Call]) -> Timing:
    """Median µs of one call, each of `calls` being the same work on inputs of its own."""
    calls = list(calls) * -(-LEAST_CALLS // len(calls))
    graph = captured(calls)
    if graph is None:
        calls = calls[: max(1, int(MOST_MS / milliseconds(calls[0], 1)))]
    stretch = graph.replay if graph is not None else lambda: run_all(calls)
    stretch()
    once_ms = milliseconds(stretch, 1)
    repeats = max(1, min(200, round(LEAST_MS / max(once_ms, 1e-3))))
    each = sorted(milliseconds(stretch, repeats) / (repeats * len(calls)) * 1e3 for _ in range(REPLAYS))
    quartiles = statistics.quantiles(each, n=4)
    return Timing(statistics.median(each), quartiles[2] - quartiles[0], graph is not None)


def run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def milliseconds(stretch: Call, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        stretch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """A graph of all calls, or None if a call waits for the device or cannot be captured for another reason."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run_all(calls)
    except Exception:  # whatever the library raises where it asks the device for a value
        torch.cuda.synchronize()
        return None
    return graph
