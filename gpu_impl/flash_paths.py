"""FlashAttention on the path that `gpu_impl.fastest` calls, with the claims that gpu_impl makes of attention: to be judged before it is used.

`gpu_impl.flash_paths:fa3` can be given to --impl. A library that does not write rows that see nothing breaks `empty_zero`; `fa3_zeroed` sets
them to 0 after the call, on the device, for the time that takes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# a library's name in gpu_impl.flash: the distributions that may hold it
PACKAGES = {"fa2": ("flash-attn",), "fa3": ("vllm", "flash-attn-3"), "fa4": ("flash-attn-4",)}
MODULES = {"fa3": "vllm.vllm_flash_attn"}  # may lie on the path without a distribution: its compiled files say which it is
ATTENTION = ("prefill_attention", "decode_attention")
CLAIMS: Mapping[str, tuple[str, ...]] = {  # of gpu_impl's attention, whoever computes it
    "deterministic": ATTENTION,
    "nan_tail": ATTENTION,
    "empty_zero": ATTENTION,
    "cuda_graph": ("decode_attention",),
}


def library_versions() -> dict[str, str]:
    """Of the FlashAttentions that are installed, by their names in gpu_impl.flash: 'vllm 0.33.0'."""
    return {name: version for name in PACKAGES if (version := version_of(name))}


@functools.cache
def version_of(name: str) -> str:
    """'vllm 0.33.0', or of a module without a distribution 'vllm.vllm_flash_attn sha256 0f3a...'; empty: not installed."""
    for package in PACKAGES[name]:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return digest_of(MODULES[name]) if name in MODULES else ""


def digest_of(module: str) -> str:
    """The module and the digest of its compiled files; empty where there are none."""
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        return ""
    folders = (found.submodule_search_locations or ()) if found else ()
    compiled = sorted(path for folder in folders for path in Path(folder).rglob("*.so"))
    if not compiled:
        return ""
    digest = hashlib.sha256()
    for path in compiled:
        digest.update(path.read_bytes())
    return f"{module} sha256 {digest.hexdigest()[:16]}"


class Through:
    """FlashAttention on the path that dispatch calls, for --impl: with what gpu_impl claims of attention."""

    def __init__(self, name: str, *, zeroes_empty: bool = False) -> None:
        self.name = name
        self.zeroes_empty = zeroes_empty

    @functools.cached_property
    def library(self) -> Any:
        """Imported at the first call: gpu_impl.flash raises ImportError where no FlashAttention is installed."""
        return getattr(importlib.import_module("gpu_impl.flash"), self.name)

    @property
    def CAPABILITIES(self) -> Mapping[str, object]:
        try:
            limits = self.library.CAPABILITIES
        except ImportError:  # is told by the first call
            limits = {}
        return {**limits, "claims": CLAIMS}

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
        out = self.library.prefill_attention(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            scale=scale, block_tables=block_tables,
        )  # fmt: skip
        return out.masked_fill_(_sees_nothing(len(q), cu_seqlens_q, cu_seqlens_k)[:, None, None], 0) if self.zeroes_empty else out

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
        out = self.library.decode_attention(q, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=scale)
        return out.masked_fill_((context_lens <= 0)[:, None, None], 0) if self.zeroes_empty else out


def _sees_nothing(num_tokens: int, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> torch.Tensor:
    """(T,) bool, on the device: rows before their sequence's first key, where there are more queries than keys."""
    ends_q, ends_k = cu_seqlens_q[1:].contiguous(), cu_seqlens_k[1:]
    rows = torch.arange(num_tokens, dtype=ends_q.dtype, device=ends_q.device)
    sequence = torch.searchsorted(ends_q, rows, right=True).clamp(max=len(ends_q) - 1)
    position = (ends_k - cu_seqlens_k[:-1])[sequence] - (ends_q[sequence] - rows)
    return position < 0


fa2, fa3, fa4 = Through("fa2"), Through("fa3"), Through("fa4")
fa2_zeroed, fa3_zeroed, fa4_zeroed = (Through(name, zeroes_empty=True) for name in PACKAGES)
PATHS = {"fa2": fa2, "fa3": fa3, "fa4": fa4, "fa2_zeroed": fa2_zeroed, "fa3_zeroed": fa3_zeroed, "fa4_zeroed": fa4_zeroed}
