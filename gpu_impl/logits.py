"""Logits of the tokens that are sampled from: the rows are gathered before the product, the vocabulary may be split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gpu_impl.launch import require


def last_token_logits(hidden: torch.Tensor, weight: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> torch.Tensor:
    """(B, V) in hidden's dtype: the logits of each sequence's last token (clauses LOGIT-1...3).

    hidden: (T, E), weight: (V, E). A prefill passes cu_seqlens_q (B+1,) and takes row cu_seqlens_q[i + 1] - 1 of each sequence i, each of
    which must have one; a decode step passes none and takes every row. Raises ValueError for shapes that do not fit.
    """
    require(
        hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1],
        f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}, they must be (T, E) and (V, E)",
    )
    if cu_seqlens_q is not None:
        require(cu_seqlens_q.dim() == 1, f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)}, it must be (B+1,)")
        hidden = hidden.index_select(0, cu_seqlens_q[1:] - 1)
    with _sums_in_float32(hidden):
        return torch.nn.functional.linear(hidden, weight)


def parallel_logits(
    hidden: torch.Tensor,
    weight_shard: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor | None:
    """(B, V) on the group's first rank, None elsewhere (clauses LOGIT-4, LOGIT-5).

    hidden: (T, E), the same on each rank; weight_shard: (V / size, E), consecutive rows of the weight in rank order. Works with gloo and
    nccl. Raises ValueError, on every rank and before any logits are sent, if the shards are not all of one size.
    """
    size = dist.get_world_size(group)
    require(size > 0, "this process is no member of the group")
    width = torch.tensor([weight_shard.shape[0]], dtype=torch.int64, device=hidden.device)
    widths = [torch.empty_like(width) for _ in range(size)]
    dist.all_gather(widths, width, group=group)
    sizes = torch.cat(widths).tolist()
    require(len(set(sizes)) == 1, f"the shards hold {sizes} rows of the vocabulary, all ranks must hold as many")
    shard = last_token_logits(hidden, weight_shard, cu_seqlens_q)
    first_rank = 0 if group is None else dist.get_global_rank(group, 0)
    if dist.get_rank() != first_rank:
        dist.gather(shard, dst=first_rank, group=group)
        return None
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.gather(shard, shards, dst=first_rank, group=group)
    return torch.cat(shards, dim=1)


@contextmanager
def _sums_in_float32(hidden: torch.Tensor) -> Iterator[None]:
    """By torch's default cuBLAS may add the parts of a split sum in half precision, and does where the weight is transposed (clause LOGIT-6)."""
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
