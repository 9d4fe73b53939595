"""The KV-cache write: one Triton kernel that copies key and value rows into their slots, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_impl.launch import INTERPRET, ceil_div, launches_early, on_device_of, power_of_two, require, require_one_device

# floats are copied as integers of their width, so that no conversion can touch a NaN payload, a -0.0 or a subnormal
ROW_BYTES = 2048  # of keys, and of values, of a program: 16 bytes a thread; more of them were slower
LEAST_WIDTH = 64  # elements of a program's row: few sizes are compiled
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def store_kvcache(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write row t of key and value into slot slot_mapping[t], in place; a negative slot is skipped (clauses KV-1...6).

    key, value: (T, Hk, D); k_cache, v_cache: (N, S, Hk, D) of the same dtype; slot_mapping: (T,) int32 or int64. Any strides, any offsets
    within int64. Slots past the cache are not looked for (that would wait for the device). Raises ValueError for shapes, dtypes and devices
    that do not fit.
    """
    require(key.dim() == 3, f"key has shape {tuple(key.shape)}, it must be (T, Hk, D)")
    require(k_cache.dim() == 4, f"k_cache has shape {tuple(k_cache.shape)}, it must be (N, S, Hk, D)")
    require(key.shape == value.shape, f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}")
    require(k_cache.shape == v_cache.shape, f"k_cache has shape {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}")
    require(
        key.shape[1:] == k_cache.shape[2:],
        f"a row of key has shape {tuple(key.shape[1:])}, a slot of the cache {tuple(k_cache.shape[2:])}",
    )
    num_tokens, num_kv_heads, head_dim = key.shape
    require(
        slot_mapping.shape == (num_tokens,),
        f"slot_mapping has shape {tuple(slot_mapping.shape)}, key has {num_tokens} rows",
    )
    require(slot_mapping.dtype in (torch.int32, torch.int64), f"slot_mapping is {slot_mapping.dtype}, it must be int32 or int64")
    require(
        key.dtype == value.dtype == k_cache.dtype == v_cache.dtype,
        f"key is {key.dtype} and value {value.dtype}, the caches are {k_cache.dtype} and {v_cache.dtype}",
    )
    require_one_device(key=key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    width = num_kv_heads * head_dim
    if num_tokens == 0 or width == 0 or k_cache.numel() == 0:
        return
    bits = BITS[key.element_size()]
    flat_rows = all(t.stride(-1) == 1 and (num_kv_heads == 1 or t.stride(-2) == head_dim) for t in (key, value, k_cache, v_cache))
    flat_slots = all(cache.stride(0) == cache.shape[1] * cache.stride(1) for cache in (k_cache, v_cache))
    block_width = min(power_of_two(width if INTERPRET else max(width, LEAST_WIDTH)), 2048)
    rows = min(power_of_two(num_tokens), max(1, 2**17 // block_width)) if INTERPRET else max(1, ROW_BYTES // (block_width * key.element_size()))
    early = launches_early(key.device)
    with on_device_of(key):
        _store_kernel[(ceil_div(num_tokens, rows), ceil_div(width, block_width))](
            key.view(bits),
            value.view(bits),
            k_cache.view(bits),
            v_cache.view(bits),
            slot_mapping,
            num_tokens,
            width,
            head_dim,
            k_cache.shape[1],
            slot_mapping.stride(0),
            *key.stride(),
            *value.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            FLAT_ROWS=flat_rows,
            FLAT_SLOTS=flat_slots,
            ROWS=rows,
            BLOCK_WIDTH=block_width,
            EARLY=early,
            num_warps=4,
            **({"launch_pdl": True} if early else {}),
        )


@triton.jit(do_not_specialize=[  # what only strided heads need, and what changes from batch to batch
    "num_tokens", "head_dim", "block_size", "stride_slots", "stride_kh", "stride_kd", "stride_vh", "stride_vd", "stride_kch", "stride_kcd",
    "stride_vch", "stride_vcd",
])
def _store_kernel(
    key, value, k_cache, v_cache, slot_mapping,
    num_tokens, width, head_dim, block_size, stride_slots,
    stride_kt, stride_kh, stride_kd, stride_vt, stride_vh, stride_vd,
    stride_kcn, stride_kcs, stride_kch, stride_kcd, stride_vcn, stride_vcs, stride_vch, stride_vcd,
    FLAT_ROWS: tl.constexpr, FLAT_SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()  # for the kernel before, while whose last programs ran this one was launched
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_mapping + row * stride_slots, mask=row < num_tokens, other=-1).to(tl.int64)
    element = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    read = (row < num_tokens)[:, None] & (element < width)[None, :]  # skipped rows too: so this does not wait for the slots
    written = (slot >= 0)[:, None] & (element < width)[None, :]
    # a negative slot's block and offset are never used, but // and % of negatives differ between compiler and interpreter
    slot = tl.maximum(slot, 0)
    k_row, v_row = key + row * stride_kt, value + row * stride_vt
    if FLAT_SLOTS:
        k_slot, v_slot = k_cache + slot * stride_kcs, v_cache + slot * stride_vcs
    else:
        block, offset = slot // block_size, slot % block_size
        k_slot, v_slot = k_cache + (block * stride_kcn + offset * stride_kcs), v_cache + (block * stride_vcn + offset * stride_vcs)
    if FLAT_ROWS:
        k = tl.load(k_row[:, None] + element[None, :], mask=read, other=0)
        v = tl.load(v_row[:, None] + element[None, :], mask=read, other=0)
        tl.store(k_slot[:, None] + element[None, :], k, mask=written)
        tl.store(v_slot[:, None] + element[None, :], v, mask=written)
    else:
        head, dim = (element // head_dim).to(tl.int64), (element % head_dim).to(tl.int64)
        k = tl.load(k_row[:, None] + (head * stride_kh + dim * stride_kd)[None, :], mask=read, other=0)
        v = tl.load(v_row[:, None] + (head * stride_vh + dim * stride_vd)[None, :], mask=read, other=0)
        tl.store(k_slot[:, None] + (head * stride_kch + dim * stride_kcd)[None, :], k, mask=written)
        tl.store(v_slot[:, None] + (head * stride_vch + dim * stride_vcd)[None, :], v, mask=written)
