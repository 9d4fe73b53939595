"""Batches of sequences before a step: lengths, prefix hits, chunk boundaries, block tables."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from conformance.cases.lengths import lengths
from conformance.cases.tables import blocks_for, shuffled_tables
from reference import SequenceState

BLOCK_SIZES = (1, 2, 3, 4, 16, 5, 8, 32, 64, 100, 128, 256)
MANY_SEQUENCES = 259  # past the 256 that a step of many may be cut in
NO_LIMIT = 10**9  # tokens of a sequence, where an implementation states no max_context


@dataclass(frozen=True)
class SequencesCase:
    """A batch; `states()` builds the sequences, which are too long to be read as literals."""

    block_size: int
    lengths: tuple[int, ...]  # tokens known of each sequence
    cached: tuple[int, ...]
    scheduled: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]

    def states(self) -> list[SequenceState]:
        return [
            SequenceState(token_ids(i, length), cached, scheduled, list(table))
            for i, (length, cached, scheduled, table) in enumerate(
                zip(self.lengths, self.cached, self.scheduled, self.tables, strict=True)
            )
        ]

    def size(self) -> int:
        return sum(self.lengths)

    def literals(self) -> list[tuple[str, str]]:
        return [
            ("block_size", str(self.block_size)),
            ("num_tokens", str(list(self.lengths))),
            ("num_cached_tokens", str(list(self.cached))),
            ("num_scheduled_tokens", str(list(self.scheduled))),
            ("block_tables", str([list(table) for table in self.tables])),
        ]


def token_ids(sequence: int, length: int) -> list[int]:
    """Nearly every token of a batch is different, so that a wrong one tells where it came from: sequence * 100,000 + position.

    Every seventh one is 0, a token like others, and past 32 bits in the first sequence.
    """
    return list(known_tokens(sequence, length))


@functools.lru_cache(maxsize=8)
def known_tokens(sequence: int, length: int) -> tuple[int, ...]:
    large = 2**33 if sequence == 0 else 0
    return tuple(0 if position % 7 == 6 else large + sequence * 100_000 + position for position in range(length))


@st.composite
def prefills(draw: st.DrawFn, block_sizes: list[int], *, hits: bool | None = None, max_blocks: int = 5, most: int = NO_LIMIT) -> SequencesCase:
    """A prefill batch. hits: whether some sequence has cached tokens (None: drawn); most: tokens of a sequence."""
    block_size = draw(st.sampled_from(block_sizes), label="block_size")
    max_blocks = draw(st.sampled_from([max_blocks, 24]), label="max_blocks")
    maximum = min(most, max(3, min(700, max_blocks * block_size + 1)))
    if hits is None:
        hits = draw(st.booleans(), label="hits")
    count = draw(st.one_of(st.integers(1, 5), st.integers(6, 12)), label="sequences")
    ends, cached, known, spare = [], [], [], []
    for i in range(count):
        end = draw(lengths(block_size, maximum), label=f"chunk end {i}")
        start = draw(starts_of_chunk(end, block_size), label=f"cached {i}") if hits else 0
        rest = draw(st.sampled_from([0, 0, 1, block_size, 2 * block_size + 1]), label=f"tokens after the chunk {i}")
        ends.append(end)
        cached.append(start)
        known.append(min(end + rest, most))
        spare.append(draw(st.booleans(), label=f"table of the whole prompt {i}"))
    if hits and max(cached) == 0:
        end = ends[0] + block_size
        if end <= most:
            ends[0], cached[0], known[0] = end, block_size, min(known[0] + block_size, most)
        elif most > 1:  # one that begins inside a block
            ends[0] = max(2, ends[0])
            cached[0], known[0] = ends[0] - 1, max(known[0], ends[0])
    needed = [blocks_for(n if whole else end, block_size) for n, end, whole in zip(known, ends, spare, strict=True)]
    pool = sum(needed) + 1 + draw(st.sampled_from([1, 3, 40]), label="blocks of nobody")
    tables = high_tables(needed, pool, draw(st.integers(0, 999), label="table_seed"), draw(first_blocks(), label="first_block"))
    scheduled = tuple(end - start for end, start in zip(ends, cached, strict=True))
    return SequencesCase(block_size, tuple(known), tuple(cached), scheduled, tuple(map(tuple, tables)))


def first_blocks() -> st.SearchStrategy[int]:
    """Where the sequences' part of the pool begins: at its bottom, or past what 8 and 16 bits count."""
    return st.sampled_from([0, 0, 300, 70_000])


def high_tables(needed: list[int], pool: int, seed: int, first_block: int) -> list[list[int]]:
    return [[first_block + block for block in table] for table in shuffled_tables(needed, pool, seed)]


def starts_of_chunk(end: int, block_size: int) -> st.SearchStrategy[int]:
    """How many tokens before `end` are cached: none, whole blocks (a prefix hit), all but one, or anything."""
    whole_blocks = list(range(0, end, block_size))
    return st.one_of(st.sampled_from(whole_blocks), st.just(end - 1), st.integers(0, end - 1))


