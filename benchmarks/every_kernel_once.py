"""`compute-sanitizer --tool memcheck python -m benchmarks.every_kernel_once`: each kernel of gpu_impl on a small case, for tools that watch it.

Partial tiles, an empty sequence, pages that are no power of two, unused table cells, a slot of -1. On a machine without a GPU the interpreter runs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch

import gpu_impl
from gpu_impl import attention
from gpu_impl.launch import INTERPRET
from reference.records import SequenceState

DEVICE = "cpu" if INTERPRET else "cuda"
DTYPES = (torch.bfloat16, torch.float32)
CASES = ((16, 128, 2, 4), (100, 80, 1, 3), (256, 64, 2, 2), (128, 256, 1, 1))  # block size, head dimension, kv heads, group size
CACHED, QUERIES = (0, 7, 0, 1_000), (1, 70, 0, 200)  # short and long as `gpu_impl.prefill_hopper.PEELED` cuts them


def sums(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def attend(dtype: torch.dtype, block_size: int, head_dim: int, kv_heads: int, group_size: int) -> Iterator[str]:
    lengths = tuple(map(sum, zip(CACHED, QUERIES, strict=True)))
    columns = -(-max(lengths) // block_size)
    num_blocks = len(lengths) * columns + 1
    k_cache, v_cache = torch.randn(2, num_blocks, block_size, kv_heads, head_dim, device=DEVICE).to(dtype)
    tables = torch.randperm(num_blocks)[:-1].reshape(len(lengths), columns).int()
    tables[torch.arange(columns) * block_size >= torch.tensor(lengths)[:, None]] = -1
    rows = torch.randn(sum(QUERIES), (1 + group_size) * kv_heads, head_dim, device=DEVICE).to(dtype)
    q, k = rows.split((group_size * kv_heads, kv_heads), dim=1)
    slots = torch.randperm(num_blocks * block_size)[: len(k)].int()
    slots[3] = -1
    gpu_impl.store_kvcache(k, k, k_cache, v_cache, slots.to(DEVICE))
    yield "store_kvcache"
    metadata = dict(block_tables=tables.to(DEVICE), scale=head_dim**-0.5)
    for num_splits in (None, 1, 3):
        lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        attention.decode_attention(q[: len(lengths)], k_cache, v_cache, context_lens=lens, num_splits=num_splits, **metadata)
        yield f"decode_attention, {num_splits or 'shared out'}"
    chunks = dict(cu_seqlens_q=sums(QUERIES), max_seqlen_q=max(QUERIES))
    attention.prefill_attention(q, k_cache, v_cache, cu_seqlens_k=sums(lengths), max_seqlen_k=max(lengths), **chunks, **metadata)
    attention.prefill_attention(q, k, k, cu_seqlens_k=sums(QUERIES), max_seqlen_k=max(QUERIES), scale=head_dim**-0.5, **chunks)
    yield "prefill_attention, paged and dense"


def the_rest() -> Iterator[str]:
    states = [SequenceState(list(range(100)), 20, 50, [3, 1, 2, 0, 5, 6, 7]), SequenceState(list(range(33)), 0, 33, [9, 8, 4])]
    batch = gpu_impl.prepare_prefill(states, 16, device=DEVICE)
    gpu_impl.prepare_decode(states, 16, device=DEVICE)
    gpu_impl.compute_slot_mapping(batch.positions, batch.cu_seqlens_q, batch.block_tables, 16)
    yield "prepare_prefill, prepare_decode, compute_slot_mapping"
    for dtype in DTYPES:
        logits = torch.randn(5, 5_003, device=DEVICE).to(dtype)
        gpu_impl.sample(logits, torch.ones(5, device=DEVICE))
        gpu_impl.sample(logits, torch.ones(5, device=DEVICE), noise=torch.rand(5, 5_003, device=DEVICE).exponential_())
        gpu_impl.last_token_logits(*torch.randn(2, 83, 64, device=DEVICE).to(dtype), cu_seqlens_q=sums((3, 80)))
        yield f"sample, last_token_logits, {dtype}"


def main() -> int:
    torch.manual_seed(0)
    done = [told for dtype in DTYPES for case in CASES for told in attend(dtype, *case)]
    done += the_rest()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{len(done)} groups of calls on {DEVICE}: {'; '.join(dict.fromkeys(done))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
