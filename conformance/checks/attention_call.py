"""From an attention case and its numbers to one guarded call of the implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from conformance.buffers import Buffers, dirty_free_memory
from conformance.cases.attention import AttentionCase
from conformance.checks.batches import prefix_sums
from conformance.findings import Broken
from conformance.judge import Judge, unchanged_clause

LOUD = 30000.0  # what lies in slots that must not be read: finite in every dtype, and heard in any mean


@dataclass
class Numbers:
    """What the slots and the queries hold, in float32 on the CPU; positions' rows are set by a check, the rest is loud."""

    q: torch.Tensor  # (T, Hq, D)
    keys: torch.Tensor  # (slots, Hk, D)
    values: torch.Tensor  # (slots, Hk, D)


def loud_numbers(case: AttentionCase, loud: float = LOUD) -> Numbers:
    shape = (case.num_slots, case.num_kv_heads, case.head_dim)
    return Numbers(
        q=torch.zeros(len(case.rows), case.num_heads, case.head_dim),
        keys=torch.full(shape, loud),
        values=torch.full(shape, loud),
    )


@dataclass
class AttentionCall:
    """A call that was made: its arguments, kept for a replay, and its result in float64 on the CPU."""

    function: str
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, Any]
    out: torch.Tensor  # (T, Hq, D) float64, CPU
    result: torch.Tensor  # as returned


def attend(judge: Judge, case: AttentionCase, numbers: Numbers, **options: Any) -> AttentionCall:
    """Call the implementation on guarded buffers; shape, dtype, device, inputs and red zones are judged here, on every case.

    options: keywords beyond the contract's, for an implementation that takes them.
    """
    buffers = Buffers(judge.device)
    q = buffers.put("q", numbers.q.to(case.dtype), case.row_layout)
    keys, values = numbers.keys.to(case.dtype), numbers.values.to(case.dtype)
    kwargs: dict[str, Any] = {"scale": case.scale, **options}
    if case.paged:
        in_blocks = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
        k, v = buffers.put_caches(keys.reshape(in_blocks), values.reshape(in_blocks), case.cache_layout)
        if case.metadata_layout == "plain":
            kwargs["block_tables"] = buffers.put_table("block_tables", case.table_tensor(), extra_columns=case.spare_columns)
        else:
            kwargs["block_tables"] = buffers.put("block_tables", case.table_tensor(), case.metadata_layout, gap=0)
    else:
        layouts = case.kv_layouts or (case.row_layout,) * 2
        k, v = buffers.put("k", keys, layouts[0]), buffers.put("v", values, layouts[1])
    if case.decode:
        kwargs["context_lens"] = buffers.put("context_lens", torch.tensor(case.context_lens, dtype=torch.int32), case.metadata_layout, gap=1)
    else:
        for name, counts in (("cu_seqlens_q", case.query_lens), ("cu_seqlens_k", case.context_lens)):
            kwargs[name] = buffers.put(name, torch.tensor(prefix_sums(list(counts)), dtype=torch.int32), case.metadata_layout, gap=1)
        for name, counts in (("max_seqlen_q", case.query_lens), ("max_seqlen_k", case.context_lens)):
            kwargs[name] = max(counts, default=0) + case.seqlen_slack
    buffers.freeze()
    dirty_free_memory(tuple(q.shape), case.dtype, judge.device)
    result = judge.call(case.function, q, k, v, **kwargs)
    out = require_output(result, case, judge.device)
    changed = buffers.changed()
    if changed:
        buffers.restore()  # a replay begins with what this call began with
        judge.note_beside(unchanged_clause(case.function), f"an input was changed: {changed}")
    return AttentionCall(case.function, (q, k, v), kwargs, out, result)


def require_output(result: Any, case: AttentionCase, device: torch.device) -> torch.Tensor:
    want = (len(case.rows), case.num_heads, case.head_dim)
    if not isinstance(result, torch.Tensor):
        raise Broken(("returned", f"a {type(result).__name__}, the contract says a tensor of shape {want}"))
    if tuple(result.shape) != want:
        raise Broken(("returned", f"shape {tuple(result.shape)}, the contract says {want}"))
    if result.dtype != case.dtype:
        raise Broken(("returned", f"dtype {result.dtype}, q has {case.dtype}"))
    if result.device.type != device.type:
        raise Broken(("returned", f"a tensor on {result.device}, q lies on {device}"))
    return result.detach().to("cpu", torch.float64)


def head_name(case: AttentionCase, head: int) -> str:
    return f"query head {head} (kv head {head // case.group_size})"


def row_name(case: AttentionCase, row: int) -> str:
    sequence, visible = case.rows[row]
    if case.decode:
        return f"row {row}"
    first = row - sum(case.query_lens[:sequence])
    return f"row {row} = query {first} of sequence {sequence}, which sees {visible} positions"


def place_of_slot(case: AttentionCase, slot: int) -> str:
    """A slot in words: whose it is, and where it lies."""
    owners = [(i, slots.index(slot)) for i, slots in enumerate(case.slots) if slot in slots]
    if not case.paged:
        return f"position {owners[0][1]} of sequence {owners[0][0]} = row {slot} of k and v" if owners else f"row {slot} of k and v"
    block, offset = divmod(slot, case.block_size)
    where = f"offset {offset} = slot {slot} (physical block {block})"
    if owners:
        sequence, position = owners[0]
        return f"position {position} of sequence {sequence} = logical block {position // case.block_size}, {where}"
    holder = [(i, table.index(block)) for i, table in enumerate(case.tables) if block in table]
    if holder:
        sequence, logical = holder[0]
        return f"never written: {where}, past the {case.context_lens[sequence]} tokens of sequence {sequence} in its logical block {logical}"
    return f"nobody's: {where}"
