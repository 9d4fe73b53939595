"""The block manager: which physical block holds which tokens, from a sequence's admission to the re-use of its blocks.

A fixed pool, a reference count for each block, and a prefix cache over full blocks whose hashes are chained, as in vLLM and nano-vllm. A hash
only finds a candidate: a hit needs equal tokens in the block and in every block before it. A block is published when its KV is computed,
not before (the suite does not judge one that is published earlier, as it may be where the same step computes it before anyone reads it);
it keeps its contents when its last sequence leaves, and is re-used when it is the one that left longest ago.

Blocks of 4 tokens. The second prompt begins with the first one's eight tokens, and still computes its last token:

>>> manager = BlockManager(num_blocks=6, block_size=4)
>>> manager.admit(0, [1, 2, 3, 4, 5, 6, 7, 8]), manager.schedule(0, 8), manager.table(0)
(0, [], [0, 1])
>>> manager.computed(0, 8)
>>> manager.admit(1, [1, 2, 3, 4, 5, 6, 7, 8]), manager.table(1)
(4, [0])
>>> manager.admit(2, [1, 2, 3, 4, 5, 6, 7, 8, 9]), manager.table(2)
(8, [0, 1])

A fork shares every block; the one that both are about to write is copied for the one that writes first:

>>> manager.schedule(2, 1), manager.table(2)
([], [0, 1, 2])
>>> manager.computed(2, 1)
>>> manager.fork(2, 3)
>>> manager.append(3, 10)
>>> manager.schedule(3, 1), manager.table(3)
([(2, 3)], [0, 1, 3])
>>> manager.broken_invariants()
[]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from reference.preconditions import count, require, require_block_size


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """The tokens of a sequence up to the end of one of its full blocks: that block's own, after those of the blocks before it."""

    parent: Prefix | None
    tokens: tuple[int, ...]
    hash: int  # of the parent's hash and the tokens

    def equals(self, other: Prefix) -> bool:
        """Equal tokens, block after block, back to the first or to a block that both chains have in common."""
        mine: Prefix | None = self
        theirs: Prefix | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.tokens != theirs.tokens:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


