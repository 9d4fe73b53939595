"""The engine of a replay: continuous batching with chunked prefill over one pool of blocks, prefix hits, preemption. It judges nothing."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import reference
from conformance.cases.requests import Request
from conformance.findings import Broken
from conformance.judge import Judge

POISON = 30000.0  # what a block that was taken from the pool holds
NOTHING = -1  # the name of it
GENERATED = 2**48  # names of generated tokens begin here


@dataclass(frozen=True)
class Engine:
    """The cache of one layer, and how requests are batched."""

    dtype: torch.dtype
    block_size: int
    num_blocks: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    max_batch: int  # requests that run at a time
    chunk: int  # tokens of a prefill step, all sequences together
    rows_judged: int = 2  # of a step, at most
    image_every: int = 100  # steps between two comparisons of the whole cache

    @property
    def pool_bytes(self) -> int:
        return 2 * self.num_blocks * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(eq=False)
class Running:
    """A request: its tokens so far, and how many of them are in the cache."""

    number: int
    names: torch.Tensor  # of every token that it will ever have, on the device
    num_prompt: int
    num_last: int  # tokens when it has finished
    tokens: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)
    blocks: torch.Tensor | None = None  # the table on the device, with room for what it grows to
    counted: bool = False  # its prompt, in the tally

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


@dataclass
class Tally:
    """What a replay went through."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    decoded_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    rows_judged: int = 0
    images: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


