"""STEP-1: store, then attend, step after step over one cache; the newest token is always seen, whole histories are held against dense."""

from __future__ import annotations

import numpy as np
import torch

from conformance.cases.growing import GrowingCase
from conformance.cases.sequences import token_ids
from conformance.cases.tables import blocks_for
from conformance.checks.steps import History, Pipeline, normal_rows, require_row, rows_to_judge
from conformance.judge import Judge
from reference import SequenceState


def check_growing(judge: Judge, case: GrowingCase) -> None:
    pipeline = Pipeline(judge, case.num_blocks, case.block_size, case.num_kv_heads, case.group_size, case.head_dim, case.dtype)
    generator = np.random.default_rng(case.data_seed)
    heads = case.num_kv_heads * case.group_size
    tables = case.tables
    past = [History(torch.zeros(0, case.num_kv_heads, case.head_dim), torch.zeros(0, case.num_kv_heads, case.head_dim)) for _ in tables]

    def schedule(counts: list[int], prefill: bool) -> None:
        who = [i for i, count in enumerate(counts) if count]
        if not who:
            return
        total = sum(counts)
        # small queries keep every weight near 1/n: a token that is not seen shows
        q = 0.125 * normal_rows(generator, total, heads, case.head_dim, case.dtype)
        key = normal_rows(generator, total, case.num_kv_heads, case.head_dim, case.dtype)
        value = 4.0 * normal_rows(generator, total, case.num_kv_heads, case.head_dim, case.dtype)
        states, row = [], 0
        for i in who:
            cached = len(past[i].keys)
            rows = slice(row, row + counts[i])
            past[i] = History(torch.cat([past[i].keys, key[rows]]), torch.cat([past[i].values, value[rows]]))
            known = cached + counts[i]
            table = tables[i][: blocks_for(known, case.block_size)]
            states.append(SequenceState(token_ids(i, known), cached, counts[i], table))
            row += counts[i]
        out = (pipeline.prefill if prefill else pipeline.decode)(states, q, key, value)
        if out is None:
            return
        row = 0
        for i, state in zip(who, states, strict=True):
            for t in rows_to_judge(state.num_cached_tokens, counts[i], case.block_size):
                visible = state.num_cached_tokens + t + 1
                where = (
                    f"{'prefill' if prefill else 'decode'} of {counts[i]} after {state.num_cached_tokens}, sequence {i}, position {visible - 1} "
                    f"= logical block {(visible - 1) // case.block_size}, offset {(visible - 1) % case.block_size}"
                )
                share = require_row(pipeline, out, row + t, past[i], visible, tables[i], where)
                judge.note_budget(case.dtype, share)
            row += counts[i]

    for chunk in range(max(len(chunks) for chunks in case.chunks)):
        schedule([chunks[chunk] if chunk < len(chunks) else 0 for chunks in case.chunks], prefill=True)
    for _ in range(case.steps):
        schedule([1] * len(case.chunks), prefill=False)
