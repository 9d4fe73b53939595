"""Prefill on Hopper: what its kernel can read, and its launch. The kernel is `gpu_impl.prefill_hopper_kernel`, for one version of Triton."""

from __future__ import annotations

import math

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpu_impl.launch import ceil_div, num_multiprocessors
from gpu_impl.prefill_hopper_kernel import prefill_kernel
from gpu_impl.prefill_hopper_ring import ROWS
from gpu_impl.prefill_items import LEAST_SORTED, MOST_SORTED, plan_kernel

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
TILE_ROWS = 128  # keys of a tile
MOST_IN_GROUP = 128  # query heads
WIDTH = 64  # of a swizzled row of half precision
PEELED = 1024  # keys: for fewer, the smaller code of a kernel whose first tile is like the others is faster
STAGES = 3  # tiles of keys, and of values, that are on their way or in use


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, paged: bool) -> bool:
    """Whether this kernel reads such tensors: half precision, heads of 64 or 128, queries 16 bytes at a time, pages in whole boxes."""
    if q.dtype not in DTYPES or q.shape[-1] not in HEAD_DIMS or q.stride(-1) != 1:
        return False
    if q.shape[1] // k.shape[-2] > MOST_IN_GROUP or max(q.stride()) > 2**23:  # what is counted in 16 bits, and in 32
        return False
    if q.data_ptr() % 16 or q.stride(0) % 16 or q.stride(1) % 16:
        return False
    if paged and (k.shape[1] < 16 or k.shape[1] & (k.shape[1] - 1)):
        return False
    return all(_lies_in_rows(each, paged) for each in (k, v))


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    block_tables: torch.Tensor | None,
) -> None:
    """Write `out` as `attention.prefill_attention` says, of tensors that `takes` accepts."""
    num_heads, head_dim = q.shape[1:]
    num_seqs = len(cu_seqlens_q) - 1
    block_size = TILE_ROWS if block_tables is None else k.shape[1]
    box = min(block_size, TILE_ROWS)
    num_kv_heads = k.shape[-2]
    group_size = num_heads // num_kv_heads
    plan = torch.empty(2 * num_seqs + 2, dtype=torch.int32, device=q.device)
    plan_kernel[(1,)](
        plan,
        cu_seqlens_q,
        cu_seqlens_k,
        num_seqs,
        num_kv_heads,
        group_size,
        cu_seqlens_q.stride(0),
        cu_seqlens_k.stride(0),
        ROWS=ROWS.value,
        BLOCK=LEAST_SORTED if num_seqs <= LEAST_SORTED else MOST_SORTED,
        EARLY=True,
    )
    most_items = ceil_div(max_seqlen_q * group_size, ROWS.value) * num_seqs * num_kv_heads
    prefill_kernel[(min(most_items, num_multiprocessors(q.device)),)](
        q,
        _boxes(k, box),
        _boxes(v, box),
        out,
        plan,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_q if block_tables is None else block_tables,  # without tables the kernel does not look
        scale * math.log2(math.e),
        num_seqs,
        group_size,
        ceil_div(1 << 16, group_size),
        block_size,
        block_size.bit_length() - 1,
        *q.stride()[:2],
        *out.stride()[:2],
        *(block_tables.stride() if block_tables is not None else (0, 0)),
        cu_seqlens_q.stride(0),
        cu_seqlens_k.stride(0),
        PAGED=block_tables is not None,
        BOX=box,
        BLOCK_N=TILE_ROWS,
        HEAD_DIM=head_dim,
        STAGES=STAGES,
        PEEL=max_seqlen_k > PEELED,
        num_warps=4,
        launch_pdl=True,
    )


def _lies_in_rows(keys: torch.Tensor, paged: bool) -> bool:
    """(slots, Hk * D), as a descriptor tells it: slots a fixed stride of whole 16 bytes apart, fewer than an int32 counts."""
    slot, head, dim = keys.stride()[-3:]
    if keys.numel() == 0 or dim != 1 or (head != keys.shape[-1] and keys.shape[-2] > 1):
        return False
    if paged and keys.stride(0) != keys.shape[1] * slot and keys.shape[0] > 1:
        return False
    return slot * keys.element_size() % 16 == 0 and keys.data_ptr() % 16 == 0 and keys.shape[:-2].numel() < 2**31


def _boxes(keys: torch.Tensor, box: int) -> TensorDescriptor:
    """Keys or values as rows (slots, Hk * D), to be loaded in boxes of (box, 64)."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape = [keys.shape[:-2].numel(), keys.shape[-2] * keys.shape[-1]]
    return TensorDescriptor(keys, shape, [keys.stride(-3), 1], [box, WIDTH], layout)