@st.composite
def decodes(
    draw: st.DrawFn, block_sizes: list[int], *, spare_blocks: bool = False, max_blocks: int = 5, most: int = NO_LIMIT
) -> SequencesCase:
    """A decode batch: each sequence's table ends with the block of its last token, or goes on if `spare_blocks`."""
    block_size = draw(st.sampled_from(block_sizes), label="block_size")
    max_blocks = draw(st.sampled_from([max_blocks, 24]), label="max_blocks")
    maximum = min(most, max(3, min(700, max_blocks * block_size + 1)))
    known = draw(st.one_of(*(st.lists(lengths(block_size, maximum), min_size=1, max_size=n) for n in (5, 12))), label="lengths")
    needed = [blocks_for(n, block_size) for n in known]
    if spare_blocks:
        needed = [blocks + draw(st.integers(0, 3), label=f"spare blocks {i}") for i, blocks in enumerate(needed)]
        needed[0] += 1
    pool = sum(needed) + 1 + draw(st.sampled_from([1, 3, 40]), label="blocks of nobody")
    tables = high_tables(needed, pool, draw(st.integers(0, 999), label="table_seed"), draw(first_blocks(), label="first_block"))
    cached = tuple(n - 1 for n in known)
    return SequencesCase(block_size, tuple(known), cached, (1,) * len(known), tuple(map(tuple, tables)))


@st.composite
def warm_ups(draw: st.DrawFn, block_sizes: list[int], *, most: int = NO_LIMIT) -> SequencesCase:
    """A prefill before there is a cache: no sequence has a block table."""
    block_size = draw(st.sampled_from(block_sizes), label="block_size")
    known = draw(st.lists(lengths(block_size, min(most, 4 * block_size + 1)), min_size=1, max_size=4), label="lengths")
    return SequencesCase(block_size, tuple(known), (0,) * len(known), tuple(known), ((),) * len(known))


# --- what every effort tries ------------------------------------------------------------------------------------------------------------


def many_sequences(block_sizes: list[int], count: int, *, decode: bool = False, most: int = NO_LIMIT) -> SequencesCase:
    """So many sequences of 5 tokens: past the 32, 64 ... that a batch may be cut in. The k-th of a prefill has k % 3 cached tokens."""
    length = min(5, most)
    size = 4 if 4 in block_sizes else block_sizes[0]
    cached = tuple(length - 1 if decode else min(k % 3, length - 1) for k in range(count))
    tables = shuffled_tables([blocks_for(length, size)] * count, count * blocks_for(length, size) + 1, seed=0)
    return SequencesCase(size, (length,) * count, cached, tuple(length - n for n in cached), tuple(map(tuple, tables)))


def nobody_scheduled(block_sizes: list[int], *, most: int = NO_LIMIT) -> SequencesCase:
    """Two sequences that schedule nothing."""
    return replace(many_sequences(block_sizes, 2, most=most), scheduled=(0, 0))


def wide_tables(block_sizes: list[int], *, most: int = NO_LIMIT) -> list[SequencesCase]:
    """A sequence that is about to compute its last token, with a table of more than 128 columns, beside one of a single block.

    None where a sequence cannot be so long.
    """
    size = min(block_sizes)
    lengths = (129 * size + 1, 1)
    if lengths[0] > most:
        return []
    tables = shuffled_tables([blocks_for(n, size) for n in lengths], 140, seed=0)
    return [SequencesCase(size, lengths, tuple(n - 1 for n in lengths), (1, 1), tuple(map(tuple, tables)))]


def long_sequences(block_sizes: list[int], *, decode: bool = False, most: int = NO_LIMIT) -> list[SequencesCase]:
    """Chunks of thousands of tokens, more than 8,192 together, and a decode step, up to position 69,999; a prefill up to 8,999 if that is too far."""
    size = 16 if 16 in block_sizes else block_sizes[0]
    lengths = (70_000, 5_000, 1) if decode else (70_000 if most >= 70_000 else 9_000, 3_100)
    cached = tuple(n - 1 for n in lengths) if decode else (lengths[0] - 5_500, 0)
    if max(lengths) > most:
        return []
    needed = [blocks_for(n, size) for n in lengths]
    tables = shuffled_tables(needed, sum(needed) + 3, seed=0)
    return [SequencesCase(size, lengths, cached, tuple(n - c for n, c in zip(lengths, cached, strict=True)), tuple(map(tuple, tables)))]


def with_empties(case: SequencesCase, *, around: bool = False) -> SequencesCase:
    """Every second sequence or so is followed by one that schedules nothing, whose table must not be read: an entry of cu_seqlens_q repeats.

    around: one more comes first, and two come last.
    """
    whole = [k for k, table in enumerate(case.tables) for _ in range(1 + sum(table) % 2)]  # which sequence each is, or is a copy of
    last = len(case.tables) - 1
    order = [0, *whole, last, last] if around else whole
    copies = [k == before for k, before in zip(order, [-1, *order], strict=False)]
    if around:  # the leading one is the empty one of its pair
        copies[0], copies[1] = True, False
    return replace(
        case,
        lengths=tuple(case.lengths[k] for k in order),
        cached=tuple(case.cached[k] for k in order),
        scheduled=tuple(0 if copy else case.scheduled[k] for k, copy in zip(order, copies, strict=True)),
        tables=tuple(tuple(block + copy for block in case.tables[k]) for k, copy in zip(order, copies, strict=True)),
    )
