"""Paged attention in Triton: prefill (FlashAttention's online softmax over tiles) and decode (split-KV, the query group packed in a tile).

Both walk the block table in the kernel and read no length on the host. A decode step's tiles of keys, of all its sequences, are shared out
evenly among a fixed number of programs, as Stream-K does with products. Papers: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding
(crfm.stanford.edu/2023/10/12/flashdecoding.html), PagedAttention (arXiv 2309.06180), Stream-K (arXiv 2301.03598). The kernels are in
`gpu_impl.attention_kernels`, `gpu_impl.decode_kernels` and, for prefill on Hopper, `gpu_impl.prefill_hopper`.
"""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType

import torch
import triton

from gpu_impl.attention_kernels import prefill_kernel
from gpu_impl.attention_tiles import decode_programs, decode_tile, kind_of_pages, packs_group, prefill_tile
from gpu_impl.decode_kernels import combine_kernel, decode_kernel
from gpu_impl.launch import INTERPRET, ceil_div, launches_early, on_device_of, power_of_two, require, require_one_device

GLUON_OF_TRITON = "3.6."
LEAST_SHARED, MOST_SHARED = 64, 1024  # sequences: few sizes are compiled, and in larger batches each row is a program's alone
COMBINED_AT_ONCE = 64  # parts of a row
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(1, 257)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    block_tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, Hq, D): causal attention of each sequence's query tokens over its keys, aligned bottom-right (clauses PRE-1...9).

    q: (T, Hq, D); k, v: (T_k, Hk, D) end to end as cu_seqlens_k says, or, with block_tables (B, M), the caches (N, S, Hk, D). Any strides.
    Row t of a sequence with q_len queries and k_len keys sees positions 0 ... k_len - q_len + t; a row that sees nothing is 0. Raises
    ValueError for shapes, dtypes and devices that do not fit, NotImplementedError for a dtype or head dimension outside CAPABILITIES.
    """
    paged = block_tables is not None
    require(q.dim() == 3, f"q has shape {tuple(q.shape)}, it must be (T, Hq, D)")
    require(k.dim() == 3 + paged, f"k has shape {tuple(k.shape)}, it must be {'(N, S, Hk, D)' if paged else '(T_k, Hk, D)'}")
    require_heads(q, k, v, scale)
    num_seqs = cu_seqlens_q.shape[0] - 1
    require(
        cu_seqlens_q.shape == cu_seqlens_k.shape and num_seqs >= 0,
        f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)}, cu_seqlens_k {tuple(cu_seqlens_k.shape)}, both must be (B+1,)",
    )
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if block_tables is not None:
        require_tables(block_tables, num_seqs)
        tensors["block_tables"] = block_tables
    require_one_device(**tensors)
    num_tokens, num_heads, head_dim = q.shape
    out = _new_out(q)
    if num_tokens == 0 or num_seqs == 0 or max_seqlen_q == 0:
        return out.zero_().to(q.dtype)
    num_kv_heads, block_size = k.shape[-2], k.shape[1] if paged else 1
    group_size = num_heads // num_kv_heads
    pack = packs_group(max_seqlen_q, group_size)
    hopper = None if pack else hopper_module(q.device)
    if hopper is not None and hopper.takes(q, k, v, paged):
        with on_device_of(q):
            hopper.launch(q, k, v, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables)
        return out
    rows = max_seqlen_q * group_size if pack else max_seqlen_q
    tile = prefill_tile(rows, max_seqlen_k, head_dim, q.dtype)
    num_programs = ceil_div(rows, tile.block_m) * num_seqs * (num_kv_heads if pack else num_heads)
    with on_device_of(q):
        prefill_kernel[(num_programs,)](
            _readable(q),
            _readable(k),
            _readable(v),
            out,
            cu_seqlens_q,
            cu_seqlens_k,
            cu_seqlens_q if block_tables is None else block_tables,  # without tables the kernel does not look
            scale * math.log2(math.e),
            num_seqs,
            num_heads,
            group_size,
            block_size,
            block_size.bit_length() - 1,
            *q.stride(),
            *(k.stride() if paged else (0, *k.stride())),
            *(v.stride() if paged else (0, *v.stride())),
            *out.stride()[:2],
            *(block_tables.stride() if block_tables is not None else (0, 0)),
            cu_seqlens_q.stride(0),
            cu_seqlens_k.stride(0),
            PAGES=kind_of_pages(block_size, tile.block_n) if paged else "none",
            PACK=pack,
            SAME_STRIDES=k.stride() == v.stride(),
            HEAD_DIM=head_dim,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=max(16, power_of_two(head_dim)),
            WIDEN=INTERPRET and q.dtype == torch.bfloat16,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out.to(q.dtype)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    num_splits: int | None = None,
) -> torch.Tensor:
    """(B, Hq, D): one query per sequence over the first context_lens[i] positions of its table (clauses DEC-1...9).

    q: (B, Hq, D); k_cache, v_cache: (N, S, Hk, D); context_lens: (B,); block_tables: (B, M), spare columns and blocks are never read. Any
    strides. A row of context 0 is 0. The launch depends on shapes alone, so that a CUDA graph may replay it with other lengths. num_splits:
    into how many parts a row's keys are cut; None shares out the whole batch's keys evenly, a number (at least 1) makes a row's bits the same
    in every batch, and a head's the same beside any others. Raises ValueError for shapes, dtypes and devices that do not fit,
    NotImplementedError for a dtype or head dimension outside CAPABILITIES.
    """
    require(q.dim() == 3, f"q has shape {tuple(q.shape)}, it must be (B, Hq, D)")
    require(k_cache.dim() == 4, f"k_cache has shape {tuple(k_cache.shape)}, it must be (N, S, Hk, D)")
    require_heads(q, k_cache, v_cache, scale)
    num_seqs, num_heads, head_dim = q.shape
    require(context_lens.shape == (num_seqs,), f"q has {num_seqs} rows, context_lens has shape {tuple(context_lens.shape)}")
    require_tables(block_tables, num_seqs)
    require_one_device(q=q, k_cache=k_cache, v_cache=v_cache, context_lens=context_lens, block_tables=block_tables)
    block_size, num_kv_heads = k_cache.shape[1:3]
    longest = block_tables.shape[1] * block_size
    out = _new_out(q)
    if num_seqs == 0 or longest == 0:
        return out.zero_().to(q.dtype)
    require(num_splits is None or num_splits > 0, f"num_splits is {num_splits}, it must be at least 1")
    group_size = num_heads // num_kv_heads
    tile = decode_tile(group_size, longest, head_dim, q.dtype)
    num_rows = num_seqs * num_kv_heads * ceil_div(group_size, tile.block_m)
    tiles_a_row = ceil_div(longest, tile.block_n)
    if num_splits is None and (tiles_a_row == 1 or num_seqs > MOST_SHARED):
        num_splits = 1
    num_programs = decode_programs(num_rows * tiles_a_row, head_dim, q.device) if num_splits is None else num_rows * num_splits
    whole = num_splits == 1 or num_programs == 1  # every row is some program's alone
    if whole:
        partial = partial_max = partial_sum = out  # neither written nor read
    else:
        partial = torch.empty((num_programs, 2, tile.block_m, head_dim), dtype=torch.float32, device=q.device)
        partial_max, partial_sum = torch.empty((2, num_programs, 2, tile.block_m), dtype=torch.float32, device=q.device)
    early = not whole and launches_early(q.device)
    constants = {
        "NUM_SPLITS": num_splits or 0,
        "BLOCK_B": LEAST_SHARED if num_splits else max(LEAST_SHARED, power_of_two(num_seqs)),
        "HEAD_DIM": head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": max(16, power_of_two(head_dim)),
        "EARLY": early,
    }
    with on_device_of(q):
        decode_kernel[(num_programs,)](
            _readable(q),
            _readable(k_cache),
            _readable(v_cache),
            out,
            partial,
            partial_max,
            partial_sum,
            context_lens,
            block_tables,
            scale * math.log2(math.e),
            num_seqs,
            num_kv_heads,
            group_size,
            block_size,
            block_size.bit_length() - 1,
            *q.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            *out.stride()[:2],
            *block_tables.stride(),
            context_lens.stride(0),
            PAGES=kind_of_pages(block_size, tile.block_n),
            SAME_STRIDES=k_cache.stride() == v_cache.stride(),
            WIDEN=INTERPRET and q.dtype == torch.bfloat16,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **constants,
        )
        if not whole:
            combine_kernel[(num_programs * min(tile.block_m, group_size),)](
                out,
                partial,
                partial_max,
                partial_sum,
                context_lens,
                num_seqs,
                num_kv_heads,
                group_size,
                num_programs,
                *out.stride()[:2],
                context_lens.stride(0),
                BLOCK_PARTS=COMBINED_AT_ONCE,
                num_warps=4,
                **constants,
                **({"launch_pdl": True} if early else {}),
            )
    return out.to(q.dtype)


@functools.cache
def hopper_module(device: torch.device) -> ModuleType | None:
    """`gpu_impl.prefill_hopper` on such a GPU, with the Triton that it was written for: Gluon is not the same in every version."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0) or not triton.__version__.startswith(GLUON_OF_TRITON):
        return None
    return importlib.import_module("gpu_impl.prefill_hopper")


