"""The block manager of a life, the implementation's or the reference's, and what it must never answer (clauses LIFE-5...8).

Nothing is asked of how it chooses blocks, and no hit is asked of it: what is judged is that its answers are safe to compute with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import reference
from conformance.findings import Broken, Refused
from conformance.implementation import REFUSALS, innermost_line, one_line
from conformance.judge import Judge

HITS, TABLES, COPIES, POOL = "LIFE-5", "LIFE-6", "LIFE-7", "LIFE-8"
METHODS = ("admit", "schedule", "computed", "append", "fork", "free", "table")


class Managed:
    """Asks a block manager, and holds its answers against what it answered before. Raises Broken with the clause that is broken."""

    def __init__(self, judge: Judge, num_blocks: int, block_size: int, order_seed: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.reserved = judge.capabilities.reserved_blocks
        self.calls: list[tuple[str, tuple[Any, ...], str]] = []  # method, arguments, what was answered
        self.tables: dict[int, list[int]] = {}  # of the sequences that are there, as they were last told
        self.num_computed: dict[int, int] = {}
        self.num_tokens: dict[int, int] = {}
        self.own = "BlockManager" in judge.implementation.offered
        if self.own:
            self.manager = judge.implementation.call("BlockManager", num_blocks, block_size)
            missing = [name for name in METHODS if not callable(getattr(self.manager, name, None))]
            if missing:
                raise Broken(("BlockManager", f"gives a {type(self.manager).__name__} without {', '.join(missing)}"), clause=TABLES)
        else:
            order = list(range(num_blocks))
            random.Random(order_seed).shuffle(order)  # a table is never the identity
            self.manager = reference.BlockManager(num_blocks, block_size, order=order)

    def ask(self, method: str, *args: Any) -> Any:
        try:
            answer = getattr(self.manager, method)(*args)
        except REFUSALS as error:
            raise Refused(one_line(error)) from error
        except Exception as error:  # whatever an implementation raises is a finding about it
            self.calls.append((method, args, f"raised {type(error).__name__}"))
            raise self.broken(TABLES, (f"{method}{args}", f"raised {one_line(error)}"), ("at", innermost_line(error))) from error
        self.calls.append((method, args, repr(answer)))
        return answer

    def admit(self, sequence: int, tokens: list[int]) -> int:
        """The number of cached tokens, at least one fewer than there are; their contents are the caller's to hold against."""
        cached = self.ask("admit", sequence, list(tokens))
        if not isinstance(cached, Integral) or not 0 <= int(cached) < len(tokens):
            told = "the last one must be computed, or there is no query" if cached == len(tokens) else "it is no count of them"
            raise self.broken(
                HITS, (f"sequence {sequence}", f"has {len(tokens)} tokens, and {cached!r} of them are said to be cached: {told}"),
                likely="a prompt whose every block is cached leaves no token to run",
            )  # fmt: skip
        cached = int(cached)
        table = self.told_table(sequence)
        if len(table) * self.block_size < cached:
            raise self.broken(HITS, (f"sequence {sequence}", f"has {cached} cached tokens, and a table of {len(table)} blocks of {self.block_size}"))
        self.tables[sequence], self.num_computed[sequence], self.num_tokens[sequence] = table, cached, len(tokens)
        return cached

    def schedule(self, sequence: int, count: int) -> list[tuple[int, int]] | None:
        """The copies to make, or None if the pool is too small; the table is then told and covers the chunk."""
        before = self.tables[sequence]
        start, end = self.num_computed[sequence], self.num_computed[sequence] + count
        size = self.block_size
        needed = -(-end // size)
        written = range(start // size, needed)
        shared = [c for c in written if c < len(before) and self.holders(before[c], sequence)]
        answer = self.ask("schedule", sequence, count)
        table = self.told_table(sequence)
        if answer is None:
            used = {block for held in self.tables.values() for block in held}
            free = self.num_blocks - self.reserved - len(used)
            wanted = len(shared) + max(0, needed - len(before))
            if wanted <= free:
                told = f"asks for {wanted} blocks and is turned down, {free} of {self.num_blocks} are in no table"
                raise self.broken(
                    POOL, (f"sequence {sequence}", told + (f", and {self.reserved} more are reserved" if self.reserved else "")),
                    likely="blocks that were freed do not come back to the pool",
                )  # fmt: skip
            if table != before:
                raise self.broken(TABLES, (f"sequence {sequence}", f"is turned down, and its table changed from {before} to {table}"))
            return None
        if len(table) < needed:
            raise self.broken(
                TABLES, (f"sequence {sequence}", f"needs {needed} blocks for {end} tokens at block size {size}, its table has {len(table)}: {table}"),
                ("no slot", f"position {len(table) * size} = logical block {len(table)}, offset 0"),
                likely="the count was taken before the table grew, or rounded down",
            )  # fmt: skip
        copies = [(int(source), int(target)) for source, target in answer]
        for column in range(max(len(before), len(table))):
            self.require_column(sequence, column, before, table, shared, copies, start)
        self.tables[sequence] = table
        return copies

    def require_column(
        self, sequence: int, column: int, before: list[int], table: list[int], shared: list[int], copies: list[tuple[int, int]], start: int
    ) -> None:
        """A block that is there already stays, unless it is copied; a new one is nobody's; one that is written is this sequence's alone."""
        size = self.block_size
        if column >= len(table):
            raise self.broken(TABLES, (f"sequence {sequence}", f"loses block {before[column]} of its table: {before} becomes {table}"))
        block = table[column]
        place = f"position {max(start, column * size)} of sequence {sequence} = logical block {column}, physical block {block}"
        if column < len(before) and block == before[column]:
            if column in shared:
                told = ", ".join(f"sequence {other}" for other, _ in self.holders(block, sequence))
                shared_by = f"is about to be written, and {told} shares the block"
                raise self.broken(COPIES, (place, shared_by), likely="a shared block is written in place")
            return
        holders = self.holders(block, sequence)
        if holders or table.count(block) > 1:
            told = f"sequence {holders[0][0]} has it as its logical block {holders[0][1]}" if holders else f"it is in the table twice: {table}"
            raise self.broken(TABLES, (place, f"is taken from the pool, and {told}"), likely="a block is both free and referenced")
        if column < len(before) and (before[column], block) not in copies and start > column * size:
            told = f"block {before[column]} becomes {block} although no copy of it was asked for: {copies}"
            raise self.broken(COPIES, (place, told))

    def computed(self, sequence: int, count: int) -> None:
        self.ask("computed", sequence, count)
        self.num_computed[sequence] += count

    def append(self, sequence: int, token: int) -> None:
        self.ask("append", sequence, token)
        self.num_tokens[sequence] += 1

    def fork(self, sequence: int, child: int) -> None:
        self.ask("fork", sequence, child)
        table, computed = self.told_table(child), self.num_computed[sequence]
        held = -(-computed // self.block_size)
        if table[:held] != self.tables[sequence][:held]:
            raise self.broken(TABLES, (f"sequence {child}", f"is a fork of {self.tables[sequence]} and has the table {table}"))
        self.tables[child] = table[:held]
        self.num_computed[child], self.num_tokens[child] = computed, self.num_tokens[sequence]

    def free(self, sequence: int) -> None:
        self.ask("free", sequence)
        for of_sequence in (self.tables, self.num_computed, self.num_tokens):
            del of_sequence[sequence]

    def told_table(self, sequence: int) -> list[int]:
        table = [int(block) for block in self.ask("table", sequence)]
        for column, block in enumerate(table):
            if not 0 <= block < self.num_blocks:
                told = f"has block id {block} in column {column} of its table, the pool has blocks 0 to {self.num_blocks - 1}"
                raise self.broken(TABLES, (f"sequence {sequence}", told))
        return table

    def holders(self, block: int, besides: int) -> list[tuple[int, int]]:
        """(sequence, column) of each other table that the block is in."""
        return [(i, table.index(block)) for i, table in self.tables.items() if i != besides and block in table]

    def broken(self, clause: str, *facts: tuple[str, str], likely: str = "") -> Broken:
        """A finding with a script that asks the same again: the last of its answers are the wrong ones."""
        broken = Broken(*facts, likely=likely, clause=clause)
        broken.finding.script = "\n".join(self.script())
        return broken

    def script(self) -> Iterator[str]:
        """The calls, one a line, with the answers that the report is about: the same again are wrong, of others it cannot tell."""
        yield from (
            f"manager = load(SPEC).BlockManager({self.num_blocks}, {self.block_size})",
            "same = []",
            "",
            "",
            "def ask(reported, method, *args):",
            "    try:",
            "        answer = repr(getattr(manager, method)(*args))",
            "    except Exception as error:",
            "        answer = f'raised {type(error).__name__}'",
            "    same.append(answer == reported)",
            "    print(f\"{method}{args} -> {answer}{'' if same[-1] else f'   reported: {reported}'}\")",
            "",
            "",
        )
        for method, args, answer in self.calls:
            yield f"ask({', '.join(map(repr, (answer, method, *args)))})"
        yield "if all(same):"
        yield "    print('wrong: every answer is as it was reported, and the report at the top of this script says which is wrong')"
        yield "    sys.exit(1)"
        yield "print('some answers are not those of the report: whether they are right this script cannot tell, the suite can')"
        yield "sys.exit(2)"
