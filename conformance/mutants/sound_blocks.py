"""A sound block manager that knows a prefix by its tokens themselves, with a seam wherever engines have gone wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class SoundBlocks:
    CAPABILITIES: ClassVar[dict[str, Any]] = {}

    def BlockManager(self, num_blocks: int, block_size: int) -> SoundManager:  # the contract's name
        return SoundManager(self, num_blocks, block_size)

    # --- seams --------------------------------------------------------------------------------------------------------------------

    def key(self, tokens: list[int], column: int, block_size: int) -> tuple[int, ...]:
        """What a full block is found by: every token up to its end."""
        return tuple(tokens[: (column + 1) * block_size])

    def columns_looked_up(self, num_tokens: int, block_size: int) -> int:
        return (num_tokens - 1) // block_size

    def blocks_needed(self, computed: int, count: int, block_size: int) -> int:
        return -(-(computed + count) // block_size)

    def full_blocks(self, computed: int, block_size: int) -> int:
        return computed // block_size

    def hit(self, manager: SoundManager, block: int) -> None:
        if block in manager.idle:
            manager.idle.remove(block)

    def taken(self, manager: SoundManager, block: int) -> None:
        """A block is used again: nothing finds it any more."""
        manager.found_by = {key: other for key, other in manager.found_by.items() if other != block}

    def copies_before_writing(self, manager: SoundManager, block: int) -> bool:
        return manager.users(block) > 1

    def left(self, manager: SoundManager, block: int) -> None:
        """One table fewer holds the block."""
        if manager.users(block) == 0:
            manager.idle.append(block)


class SoundManager:
    """References are not counted but looked up: a block's users are the tables that it is in."""

    def __init__(self, seams: SoundBlocks, num_blocks: int, block_size: int) -> None:
        self.seams, self.block_size = seams, block_size
        self.idle = list(range(num_blocks))[::-1]  # in the order in which they are used again
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}
        self.found_by: dict[tuple[int, ...], int] = {}

    def users(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    def admit(self, sequence: int, token_ids: Sequence[int]) -> int:
        tokens, table = list(token_ids), []
        for column in range(self.seams.columns_looked_up(len(tokens), self.block_size)):
            block = self.found_by.get(self.seams.key(tokens, column, self.block_size))
            if block is None:
                break
            table.append(block)
            self.seams.hit(self, block)
        self.tables[sequence], self.tokens[sequence] = table, tokens
        self.done[sequence] = len(table) * self.block_size
        return self.done[sequence]

    def schedule(self, sequence: int, num_tokens: int) -> list[tuple[int, int]] | None:
        table, done = self.tables[sequence], self.done[sequence]
        first, end = done // self.block_size, self.seams.blocks_needed(done, num_tokens, self.block_size)
        written = [column for column in range(first, len(table)) if self.seams.copies_before_writing(self, table[column])]
        if len(self.idle) < len(written) + max(0, end - len(table)):
            return None
        copies = []
        for column in written:
            block, table[column] = table[column], self.new_block()
            copies.append((block, table[column]))
            self.seams.left(self, block)
        while len(table) < end:
            table.append(self.new_block())
        return copies

    def new_block(self) -> int:
        block = self.idle.pop(0)
        self.seams.taken(self, block)
        return block

    def computed(self, sequence: int, num_tokens: int) -> None:
        before, self.done[sequence] = self.done[sequence], self.done[sequence] + num_tokens
        for column in range(before // self.block_size, self.seams.full_blocks(self.done[sequence], self.block_size)):
            self.found_by.setdefault(self.seams.key(self.tokens[sequence], column, self.block_size), self.tables[sequence][column])

    def append(self, sequence: int, token_id: int) -> None:
        self.tokens[sequence].append(token_id)

    def fork(self, sequence: int, child: int) -> None:
        self.tables[child] = list(self.tables[sequence])
        self.tokens[child] = list(self.tokens[sequence])
        self.done[child] = self.done[sequence]

    def free(self, sequence: int) -> None:
        table = self.tables.pop(sequence)
        for block in reversed(table):
            self.seams.left(self, block)
        del self.tokens[sequence], self.done[sequence]

    def table(self, sequence: int) -> list[int]:
        return list(self.tables[sequence])
