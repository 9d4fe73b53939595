"""FlashAttention 2, 3 and 4 behind the two attention functions of the contract: `gpu_impl.flash` is FA2, `gpu_impl.flash:fa3` another one.

fa2  pip install flash-attn --no-build-isolation        pages that are multiples of 256
fa3  pip install vllm (its vllm_flash_attn), or flash_attn_interface built from the FlashAttention repository's hopper/
fa4  pip install flash-attn-4

What a library does not take is refused with NotImplementedError before it is called. The table goes to it with its unused cells set to page
0, since a library may load ahead of what it uses; keys past a sequence's length are the library's to mask.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from gpu_impl.attention import require_heads, require_tables
from gpu_impl.launch import require

HALVES = (torch.float16, torch.bfloat16)


class FlashAttention:
    """One version of FlashAttention. Subclasses state its limits and call it."""

    name = ""
    package = ""  # how to get it
    head_dims: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    claims: tuple[str, ...] = ("spare_blocks",)

    @property
    def CAPABILITIES(self) -> Mapping[str, object]:
        return {"dtypes": HALVES, "head_dims": self.head_dims, "block_sizes": self.block_sizes, "claims": self.claims}

    def prefill_attention(
        self,
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
        """(T, Hq, D), as `gpu_impl.prefill_attention`. Raises NotImplementedError outside the limits, ImportError without the library."""
        self._require_supported(q, k, v, scale, None if block_tables is None else k.shape[1])
        cu_seqlens_q, cu_seqlens_k = _int32(cu_seqlens_q), _int32(cu_seqlens_k)
        require(cu_seqlens_q.shape == cu_seqlens_k.shape, f"cu_seqlens_q has {len(cu_seqlens_q)} entries, cu_seqlens_k {len(cu_seqlens_k)}")
        if q.shape[0] == 0 or len(cu_seqlens_q) == 1 or max_seqlen_k == 0:
            return torch.zeros_like(q)
        tables = None
        if block_tables is not None:
            require_tables(block_tables, len(cu_seqlens_q) - 1)
            tables = _harmless(block_tables, cu_seqlens_k[1:] - cu_seqlens_k[:-1], k.shape[1])
        return self._prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, tables)

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """(B, Hq, D), as `gpu_impl.decode_attention`. Raises NotImplementedError outside the limits, ImportError without the library."""
        self._require_supported(q, k_cache, v_cache, scale, k_cache.shape[1])
        require(context_lens.shape == q.shape[:1], f"q has {len(q)} rows, context_lens has shape {tuple(context_lens.shape)}")
        require_tables(block_tables, len(q))
        if q.shape[0] == 0 or block_tables.shape[1] == 0:
            return torch.zeros_like(q)
        context_lens = _int32(context_lens)
        tables = _harmless(block_tables, context_lens, k_cache.shape[1])
        return self._decode(q, k_cache, v_cache, context_lens, tables, scale)

    @cached_property
    def _library(self) -> Any:
        """The functions of the library, imported at the first call."""
        try:
            return self._import()
        except ImportError as error:
            raise ImportError(f"gpu_impl.flash:{self.name} needs {self.package}") from error

    def _import(self) -> Any:
        raise NotImplementedError

    def _prefill(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, tables) -> torch.Tensor:
        raise NotImplementedError

    def _decode(self, q, k_cache, v_cache, context_lens, tables, scale) -> torch.Tensor:
        raise NotImplementedError

    def _require_supported(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, block_size: int | None) -> None:
        require_heads(q, k, v, scale)
        if q.dtype not in HALVES:
            raise NotImplementedError(f"{self.name} takes float16 and bfloat16, q is {q.dtype}")
        if q.device.type != "cuda":
            raise NotImplementedError(f"{self.name} runs on CUDA devices, q lies on {q.device}")
        if q.shape[-1] not in self.head_dims:
            raise NotImplementedError(f"{self.name} takes head dimensions {_listed(self.head_dims)}, q has {q.shape[-1]}")
        if block_size is not None and block_size not in self.block_sizes:
            raise NotImplementedError(f"{self.name} takes block sizes {_listed(self.block_sizes)}, the cache has {block_size}")
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
            if tensor.stride(-1) != 1 or any(stride % 8 for stride in strides) or tensor.data_ptr() % 16:
                raise NotImplementedError(
                    f"{self.name} loads 16 bytes at once, {name} has strides {tensor.stride()} and starts at address {tensor.data_ptr()}"
                )


class FlashAttention2(FlashAttention):
    """flash_attn 2.8: arXiv 2307.08691. Decode is split-KV by the library's own choice of splits."""

    name = "fa2"
    package = "the package flash-attn: pip install flash-attn --no-build-isolation"
    # dimensions that the library rounds to its kernels for 64 and 128. A build with those kernels alone takes others too, and its split-KV
    # combine then writes every row but the first to the wrong place (found by DEC-1: D 16, batch of 2)
    head_dims = (*range(40, 65, 8), *range(104, 129, 8))
    block_sizes = tuple(range(256, 4097, 256))

    def _import(self) -> Any:
        return importlib.import_module("flash_attn.flash_attn_interface")

    def _prefill(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, tables) -> torch.Tensor:
        if max_seqlen_q == 1 and len(q) != len(cu_seqlens_q) - 1:
            max_seqlen_q = 2  # under 1 the library takes it that every sequence has a query, and reshapes by that
        return self._library.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=scale, causal=True, block_table=tables
        )

    def _decode(self, q, k_cache, v_cache, context_lens, tables, scale) -> torch.Tensor:
        out = self._library.flash_attn_with_kvcache(
            q[:, None], k_cache, v_cache, cache_seqlens=context_lens, block_table=tables, softmax_scale=scale, causal=True
        )
        return out[:, 0]