class RequestEngine(ABC):
    """Runs requests through a pool. A step, and what a cache hit must be, is for who runs them: see `checks.requests`."""

    def __init__(self, judge: Judge, engine: Engine, tokens_per_hash: int, *, finished: Callable[[Tally], None] | None = None) -> None:
        self.judge, self.engine, self.tokens_per_hash = judge, engine, tokens_per_hash
        self.finished = finished or (lambda tally: None)
        self.device = judge.device
        shape = (1, engine.num_blocks, engine.block_size, engine.num_kv_heads, engine.head_dim)
        self.cache = reference.allocate_kv_cache(*shape, dtype=engine.dtype, device=self.device).fill_(POISON)
        self.k_cache, self.v_cache = reference.layer_views(self.cache, 0)
        self.held = torch.full((engine.num_blocks * engine.block_size,), NOTHING, dtype=torch.int64, device=self.device)
        self.random = random.Random(judge.seed)
        self.manager: Any
        if "BlockManager" in judge.implementation.offered:
            self.manager = judge.call("BlockManager", engine.num_blocks, engine.block_size)
        else:
            order = list(range(engine.num_blocks))
            self.random.shuffle(order)  # a table is never the identity
            self.manager = reference.BlockManager(engine.num_blocks, engine.block_size, order=order)
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.admitting = True  # not after a preemption, until a request has finished
        self.tally = Tally()
        self.answered = "BlockManager"  # last

    @abstractmethod
    def step(self, work: list[tuple[Running, int]], *, decoding: bool) -> None:
        """Compute the next `count` tokens of each request."""

    @abstractmethod
    def require_history(self, one: Running, last: int) -> None:
        """The cache holds the request's positions up to `last`."""

    @abstractmethod
    def require_image(self) -> None:
        """The cache is whole."""

    def finish(self, requests: list[Request]) -> Tally:
        self.waiting.extend(self.of_request(number, request) for number, request in enumerate(requests))
        while self.waiting or self.running:
            while self.waiting and self.has_time_for_another():
                self.admit(self.waiting.popleft())
            self.prefill()
            self.decode()
            if (self.tally.prefill_steps + self.tally.decode_steps) % self.engine.image_every == 0:
                self.require_image()
        self.require_image()
        return self.tally

    def has_time_for_another(self) -> bool:
        """A request is admitted when the next prefill step would not be full without it: what it shares with others is computed by then."""
        if not self.running:
            return True
        due = sum(one.remaining for one in self.running)
        return self.admitting and len(self.running) < self.engine.max_batch and due < self.engine.chunk

    def of_request(self, number: int, request: Request) -> Running:
        """A prompt token is named by its block's hash id, which names everything before it too; generated tokens are the request's own."""
        size, per_hash = self.engine.block_size, self.tokens_per_hash
        longest = (self.engine.num_blocks - self.judge.capabilities.reserved_blocks) * size
        longest = min(longest, self.judge.capabilities.max_context or longest)
        num_prompt = max(1, min(request.num_tokens, longest - 1))
        prompt = (torch.tensor(request.hash_ids)[:, None] * per_hash + torch.arange(per_hash)).flatten()[:num_prompt]
        generated = GENERATED + number * 2**20 + torch.arange(min(request.num_generated, longest - len(prompt)))
        names = torch.cat([prompt, generated])
        return Running(number, names, len(prompt), len(names), prompt.tolist())

    def admit(self, one: Running) -> None:
        self.answered = "BlockManager"
        one.names = one.names.to(self.device)
        one.computed = self.manager.admit(one.number, one.tokens)
        self.look_at_table(one, [])
        if not 0 <= one.computed < len(one.tokens):
            raise Broken((f"request {one.number}", f"has {len(one.tokens)} tokens, and {one.computed} of them are said to be cached"))
        self.require_history(one, one.computed - 1)
        if not one.counted:
            one.counted = True
            self.tally.prompt_tokens += one.num_prompt
            self.tally.hit_tokens += one.computed
        self.running.append(one)

    def leave(self, one: Running) -> None:
        self.manager.free(one.number)
        self.running.remove(one)

    def preempt(self, one: Running) -> None:
        self.leave(one)
        self.waiting.appendleft(one)
        self.admitting = False
        self.tally.preemptions += 1

    def make_room(self, one: Running, count: int) -> bool:
        """Blocks for a chunk; while there are too few, the youngest request makes way. False if that was this one."""
        self.answered = "BlockManager"
        while (copies := self.manager.schedule(one.number, count)) is None:
            youngest = self.running[-1]
            if youngest is one and len(self.running) == 1:
                raise Broken((f"request {one.number}", f"is alone, and a pool of {self.engine.num_blocks} blocks has no room for it"))
            self.preempt(youngest)
            if youngest is one:
                return False
        table = self.manager.table(one.number)
        if table == one.table:
            return True
        known, size = set(one.table), self.engine.block_size
        new = self.on_device([block for block in table if block not in known])
        self.cache[:, 0, new] = POISON
        self.held.view(-1, size)[new] = NOTHING
        for source, target in copies:
            self.cache[:, 0, target] = self.cache[:, 0, source]
            self.held.view(-1, size)[target] = self.held.view(-1, size)[source]
        self.look_at_table(one, one.table)
        return True

    def look_at_table(self, one: Running, before: list[int]) -> None:
        """What the manager says now; only columns that are new, or have changed, go to the device: tables are long and steps many."""
        one.table = self.manager.table(one.number)
        if one.blocks is None or len(one.blocks) < len(one.table):
            room = max(len(one.table), -(-one.num_last // self.engine.block_size) + 1)
            one.blocks, before = torch.zeros(room, dtype=torch.int64, device=self.device), []
        same = next((c for c, (a, b) in enumerate(zip(before, one.table, strict=False)) if a != b), min(len(before), len(one.table)))
        one.blocks[same : len(one.table)] = self.on_device(one.table[same:])

    def on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def prefill(self) -> None:
        work, room = [], self.engine.chunk
        for one in list(self.running):
            count = min(one.remaining, room)
            if count > 0 and one in self.running and self.make_room(one, count):
                work.append((one, count))
                room -= count
        work = [(one, count) for one, count in work if one in self.running]
        if work:
            self.step(work, decoding=False)
            self.tally.prefill_steps += 1

    def decode(self) -> None:
        work = []
        for one in list(self.running):
            if one in self.running and one.remaining == 0:
                name = GENERATED + one.number * 2**20 + len(one.tokens) - one.num_prompt
                one.tokens.append(name)
                self.manager.append(one.number, name)
                if self.make_room(one, 1):
                    work.append((one, 1))
        work = [(one, count) for one, count in work if one in self.running]
        if not work:
            return
        self.step(work, decoding=True)
        self.tally.decode_steps += 1
        self.tally.decoded_tokens += len(work)

    def slots(self, one: Running, start: int, end: int) -> torch.Tensor:
        size = self.engine.block_size
        positions = torch.arange(start, end, device=self.device)
        assert one.blocks is not None  # it is admitted
        return one.blocks[positions // size] * size + positions % size
