"""Logits of the tokens that are sampled from, whole or with the vocabulary split over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from reference.preconditions import count, require, require_cu_seqlens

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def last_token_logits(hidden: torch.Tensor, weight: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> torch.Tensor:
    """(B, V): the logits of each sequence's last token (clauses LOGIT-1...3).

    hidden: (T, E), weight: (V, E). A prefill passes cu_seqlens_q and takes row cu_seqlens_q[i + 1] - 1 of each sequence i; a decode step
    passes none and takes every row. Products are summed in float64 and returned in hidden's dtype.
    Raises ValueError for shapes that do not fit, for cu_seqlens that decrease or do not end at T, and for a sequence without a row.

    >>> hidden = torch.tensor([[1.0], [2.0], [3.0]])
    >>> last_token_logits(hidden, torch.tensor([[1.0], [10.0]]), torch.tensor([0, 2, 3])).tolist()
    [[2.0, 20.0], [3.0, 30.0]]
    """
    require(hidden.dim() == 2, f"hidden has shape {tuple(hidden.shape)}, it must be (T, E)")
    require(weight.dim() == 2, f"weight has shape {tuple(weight.shape)}, it must be (V, E)")
    require(hidden.dtype in FLOATS, f"hidden is {hidden.dtype}, it must be of a float dtype")
    require(hidden.device == weight.device, f"hidden is on {hidden.device}, weight on {weight.device}")
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
    A bad call on one rank, or ranks that disagree on hidden's shape or dtype, raise ValueError with one sentence on every rank.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    require(rank >= 0, f"rank {dist.get_rank()} is no member of the group")
    shard, complaint = None, ""
    try:
        shard = last_token_logits(hidden, weight_shard, cu_seqlens_q)
    except ValueError as error:
        complaint = str(error)  # told to the others before it is raised, or they would wait for this rank for ever
    widths = agreed_widths(hidden, shard, complaint, group)
    assert shard is not None  # or else every rank has raised
    padded = shard.new_zeros((len(shard), max(widths)))
    padded[:, : shard.shape[1]] = shard
    gathered = [torch.empty_like(padded) for _ in range(size)] if rank == 0 else None
    first_rank = dist.get_global_rank(group, 0) if group is not None else 0
    dist.gather(padded, gathered, dst=first_rank, group=group)
    if gathered is None:
        return None
    return torch.cat([part[:, :width] for part, width in zip(gathered, widths, strict=True)], dim=1)


def agreed_widths(
    hidden: torch.Tensor, shard: torch.Tensor | None, complaint: str, group: dist.ProcessGroup | None
) -> list[int]:
    """The columns of each rank's shard, after the ranks have told each other what they were called with, in one all_gather.

    Every rank reads the same facts in the same order, so every rank raises the same ValueError, or none. `shard` is None for a rank whose
    own call was bad; its `complaint` follows in a second exchange, that all ranks then know of.
    """
    size = dist.get_world_size(group)
    facts = [0] * 6 if shard is None else [1, *hidden.shape, FLOATS.index(hidden.dtype), *shard.shape]
    mine = torch.tensor(facts, dtype=torch.int64, device=hidden.device)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=group)
    facts_of_ranks = [each.tolist() for each in gathered]

    if any(call_is_good == 0 for call_is_good, *_ in facts_of_ranks):
        complaints: list[str] = [""] * size
        dist.all_gather_object(complaints, complaint, group=group)
        for rank, sentence in enumerate(complaints):
            require(sentence == "", f"rank {rank} of {size}: {sentence}")

    _, first_tokens, first_hidden_size, first_dtype, first_rows, _ = facts_of_ranks[0]
    for rank, (_, tokens, hidden_size, dtype, rows, _) in enumerate(facts_of_ranks):
        who = f"rank {rank} of {size}"
        require(
            (tokens, hidden_size) == (first_tokens, first_hidden_size),
            f"{who} has hidden of shape {(tokens, hidden_size)}, rank 0 {(first_tokens, first_hidden_size)}",
        )
        require(dtype == first_dtype, f"{who} has hidden of {FLOATS[dtype]}, rank 0 of {FLOATS[first_dtype]}")
        require(rows == first_rows, f"{who} takes {count(rows, 'row')} of hidden, rank 0 takes {first_rows}")
    return [width for *_, width in facts_of_ranks]