class FlashAttention3(FlashAttention):
    """FlashAttention 3 for Hopper (arXiv 2407.08608), out of vLLM's build or the repository's own."""

    name = "fa3"
    package = "vLLM's build of it (pip install vllm) or the module flash_attn_interface built from the repository's hopper/ folder"
    head_dims = tuple(range(8, 257, 8))
    block_sizes = (16, 32, 64, 128, 256)

    def _import(self) -> Callable[..., torch.Tensor]:
        """attend(q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, scale, and cu_seqlens_k or seqused_k and tables)."""
        try:
            vllm_func = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
        except ImportError:
            interface = importlib.import_module("flash_attn_interface")

            def attend(q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, scale, cu_seqlens_k=None, seqused_k=None, tables=None):
                if tables is None:
                    return interface.flash_attn_varlen_func(
                        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=scale, causal=True
                    )
                return interface.flash_attn_with_kvcache(
                    q, k, v, cache_seqlens=seqused_k, page_table=tables, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                    softmax_scale=scale, causal=True,
                )  # fmt: skip

            return attend

        def attend_vllm(q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, scale, cu_seqlens_k=None, seqused_k=None, tables=None):
            return vllm_func(
                q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, block_table=tables,
                softmax_scale=scale, causal=True, fa_version=3,
            )  # fmt: skip

        return attend_vllm

    def _prefill(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, tables) -> torch.Tensor:
        keys = {"cu_seqlens_k": cu_seqlens_k} if tables is None else {"seqused_k": cu_seqlens_k[1:] - cu_seqlens_k[:-1], "tables": tables}
        return self._library(
            q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scale, **keys
        )

    def _decode(self, q, k_cache, v_cache, context_lens, tables, scale) -> torch.Tensor:
        return self._library(
            q, k_cache, v_cache, cu_seqlens_q=_one_row_each(q), max_seqlen_q=1, max_seqlen_k=tables.shape[1] * k_cache.shape[1],
            scale=scale, seqused_k=context_lens, tables=tables,
        )  # fmt: skip


class FlashAttention4(FlashAttention):
    """flash-attn-4, written in CuTe DSL; it compiles a kernel the first time that it meets a kind of call. No split-KV on Hopper."""

    name = "fa4"
    package = "the package flash-attn-4: pip install flash-attn-4"
    head_dims = tuple(range(8, 257, 8))
    block_sizes = (16, 64, 128, 256)

    def _import(self) -> Callable[..., Any]:
        return importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def _attend(self, q, k, v, **keywords) -> torch.Tensor:
        result = self._library(q, k, v, causal=True, **keywords)
        return result[0] if isinstance(result, tuple) else result

    def _prefill(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, tables) -> torch.Tensor:
        keys = {"cu_seqlens_k": cu_seqlens_k}
        if tables is not None:
            keys = {"seqused_k": cu_seqlens_k[1:] - cu_seqlens_k[:-1], "page_table": tables}
        return self._attend(
            q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=scale, **keys
        )

    def _decode(self, q, k_cache, v_cache, context_lens, tables, scale) -> torch.Tensor:
        return self._attend(
            q, k_cache, v_cache, cu_seqlens_q=_one_row_each(q), max_seqlen_q=1, max_seqlen_k=tables.shape[1] * k_cache.shape[1],
            softmax_scale=scale, seqused_k=context_lens, page_table=tables,
        )  # fmt: skip


def _harmless(block_tables: torch.Tensor, lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """(B, M) int32 contiguous: cells past a sequence's last block, whatever they hold, name page 0."""
    columns = torch.arange(block_tables.shape[1], device=block_tables.device)
    harmless = torch.empty(block_tables.shape, dtype=torch.int32, device=block_tables.device)
    # not .contiguous(): a single column of a transposed table counts as that with any stride, and the libraries ask for a stride of 1
    return harmless.copy_(torch.where(columns * block_size < lens[:, None], block_tables, 0))


def _one_row_each(q: torch.Tensor) -> torch.Tensor:
    return torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32).contiguous()


def _listed(values: tuple[int, ...]) -> str:
    step = values[1] - values[0]
    if all(b - a == step for a, b in pairwise(values)):
        return f"{values[0]} to {values[-1]} in steps of {step}"
    return ", ".join(map(str, values))


fa2, fa3, fa4 = FlashAttention2(), FlashAttention3(), FlashAttention4()
CAPABILITIES = fa2.CAPABILITIES
prefill_attention = fa2.prefill_attention
decode_attention = fa2.decode_attention


def _any_installed() -> bool:
    return any(importlib.util.find_spec(name) is not None for name in ("flash_attn", "flash_attn_interface", "vllm"))


if not _any_installed():
    raise ImportError("gpu_impl.flash needs the package flash-attn: pip install flash-attn --no-build-isolation")
