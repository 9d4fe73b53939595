"""prefill_attention and decode_attention over a paged cache. Bytes moved: q, the visible K and V once, and the output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.cases import AttentionCase, cumulative, on_this_machine, paged_cache, randn, real_attention, seeded, small_attention
from benchmarks.contenders import DEVICE, Contender, pairs
from benchmarks.judge import assert_attention_row, assert_output, some_rows, unless_refused
from benchmarks.timing import sets_needed
from reference.attention import walk_block_table

SEQUENCES_JUDGED = 3

PREFILL_CASES = on_this_machine(
    small_attention(q_len=19, cached=0, block_size=None),
    small_attention(q_len=19, cached=21, block_size=16),
    *(real_attention(b, n, 0, s) for b, n in ((4, 8192), (16, 2048), (64, 512)) for s in (None, 16, 256)),
    real_attention(16, 512, 7680, 256),
)
DECODE_CASES = on_this_machine(
    small_attention(q_len=1, cached=48, block_size=16),  # the newest token opens a block
    *(real_attention(b, 1, n - 1, s) for b, n in ((1, 8192), (8, 32768), (64, 8192), (256, 2048)) for s in (16, 256)),
)


@pytest.mark.parametrize("case, contender", pairs("prefill_attention", PREFILL_CASES))
def test_prefill_attention(case: AttentionCase, contender: Contender, timed):
    generator = seeded()
    q = randn((case.num_sequences * case.q_len, case.query_heads, case.head_dim), case.dtype, generator)
    if case.block_size is None:
        shape = (case.num_sequences * case.k_len, case.kv_heads, case.head_dim)
        k, v, block_tables = randn(shape, case.dtype, generator), randn(shape, case.dtype, generator), None
    else:
        k, v, block_tables = paged_cache(case, generator)
    scale = case.head_dim**-0.5
    metadata = dict(
        cu_seqlens_q=cumulative(case.q_len, case.num_sequences),
        cu_seqlens_k=cumulative(case.k_len, case.num_sequences),
        max_seqlen_q=case.q_len,
        max_seqlen_k=case.k_len,
        block_tables=block_tables,
    )

    def call_on(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: contender.functions.prefill_attention(q, k, v, scale=scale, **metadata)

    def keys_and_values(sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        if block_tables is not None:
            return walk_block_table(k, v, block_tables[sequence].tolist(), case.k_len)
        rows = slice(sequence * case.k_len, (sequence + 1) * case.k_len)
        return k[rows], v[rows]

    judge_rows(unless_refused(call_on(q, k, v)), q, keys_and_values, case, scale, contender.name)
    visible_pairs = case.num_sequences * sum(range(case.cached + 1, case.k_len + 1))
    time_attention(timed, call_on, (q, k, v), case, contender, "prefill_attention", visible_pairs)


@pytest.mark.parametrize("case, contender", pairs("decode_attention", DECODE_CASES))
def test_decode_attention(case: AttentionCase, contender: Contender, timed):
    generator = seeded()
    q = randn((case.num_sequences, case.query_heads, case.head_dim), case.dtype, generator)
    k_cache, v_cache, block_tables = paged_cache(case, generator)
    context_lens = torch.full((case.num_sequences,), case.k_len, dtype=torch.int32, device=DEVICE)
    scale = case.head_dim**-0.5

    def call_on(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: contender.functions.decode_attention(
            q, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=scale
        )

    def keys_and_values(sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        return walk_block_table(k_cache, v_cache, block_tables[sequence].tolist(), case.k_len)

    inputs = (q, k_cache, v_cache)
    judge_rows(unless_refused(call_on(*inputs)), q, keys_and_values, case, scale, contender.name)
    time_attention(timed, call_on, inputs, case, contender, "decode_attention", visible_pairs=case.num_sequences * case.k_len)


def judge_rows(
    out: torch.Tensor,
    q: torch.Tensor,
    keys_and_values: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    case: AttentionCase,
    scale: float,
    who: str,
) -> None:
    """Some rows of some sequences against the float64 oracle, and every element of the output for being a number."""
    assert_output(out, tuple(q.shape), q.dtype, who)
    assert torch.isfinite(out).all(), f"{who}: the output is not finite everywhere"
    for sequence in some_rows(case.num_sequences, SEQUENCES_JUDGED):
        keys, values = keys_and_values(sequence)
        for t in some_rows(case.q_len):
            row = sequence * case.q_len + t
            visible = case.cached + t + 1
            where = f"{who}: sequence {sequence}, position {visible - 1}"
            assert_attention_row(out[row], q[row], keys[:visible], values[:visible], scale, where)


def time_attention(
    timed: Callable[..., None],
    call_on: Callable[..., Callable[[], torch.Tensor]],
    inputs: tuple[torch.Tensor, ...],
    case: AttentionCase,
    contender: Contender,
    function: str,
    visible_pairs: int,
) -> None:
    tokens_read = case.num_sequences * case.k_len
    queries = case.num_sequences * case.q_len
    elements = 2 * tokens_read * case.kv_heads * case.head_dim + 2 * queries * case.query_heads * case.head_dim
    bytes_moved = elements * case.dtype.itemsize
    sets = [inputs, *(tuple(tensor.clone() for tensor in inputs) for _ in range(sets_needed(bytes_moved) - 1))]
    timed(
        [call_on(*each) for each in sets],
        group=f"{function} {case.name}",
        contender=contender.name,
        bytes_moved=bytes_moved,
        flops=4 * visible_pairs * case.query_heads * case.head_dim,
    )