def require_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
    """Heads, head dimension, dtype and scale fit each other and these kernels."""
    num_heads, head_dim = q.shape[-2:]
    require(k.shape == v.shape, f"keys have shape {tuple(k.shape)}, values {tuple(v.shape)}")
    num_kv_heads = k.shape[-2]
    require(
        num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        f"{num_heads} query heads are no multiple of {num_kv_heads} key/value heads",
    )
    require(k.shape[-1] == head_dim, f"q has head dimension {head_dim}, keys have {k.shape[-1]}")
    require(q.dtype == k.dtype == v.dtype, f"q is {q.dtype}, keys are {k.dtype}, values {v.dtype}")
    require(0 < scale < math.inf, f"scale is {scale}, it must be positive and finite")
    if q.dtype not in DTYPES:
        raise NotImplementedError(f"attention takes float32, float16 and bfloat16, q is {q.dtype}")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"attention takes head dimensions {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, q has {head_dim}")


def require_tables(block_tables: torch.Tensor, num_seqs: int) -> None:
    require(
        block_tables.dim() == 2 and block_tables.shape[0] == num_seqs,
        f"block_tables has shape {tuple(block_tables.shape)}, it must be ({num_seqs}, M)",
    )


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The interpreter takes bfloat16 bits for integers, so it is handed them as such."""
    return tensor.view(torch.int16) if INTERPRET and tensor.dtype == torch.bfloat16 else tensor


def _new_out(q: torch.Tensor) -> torch.Tensor:
    """(T, Hq, D) contiguous; float32 in the interpreter for bfloat16, whose rounding there is wrong."""
    dtype = torch.float32 if INTERPRET and q.dtype == torch.bfloat16 else q.dtype
    return torch.empty(q.shape, dtype=dtype, device=q.device)
