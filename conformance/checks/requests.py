"""STEP-2: batches of real requests through prepare, store and attend, with prefix hits, chunks and decode steps, over one cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from conformance.cases.requests import Request
from conformance.checks.steps import Attended, History, Pipeline, normal_rows, require_row
from conformance.findings import Broken
from conformance.judge import Judge
from reference import SequenceState


@dataclass
class PrefixCache:
    """Which physical block holds which prefix. Blocks of full prefixes are kept for later requests, all others go back to the pool."""

    num_blocks: int
    by_hash: dict[tuple[int, int], int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))
        random.Random(0).shuffle(self.free)


@dataclass
class Running:
    """A request in the batch: where its tokens lie and how many of them are computed."""

    number: int
    request: Request
    table: list[int]
    cached: int
    history: History


class RequestReplay:
    """Replays requests in batches, each prefilled in chunks and then decoded for a few steps."""

    def __init__(self, judge: Judge, pipeline: Pipeline, tokens_per_hash: int, chunk: int) -> None:
        self.judge = judge
        self.pipeline = pipeline
        self.tokens_per_hash = tokens_per_hash
        self.chunk = chunk
        self.cache = PrefixCache(pipeline.num_blocks)
        self.generator = np.random.default_rng(judge.seed)
        self.contents: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.hit_tokens = 0
        self.prompt_tokens = 0

    def run(self, requests: list[Request], batch_size: int, decode_steps: int) -> None:
        for first in range(0, len(requests), batch_size):
            batch = [self.admit(first + i, request) for i, request in enumerate(requests[first : first + batch_size])]
            while any(one.cached < one.request.num_tokens for one in batch):
                self.prefill([one for one in batch if one.cached < one.request.num_tokens])
            for _ in range(decode_steps):
                self.decode(batch)
            for one in batch:
                self.retire(one)

    def admit(self, number: int, request: Request) -> Running:
        """Reuse the blocks of the longest known prefix of whole blocks, at least one token short of the prompt."""
        size, per_hash = self.pipeline.block_size, self.tokens_per_hash // self.pipeline.block_size
        table: list[int] = []
        for hash_id in request.hash_ids[: (request.num_tokens - 1) // self.tokens_per_hash]:
            if (hash_id, 0) not in self.cache.by_hash:
                break
            table += [self.cache.by_hash[hash_id, part] for part in range(per_hash)]
        cached = len(table) * size
        needed = -(-(request.num_tokens + 8) // size)
        if needed - len(table) > len(self.cache.free):
            raise Broken(("judge", f"the pool of {self.pipeline.num_blocks} blocks is too small for request {number}"))
        table += [self.cache.free.pop() for _ in range(needed - len(table))]
        self.hit_tokens += cached
        self.prompt_tokens += request.num_tokens
        contents = [self.content(hash_id) for hash_id in request.hash_ids]
        keys = torch.cat([key for key, _ in contents])[: request.num_tokens]
        values = torch.cat([value for _, value in contents])[: request.num_tokens]
        return Running(number, request, table, cached, History(keys, values))

    def content(self, hash_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a prompt block: equal ids, equal rows."""
        if hash_id not in self.contents:
            generator = np.random.default_rng(hash_id)
            heads, dim, dtype = self.pipeline.num_kv_heads, self.pipeline.head_dim, self.pipeline.dtype
            rows = [normal_rows(generator, self.tokens_per_hash, heads, dim, dtype).to(self.judge.device) for _ in range(2)]
            self.contents[hash_id] = (rows[0], rows[1])
        return self.contents[hash_id]

    def retire(self, one: Running) -> None:
        """Whole prompt blocks stay for later hits, the rest is free again, and loud."""
        per_hash = self.tokens_per_hash // self.pipeline.block_size
        whole = one.request.num_tokens // self.tokens_per_hash
        for index, hash_id in enumerate(one.request.hash_ids[:whole]):
            for part in range(per_hash):
                self.cache.by_hash.setdefault((hash_id, part), one.table[index * per_hash + part])
        kept = set(self.cache.by_hash.values())
        for block in one.table:
            if block not in kept and block not in self.cache.free:
                self.pipeline.k_cache[block] = 30000.0
                self.pipeline.v_cache[block] = 30000.0
                self.cache.free.append(block)

    def queries(self, count: int) -> torch.Tensor:
        heads = self.pipeline.num_kv_heads * self.pipeline.group_size
        return normal_rows(self.generator, count, heads, self.pipeline.head_dim, self.pipeline.dtype).to(self.judge.device)

    def prefill(self, batch: list[Running]) -> None:
        states, keys, values = [], [], []
        for one in batch:
            count = min(self.chunk, one.request.num_tokens - one.cached)
            tokens = range(1, one.request.num_tokens + 1)
            states.append(SequenceState(list(tokens), one.cached, count, one.table))
            keys.append(one.history.keys[one.cached : one.cached + count])
            values.append(one.history.values[one.cached : one.cached + count])
        q = self.queries(sum(state.num_scheduled_tokens for state in states))
        out = self.pipeline.prefill(states, q, torch.cat(keys), torch.cat(values))
        row = 0
        for one, state in zip(batch, states, strict=True):
            count = state.num_scheduled_tokens
            for t in {int(self.generator.integers(0, count)), count - 1}:
                self.require(out, row + t, one, one.cached + t, f"prefill chunk of {count} after {one.cached}")
            row += count
            one.cached += count

    def decode(self, batch: list[Running]) -> None:
        heads, dim, dtype = self.pipeline.num_kv_heads, self.pipeline.head_dim, self.pipeline.dtype
        key, value = (normal_rows(self.generator, len(batch), heads, dim, dtype).to(self.judge.device) for _ in range(2))
        states = []
        for i, one in enumerate(batch):
            one.history = History(torch.cat([one.history.keys, key[i : i + 1]]), torch.cat([one.history.values, value[i : i + 1]]))
            n = len(one.history.keys)
            states.append(SequenceState(list(range(1, n + 1)), n - 1, 1, one.table[: -(-n // self.pipeline.block_size)]))
        q = self.queries(len(batch))
        out = self.pipeline.decode(states, q, key, value)
        for i, one in enumerate(batch):
            self.require(out, i, one, len(one.history.keys) - 1, "decode step")

    def require(self, out: Attended | None, row: int, one: Running, position: int, what: str) -> None:
        if out is None:
            return
        size = self.pipeline.block_size
        where = (
            f"request {one.number} of the trace, {what}: position {position} = logical block {position // size}, offset {position % size}, "
            f"slot {one.table[position // size] * size + position % size} (physical block {one.table[position // size]})"
        )
        share = require_row(self.pipeline, out, row, one.history, position + 1, one.table, where)
        self.judge.note_budget(self.pipeline.dtype, share)
        self.judge.record.examples += 1
