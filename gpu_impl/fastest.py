"""Attention through the fastest that supports the case: this package's Triton kernels, or FlashAttention 2, 3 or 4 where it is installed.

Which one is no guess: `dispatch_table.json`, written by `python -m benchmarks.dispatch --write` from times on one GPU, names the fastest for
each shape that was tried; `python -m gpu_impl.dispatch` prints it. A call takes the nearest shape that was tried with the same heads, dtype
and class of page sizes. It is the own kernel for heads and dtypes that were not tried, on another GPU, on a CPU and in the interpreter, and
where a library is missing, refuses the call or has another version than the one that was timed. Shapes alone decide, no length is read
from the device, so that a CUDA graph holds what would be chosen for its bucket.

The claims of `gpu_impl.CAPABILITIES` hold whatever is chosen: the command that writes the table has the suite judge them first, on the path that is
called here (`gpu_impl.flash_paths`), and leaves out a library that breaks one. They are judged of a version, hence the own kernel for any
other. A prefill's choice does not depend on the number of heads, and a library that gives some heads alone other bits than all of them is
left out for that shape, so that ranks which share the heads agree with one that has them all. A decode step with `num_splits` asks for
bits that are the same in every batch, which no library promises: own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gpu_impl import attention
from gpu_impl.dispatch_table import OWN, Heads, Shape, Table, decode_shape, heads_of, prefill_shape, read_table
from gpu_impl.flash_paths import PATHS, Through, version_of
from gpu_impl.launch import INTERPRET

NOT_HERE = (ImportError, NotImplementedError, ValueError)  # what is wrong with a call itself is told by the own kernel
_table = read_table()
_unusable: set[str] = set()


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
    """(T, Hq, D), as `gpu_impl.attention.prefill_attention`, through the fastest that supports the case."""
    path = None
    if _table.entries and not INTERPRET and q.dim() == 3 and k.dim() == (3 if block_tables is None else 4):
        shape = prefill_shape(q, k, len(cu_seqlens_q) - 1, max_seqlen_q, max_seqlen_k)
        path = _chosen(heads_of("prefill_attention", q, k, None if block_tables is None else k.shape[1]), shape, _gpu(q.device))
    return _first_of(
        path,
        lambda functions: functions.prefill_attention(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            scale=scale, block_tables=block_tables,
        ),
    )  # fmt: skip


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
    """(B, Hq, D), as `gpu_impl.attention.decode_attention`, through the fastest that supports the case."""
    if num_splits is not None:
        return attention.decode_attention(
            q, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=scale, num_splits=num_splits
        )
    path = None
    if _table.entries and not INTERPRET and q.dim() == 3 and k_cache.dim() == 4 and block_tables.dim() == 2:
        heads = heads_of("decode_attention", q, k_cache, k_cache.shape[1])
        path = _chosen(heads, decode_shape(q, k_cache, block_tables), _gpu(q.device))
    return _first_of(
        path,
        lambda functions: functions.decode_attention(
            q, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=scale
        ),
    )  # fmt: skip


def why_not(table: Table, name: str) -> str:
    """Why a choice of the table cannot be followed on this machine; empty if it can."""
    if name == OWN:
        return ""
    if name not in PATHS:
        return f"{name} is not known here"
    library = PATHS[name].name
    if not version_of(library):
        return f"{library} is not installed"
    if version_of(library) != table.libraries.get(library):
        return f"{library} is {version_of(library)}, judged was {table.libraries.get(library) or 'none'}"
    return ""


@functools.lru_cache(maxsize=4096)
def _chosen(heads: Heads, shape: Shape, gpu: str) -> Through | None:
    """The path to a library, or None for the own kernel."""
    if gpu != _table.gpu:
        return None
    name = _table.fastest(heads, shape)
    return None if name == OWN or name in _unusable or why_not(_table, name) else PATHS[name]


@functools.cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _first_of(path: Through | None, call: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """The call through a library if one was chosen and takes it, else through the own kernel."""
    if path is not None:
        try:
            return call(path)
        except NOT_HERE as reason:
            if isinstance(reason, ImportError):  # half installed: it is not tried again
                _unusable.update(name for name, other in PATHS.items() if other.name == path.name)
                _chosen.cache_clear()
    return call(attention)