class BlockManager:
    """Tables of sequences over a pool of `num_blocks` blocks of `block_size` tokens. Sequences are named by numbers that the caller picks.

    The order of a step: `schedule`, copy the blocks that it names, store and attend, `computed`. Nothing here knows of tensors.
    `order` is the order in which blocks are handed out while none has been used (0, 1, 2 ... if it is left out).
    Every method raises ValueError, with the values, for a sequence that is not there (or is there already) and for counts that do not fit.
    """

    def __init__(self, num_blocks: int, block_size: int, *, order: Sequence[int] | None = None) -> None:
        require_block_size(block_size)
        require(num_blocks >= 1, f"num_blocks is {num_blocks}, it must be at least 1")
        order = range(num_blocks) if order is None else order
        require(sorted(order) == list(range(num_blocks)), f"order is {list(order)}, it must name each of {num_blocks} blocks once")
        self.block_size = block_size
        self.references = [0] * num_blocks  # of each block: in how many tables it is
        self.free_blocks = OrderedDict.fromkeys(order)  # an ordered set: the first is the one that is re-used next
        self.prefix_of: dict[int, Prefix] = {}  # of each published block
        self.block_of_hash: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.num_computed: dict[int, int] = {}  # leading tokens whose KV is in the cache
        self.last_full: dict[int, Prefix | None] = {}  # of each sequence: the prefix that ends with its last computed full block

    # --- a sequence's life ----------------------------------------------------------------------------------------------------------

    def admit(self, sequence: int, token_ids: Sequence[int]) -> int:
        """Begin (or resume) a sequence with the blocks of its longest cached prefix. Returns the number of its cached tokens.

        They are whole blocks, and at least one token is left to compute: without a query there would be no next token (nano-vllm #144).
        """
        require(sequence not in self.tables, f"sequence {sequence} is there already")
        require(len(token_ids) >= 1, f"sequence {sequence} has no tokens")
        table: list[int] = []
        prefix: Prefix | None = None
        for logical_block in range((len(token_ids) - 1) // self.block_size):
            wanted = self._prefix(prefix, token_ids, logical_block)
            block = self.block_of_hash.get(wanted.hash)
            if block is None or not self.prefix_of[block].equals(wanted):
                break
            table.append(block)
            prefix = self.prefix_of[block]
        for block in table:
            self._take(block)
        self.tables[sequence] = table
        self.token_ids[sequence] = list(token_ids)
        self.num_computed[sequence] = len(table) * self.block_size
        self.last_full[sequence] = prefix
        return self.num_computed[sequence]

    def schedule(self, sequence: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Make room for the next `num_tokens` tokens. Returns the copies to make before anything is stored, as (from block, to block).

        A block that other sequences share is never written: it is copied first. None, and nothing has changed, if too few blocks are free.
        """
        table, start = self._table(sequence), self.num_computed[sequence]
        end = start + num_tokens
        known = len(self.token_ids[sequence])
        require(num_tokens >= 1, f"sequence {sequence} schedules {num_tokens} tokens, it must be at least 1")
        require(end <= known, f"sequence {sequence} has {count(known, 'token')}, {start} computed and {num_tokens} scheduled ones end at {end}")
        needed = -(-end // self.block_size)
        shared = [c for c in range(start // self.block_size, min(len(table), needed)) if self.references[table[c]] > 1]
        missing = max(0, needed - len(table))
        if len(shared) + missing > len(self.free_blocks):
            return None
        copies = []
        for column in shared:
            copy = self._new_block()
            copies.append((table[column], copy))
            self._release(table[column])
            table[column] = copy
        for _ in range(missing):
            table.append(self._new_block())
        return copies

    def computed(self, sequence: int, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens is in the cache: blocks that it fills are published."""
        table, start = self._table(sequence), self.num_computed[sequence]
        end = start + num_tokens
        known = min(len(self.token_ids[sequence]), len(table) * self.block_size)
        require(start <= end <= known, f"sequence {sequence} has room for {known} of its tokens, {start} and {num_tokens} computed ones end at {end}")
        for logical_block in range(start // self.block_size, end // self.block_size):
            prefix = self._prefix(self.last_full[sequence], self.token_ids[sequence], logical_block)
            self.last_full[sequence] = self._publish(prefix, table[logical_block])
        self.num_computed[sequence] = end

    def append(self, sequence: int, token_id: int) -> None:
        """A token was generated; its KV is not computed yet."""
        self._table(sequence)
        self.token_ids[sequence].append(token_id)

    def fork(self, sequence: int, child: int) -> None:
        """`child` begins with the same tokens and shares every block that holds a computed one."""
        require(child not in self.tables, f"sequence {child} is there already")
        held = -(-self.num_computed[sequence] // self.block_size) if sequence in self.tables else 0
        self.tables[child] = self._table(sequence)[:held]
        for block in self.tables[child]:
            self._take(block)
        self.token_ids[child] = list(self.token_ids[sequence])
        self.num_computed[child] = self.num_computed[sequence]
        self.last_full[child] = self.last_full[sequence]

    def free(self, sequence: int) -> None:
        """The sequence has finished, or is preempted. Its last block goes first, so that a prefix outlives what was built on it."""
        for block in reversed(self._table(sequence)):
            self._release(block)
        for of_sequence in (self.tables, self.token_ids, self.num_computed, self.last_full):
            del of_sequence[sequence]

    def table(self, sequence: int) -> list[int]:
        """The physical block of each logical block."""
        return list(self._table(sequence))

    # --- blocks ---------------------------------------------------------------------------------------------------------------------

    def _table(self, sequence: int) -> list[int]:
        require(sequence in self.tables, f"there is no sequence {sequence}")
        return self.tables[sequence]

    def _take(self, block: int) -> None:
        self.free_blocks.pop(block, None)
        self.references[block] += 1

    def _release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free_blocks[block] = None

    def _new_block(self) -> int:
        """The free block that was used longest ago. Whatever it was published as is forgotten: its hash must not find it again."""
        block = next(iter(self.free_blocks))
        prefix = self.prefix_of.pop(block, None)
        if prefix is not None:
            del self.block_of_hash[prefix.hash]
        self._take(block)
        return block

    def _prefix(self, parent: Prefix | None, token_ids: Sequence[int], logical_block: int) -> Prefix:
        tokens = tuple(token_ids[logical_block * self.block_size : (logical_block + 1) * self.block_size])
        return Prefix(parent, tokens, self._hash(parent, tokens))

    def _hash(self, parent: Prefix | None, tokens: tuple[int, ...]) -> int:
        return hash((parent.hash if parent is not None else 0, tokens))

    def _publish(self, prefix: Prefix, block: int) -> Prefix:
        """Let later sequences find `block`, unless its hash is taken. Returns the prefix as it is known: one chain for equal tokens."""
        published = self.block_of_hash.setdefault(prefix.hash, block)
        if published == block:
            self.prefix_of[block] = prefix
        known = self.prefix_of[published]
        return known if known.equals(prefix) else prefix

    # --- what always holds ----------------------------------------------------------------------------------------------------------

    def broken_invariants(self) -> list[str]:
        """A sentence for each invariant that does not hold: none, or this manager is wrong."""
        told = []
        holders: dict[int, list[tuple[int, int]]] = {}  # block -> (sequence, column) of each table that it is in
        for sequence, table in self.tables.items():
            if len(table) * self.block_size < self.num_computed[sequence]:
                told.append(f"sequence {sequence} has {self.num_computed[sequence]} computed tokens and {count(len(table), 'block')}")
            for column, block in enumerate(table):
                holders.setdefault(block, []).append((sequence, column))
        for block, references in enumerate(self.references):
            held = holders.get(block, [])
            if references != len(held):
                told.append(f"block {block} has {count(references, 'reference')} and is in {count(len(held), 'table')}")
            if (block in self.free_blocks) != (not held):
                told.append(f"block {block} is in {count(len(held), 'table')}, and {'free' if block in self.free_blocks else 'not free'}")
            for other, column in held[1:]:
                first, first_column = held[0]
                end = (column + 1) * self.block_size
                owned = min(end, self.num_computed[first], self.num_computed[other])
                same = self.token_ids[first][:owned] == self.token_ids[other][:owned]
                if column != first_column or not same or owned <= column * self.block_size:
                    told.append(f"block {block} is owned by sequences {first} and {other}, which share no prefix up to it")
        for token_hash, block in self.block_of_hash.items():
            if block not in self.prefix_of or self.prefix_of[block].hash != token_hash:
                told.append(f"a hash names block {block}, which holds something else")
        return told
