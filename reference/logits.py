"""Logits of the tokens that are sampled from, whole or with the vocabulary split over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from reference.preconditions import require, require_cu_seqlens


def last_token_logits(hidden: torch.Tensor, weight: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> torch.Tensor:
    """(B, V): the logits of each sequence's last token (clauses LOGIT-1...3).

    hidden: (T, E), weight: (V, E). A prefill passes cu_seqlens_q and takes row cu_seqlens_q[i + 1] - 1 of each sequence i; a decode step
    passes none and takes every row. Products are summed in float64 and returned in hidden's dtype.
    Raises ValueError for cu_seqlens that decrease or do not end at T, and for a sequence without a row.

    >>> hidden = torch.tensor([[1.0], [2.0], [3.0]])
    >>> last_token_logits(hidden, torch.tensor([[1.0], [10.0]]), torch.tensor([0, 2, 3])).tolist()
    [[2.0, 20.0], [3.0, 30.0]]
    """
    require(hidden.shape[1] == weight.shape[1], f"hidden has hidden size {hidden.shape[1]}, weight {weight.shape[1]}")
    if cu_seqlens_q is None:
        rows = list(range(len(hidden)))
    else:
        sums = require_cu_seqlens(cu_seqlens_q, len(hidden), "cu_seqlens_q")
        for i in range(len(sums) - 1):
            require(sums[i + 1] > sums[i], f"sequence {i} has no query token, so it has no last one")
        rows = [end - 1 for end in sums[1:]]
    logits = [weight.double() @ hidden[row].double() for row in rows]
    return torch.stack(logits).to(hidden.dtype) if logits else hidden.new_empty((0, len(weight)))


def parallel_logits(
    hidden: torch.Tensor,
    weight_shard: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor | None:
    """(B, V) on the group's first rank, None elsewhere: each rank multiplies its own rows of the weight (clauses LOGIT-4, 5).

    hidden: (T, E), the same on each rank; weight_shard: (V_r, E), consecutive rows of the whole weight, in rank order. The shards may
    differ in size: each is padded to the largest for the exchange, and the padding is cut off before anyone sees it.
    """
    shard = last_token_logits(hidden, weight_shard, cu_seqlens_q)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    widths = [torch.zeros(1, dtype=torch.int64, device=shard.device) for _ in range(size)]
    dist.all_gather(widths, torch.tensor([shard.shape[1]], dtype=torch.int64, device=shard.device), group=group)
    widest = max(int(width) for width in widths)
    padded = shard.new_zeros((len(shard), widest))
    padded[:, : shard.shape[1]] = shard
    gathered = [torch.empty_like(padded) for _ in range(size)] if rank == 0 else None
    first_rank = dist.get_global_rank(group, 0) if group is not None else 0
    dist.gather(padded, gathered, dst=first_rank, group=group)
    if gathered is None:
        return None
    return torch.cat([part[:, : int(width)] for part, width in zip(gathered, widths, strict=True)], dim=1)
