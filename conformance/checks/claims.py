"""What an implementation claims of itself beyond the clauses: NaN in unwritten slots, rows that see nothing."""

from __future__ import annotations

import torch

from conformance.buffers import Buffers
from conformance.cases.attention import AttentionCase
from conformance.cases.stores import StoreCase
from conformance.checks.attention_call import attend, row_name
from conformance.checks.values import budgeted, random_numbers, require_within
from conformance.findings import Broken, Refused
from conformance.judge import Judge


def check_nan_tail(judge: Judge, case: AttentionCase) -> None:
    """NaN in every slot that no position lies in, in V alone, in K alone, in both."""
    numbers = random_numbers(case, query_scale=1.0)
    live = torch.zeros(case.num_slots, dtype=torch.bool)
    for slots in case.slots:
        live[slots] = True
    expected = budgeted(judge, case, numbers)
    for poisoned in ((numbers.values,), (numbers.keys,), (numbers.keys, numbers.values)):
        for tensor in poisoned:
            tensor[~live] = float("nan")
        what = " and ".join("V" if tensor is numbers.values else "K" for tensor in poisoned)
        try:
            require_within(judge, case, attend(judge, case, numbers), expected)
        except Broken as broken:
            broken.finding.facts.insert(1, ("holding NaN", f"{what} of every slot that no position lies in"))
            broken.finding.likely = broken.finding.likely or f"{what} past the context is masked by multiplying or adding: NaN stays NaN"
            raise


def check_empty_rows(judge: Judge, case: AttentionCase) -> None:
    """A row without a visible position is exactly 0."""
    out = attend(judge, case, random_numbers(case, query_scale=1.0)).out
    for row, (_, visible) in enumerate(case.rows):
        if visible == 0 and not bool((out[row] == 0).all()):
            head, dim = (int(x) for x in (out[row] != 0).nonzero()[0])
            raise Broken((row_name(case, row), f"sees nothing, and out[{row}, {head}, {dim}] is {float(out[row, head, dim]):.6g} in place of 0"))


def check_bad_slots(judge: Judge, case: StoreCase) -> None:
    """A slot past the cache raises, and the caches are left as they were."""
    buffers = Buffers(judge.device)
    cache_shape = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    rows = torch.zeros(case.num_rows, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    key, value = buffers.put("key", rows), buffers.put("value", rows)
    k_cache, v_cache = buffers.put_caches(case.random_bits(cache_shape, case.data_seed), case.random_bits(cache_shape, case.data_seed + 1))
    slots = [*case.slots[:-1], case.num_blocks * case.block_size]
    mapping = buffers.put("slot_mapping", torch.tensor(slots, dtype=case.index_dtype))
    buffers.freeze()
    require_raise(judge, "store_kvcache", f"slot {slots[-1]} of a cache with {slots[-1]} slots", key, value, k_cache, v_cache, mapping)
    if buffers.changed():
        raise Broken(("found", f"the call raised, and still wrote {buffers.changed()}"))


def check_bad_table(judge: Judge, case: AttentionCase) -> None:
    """A block id within the context that the cache does not have raises."""
    if case.context_lens[0] == 0:
        return
    table = case.table_tensor()
    table[0, 0] = case.num_blocks + 3
    shape = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    q = torch.zeros(len(case.rows), case.num_heads, case.head_dim, dtype=case.dtype, device=judge.device)
    cache = torch.zeros(shape, dtype=case.dtype, device=judge.device)
    lengths = torch.tensor(case.context_lens, dtype=torch.int32, device=judge.device)
    require_raise(
        judge, "decode_attention", f"block id {case.num_blocks + 3} of a cache with {case.num_blocks} blocks", q, cache, cache.clone(),
        context_lens=lengths, block_tables=table.to(judge.device), scale=case.scale,
    )  # fmt: skip


def require_raise(judge: Judge, function: str, what: str, *args: object, **kwargs: object) -> None:
    try:
        judge.call(function, *args, **kwargs)
    except Refused:
        return
    except Broken:  # it raised, if not with the error that a caller would expect
        return
    raise Broken(("accepted", f"{what}, and raised nothing"))
