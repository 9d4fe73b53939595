"""A case's inputs and calls: what the benchmarks time and what the dispatch table is written from are the same calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.cases import AttentionCase, PagedCache, of_sequence, paged_cache, prefix_sums, randn, seeded
from benchmarks.contenders import DEVICE
from benchmarks.judge import assert_attention_row, assert_output, some_rows
from benchmarks.timing import sets_needed

SEQUENCES_JUDGED = 3
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    case: AttentionCase
    function: str  # "prefill_attention" or "decode_attention"
    qkv: Tensors  # q, and K and V of this pass or the caches
    metadata: dict[str, Any]

    def call(self, functions: Any, qkv: Tensors | None = None) -> torch.Tensor:
        return getattr(functions, self.function)(*(qkv or self.qkv), **self.metadata)

    def calls(self, functions: Any) -> list[Callable[[], torch.Tensor]]:
        """The same work on as many copies of the inputs as do not fit in the L2 cache."""
        copies = sets_needed(self.case.bytes_moved) - 1
        q, k, v = self.qkv
        sets = [self.qkv, *((q.clone(), k.clone(), v.clone()) for _ in range(copies))]
        return [functools.partial(self.call, functions, each) for each in sets]

    def of_sequence(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (k_len, Hk, D) of one sequence."""
        _, k, v = self.qkv
        k_len, tables = self.case.k_lens[sequence], self.metadata.get("block_tables")
        if tables is not None:
            return of_sequence(PagedCache(k, v, tables), sequence, k_len)
        start = sum(self.case.k_lens[:sequence])
        return k[start : start + k_len], v[start : start + k_len]

    def judge(self, out: torch.Tensor, who: str) -> None:
        """Some rows of some sequences against the float64 oracle, and every element of the output for being a number."""
        case, q = self.case, self.qkv[0]
        assert_output(out, tuple(q.shape), q.dtype, who)
        assert torch.isfinite(out).all(), f"{who}: the output is not finite everywhere"
        for sequence in some_rows(case.num_sequences, SEQUENCES_JUDGED):
            keys, values = self.of_sequence(sequence)
            first_row, q_len = sum(case.q_lens[:sequence]), case.q_lens[sequence]
            for t in some_rows(q_len):
                visible = len(keys) - q_len + t + 1
                where = f"{who}: sequence {sequence}, position {visible - 1}"
                row = first_row + t
                assert_attention_row(out[row], q[row], keys[:visible], values[:visible], self.metadata["scale"], where)


def prefill_inputs(case: AttentionCase) -> Inputs:
    generator, model = seeded(), case.model
    q = randn((case.num_tokens, model.query_heads, model.head_dim), case.dtype, generator)
    if case.block_size is None:
        shape = (sum(case.k_lens), model.kv_heads, model.head_dim)
        k, v, block_tables = randn(shape, case.dtype, generator), randn(shape, case.dtype, generator), None
    else:
        k, v, block_tables = paged_cache(case, generator)
    metadata = dict(
        cu_seqlens_q=prefix_sums(case.q_lens),
        cu_seqlens_k=prefix_sums(case.k_lens),
        max_seqlen_q=max(case.q_lens),
        max_seqlen_k=max(case.k_lens),
        scale=model.head_dim**-0.5,
        block_tables=block_tables,
    )
    return Inputs(case, "prefill_attention", (q, k, v), metadata)


def decode_inputs(case: AttentionCase) -> Inputs:
    generator, model = seeded(), case.model
    q = randn((case.num_sequences, model.query_heads, model.head_dim), case.dtype, generator)
    k_cache, v_cache, block_tables = paged_cache(case, generator)
    context_lens = torch.tensor(case.k_lens, dtype=torch.int32, device=DEVICE)
    metadata = dict(context_lens=context_lens, block_tables=block_tables, scale=model.head_dim**-0.5)
    return Inputs(case, "decode_attention", (q, k_cache, v_cache), metadata)


def inputs_of(function: str, case: AttentionCase) -> Inputs:
    return {"prefill_attention": prefill_inputs, "decode_attention": decode_inputs}[function](case)
