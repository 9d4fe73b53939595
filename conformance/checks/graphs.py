"""CLAIM-5: a decode step that is captured in a CUDA graph, and replayed over the same buffers; on a CPU the same padded steps without a graph.

The buffers stay, as engines keep them: a narrower table leaves the columns of a wider one behind, a row of padding keeps the table of a
sequence that has left, with slot -1 and length 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import reference
from conformance.buffers import bits, first_difference
from conformance.cases.graphs import GraphCase
from conformance.checks.budget import exact_and_limit_of_row
from conformance.checks.contents import KEY, QUERY, VALUE, rows_of
from conformance.checks.steps import require_like
from conformance.findings import Broken, Refused
from conformance.implementation import REFUSALS, one_line
from conformance.judge import Judge

POISON = 30000.0
QUERY_SCALE = 0.125
WARM_UPS = 2  # runs before a capture: compiling and first allocations are not captured


class Bucket:
    """The buffers of one bucket, and the step over them."""

    def __init__(self, judge: Judge, case: GraphCase) -> None:
        self.judge, self.case = judge, case
        device = judge.device
        shape = (1, case.num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
        self.cache = reference.allocate_kv_cache(*shape, dtype=case.dtype, device=device).fill_(POISON)
        self.k_cache, self.v_cache = reference.layer_views(self.cache, 0)
        self.q = torch.zeros(case.bucket, case.num_kv_heads * case.group_size, case.head_dim, dtype=case.dtype, device=device)
        self.key, self.value = torch.zeros((2, case.bucket, case.num_kv_heads, case.head_dim), dtype=case.dtype, device=device)
        self.slot_mapping = torch.full((case.bucket,), -1, dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(case.bucket, dtype=torch.int32, device=device)
        self.block_tables = torch.full((case.bucket, case.width), -1, dtype=torch.int32, device=device)
        claims = judge.capabilities.claims_for
        offered = judge.implementation.offered
        self.called = [name for name in ("store_kvcache", "decode_attention") if name in offered and claims("cuda_graph", name)]
        self.out = torch.zeros_like(self.q)
        self.run = self.eager

    def arguments(self, function: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if function == "store_kvcache":
            return (self.key, self.value, self.k_cache, self.v_cache, self.slot_mapping), {}
        named = {"context_lens": self.context_lens, "block_tables": self.block_tables, "scale": self.case.head_dim**-0.5}
        return (self.q, self.k_cache, self.v_cache), named

    def eager(self) -> None:
        for function in self.called:
            args, kwargs = self.arguments(function)
            out = self.judge.call(function, *args, **kwargs)
            if function == "decode_attention":
                require_like(out, self.q)
                self.out = out

    def capture(self) -> None:
        """From here on `run` replays a graph. Raises Refused, or Broken if the step cannot be captured."""

        def step() -> None:
            for function in self.called:
                args, kwargs = self.arguments(function)
                out = self.judge.implementation.offered[function](*args, **kwargs)
                self.out = out if function == "decode_attention" else self.out

        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.Stream(self.judge.device)
            stream.wait_stream(torch.cuda.current_stream(self.judge.device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream(self.judge.device).wait_stream(stream)
            with torch.cuda.graph(graph):
                step()
        except REFUSALS as error:
            raise Refused(one_line(error)) from error
        except Exception as error:  # whatever a capture raises is a finding about what was captured
            raise Broken(("captured", one_line(error)), likely="the step waits for the device, or allocates outside the graph's pool") from error
        self.run = self.replayer(graph)

    def replayer(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize(self.judge.device)

        return replay

    def fill(self, step: int, lens: tuple[int, ...]) -> torch.Tensor:
        """The buffers and the cache before a step. Returns the cache's expected image after it."""
        case, device = self.case, self.judge.device
        self.cache.fill_(POISON)
        self.slot_mapping.fill_(-1)
        self.context_lens.fill_(0)
        expected = self.cache.clone()
        for row, (n, table) in enumerate(zip(lens, case.tables(step, lens), strict=True)):
            names = self.names(step, row, n)
            blocks = torch.tensor(table, device=device)
            positions = torch.arange(n, device=device)
            slots = blocks[positions // case.block_size] * case.block_size + positions % case.block_size
            for side, kind in enumerate((KEY, VALUE)):
                rows = rows_of(names, case.num_kv_heads, case.head_dim, case.dtype, kind)
                flat, flat_expected = (cache[side, 0].view(-1, case.num_kv_heads, case.head_dim) for cache in (self.cache, expected))
                stored = n - 1 if "store_kvcache" in self.called else n
                flat[slots[:stored]] = rows[:stored]
                flat_expected[slots] = rows
                (self.key, self.value)[side][row] = rows[-1]
            self.q[row] = rows_of(names[-1:], case.num_kv_heads * case.group_size, case.head_dim, case.dtype, QUERY)[0] * QUERY_SCALE
            self.slot_mapping[row] = slots[-1]
            self.context_lens[row] = n
            self.block_tables[row, : len(table)] = blocks.int()
        return expected

    def names(self, step: int, row: int, n: int) -> torch.Tensor:
        return (step * 1000 + row + 1) * 2**20 + torch.arange(n, device=self.judge.device)


def check_graph(judge: Judge, case: GraphCase) -> None:
    bucket = Bucket(judge, case)
    bucket.fill(0, case.captured)
    if judge.is_cuda:
        bucket.capture()
    else:
        bucket.eager()
    for step, lens in enumerate(case.replays, start=1):
        expected = bucket.fill(step, lens)
        bucket.run()
        what = f"replay {step} of {len(case.replays)}: {len(lens)} of {case.bucket} rows live, context_lens {list(lens)}"
        require_image(bucket, expected, what, lens)
        if "decode_attention" not in bucket.called:
            continue
        first = bucket.out[: len(lens)].clone()
        for row, n in enumerate(lens):
            require_row(bucket, first, step, row, n, what)
        bucket.fill(step, lens)
        bucket.run()
        if not torch.equal(bits(bucket.out[: len(lens)].contiguous()), bits(first)):
            found = ("found", "a second replay of the same step gives other bits")
            raise Broken(("step", what), found, likely="a result depends on an earlier replay")


def require_image(bucket: Bucket, expected: torch.Tensor, what: str, lens: tuple[int, ...]) -> None:
    element = first_difference(bits(bucket.cache).flatten(), bits(expected).flatten())
    if element is None:
        return
    side, _, block, offset, head, dim = (int(i) for i in torch.unravel_index(torch.tensor(element), bucket.cache.shape))
    slot = block * bucket.case.block_size + offset
    mapped = bucket.slot_mapping.tolist()
    told = f"row {mapped.index(slot)} must be here" if slot in mapped else "no row is mapped here"
    raise Broken(
        ("step", what),
        ("v_cache" if side else "k_cache", f"slot {slot} (physical block {block}, offset {offset}), kv head {head}, dimension {dim}: {told}"),
        likely="a row of padding is written" if slot not in mapped and len(lens) < bucket.case.bucket else "slots of the capture are written",
    )


def require_row(bucket: Bucket, out: torch.Tensor, step: int, row: int, n: int, what: str) -> None:
    case = bucket.case
    names = bucket.names(step, row, n)

    def history(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (rows_of(names[start:end], case.num_kv_heads, case.head_dim, case.dtype, kind) for kind in (KEY, VALUE))
        return keys, values

    products = bucket.judge.capabilities.float32_products
    want, limit = exact_and_limit_of_row(bucket.q[row], history, n, case.head_dim**-0.5, case.dtype, products)
    error = (out[row].double() - want).abs()
    wrong = ~(error <= limit)
    if bool(wrong.any()):
        head, dim = (int(x) for x in wrong.nonzero()[0])
        values = (float(t[head, dim]) for t in (out[row], want, limit))
        raise Broken(
            ("step", what),
            (f"out[{row}, {head}, {dim}]", "got {:.6g}, want {:.6g} ± {:.2g}".format(*values)),
            ("captured", f"with context_lens {list(case.captured)}"),
            likely="something of the capture was kept: lengths, splits, tiles or a table's width",
        )
    bucket.judge.note_budget(case.dtype, float((error / limit).max()))
