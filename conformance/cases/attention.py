"""Attention cases: who is in the batch, how its KV lies in the cache, and what lies around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from conformance.buffers import CACHE_LAYOUTS, ROW_LAYOUTS
from conformance.capabilities import Capabilities
from conformance.cases.lengths import lengths
from conformance.cases.tables import blocks_for, shuffled_tables

BLOCK_SIZES = (16, 1, 2, 3, 4, 8, 32, 5, 64, 256, 100, 128)
HEAD_DIMS = (16, 64, 32, 128, 80, 40, 96, 256, 192)
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
WIDE_GROUP_SIZES = (3, 5, 6, 7, 9, 12, 16, 17, 24, 48)
FILLERS = ("minus_one", "impossible", "foreign")
IMPOSSIBLE = 2**30 + 7  # a block id that no cache has


@dataclass(frozen=True)
class AttentionCase:
    """One call of prefill_attention or decode_attention."""

    decode: bool
    dtype: torch.dtype
    block_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    query_lens: tuple[int, ...]  # query tokens of each sequence; 1 each in a decode step
    context_lens: tuple[int, ...]  # keys of each sequence, the queries' own included
    paged: bool = True
    spare_blocks: int = 2  # blocks of the pool that belong to nobody
    first_block: int = 0  # blocks before the first that is handed out: more of nobody's
    spare_columns: int = 0  # columns of block_tables past the longest table
    filler: str = "minus_one"  # what stands in table cells beyond a sequence's blocks
    cache_layout: str = "plain"
    row_layout: str = "plain"
    kv_layouts: tuple[str, ...] = ()  # of k and of v without a cache, where they are not q's
    metadata_layout: str = "plain"  # of block_tables, context_lens and cu_seqlens
    seqlen_slack: int = 0  # how much larger than the longest sequence max_seqlen_q and max_seqlen_k are
    scale: float = 0.25
    table_seed: int = 0
    data_seed: int = 0
    given_tables: tuple[tuple[int, ...], ...] = ()  # whole tables of a longer case that this one is a chunk of
    given_num_blocks: int = 0

    @property
    def function(self) -> str:
        return "decode_attention" if self.decode else "prefill_attention"

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @cached_property
    def tables(self) -> list[list[int]]:
        """Each sequence's own blocks."""
        if self.given_tables:
            return [list(table) for table in self.given_tables]
        pool = self.num_blocks - self.first_block
        drawn = shuffled_tables([blocks_for(n, self.block_size) for n in self.context_lens], pool, self.table_seed)
        return [[self.first_block + block for block in table] for table in drawn]

    @cached_property
    def num_blocks(self) -> int:
        if self.given_num_blocks:
            return self.given_num_blocks
        return sum(blocks_for(n, self.block_size) for n in self.context_lens) + self.spare_blocks + self.first_block

    @cached_property
    def slots(self) -> list[list[int]]:
        """The slot of each position of each sequence; without a cache, its row in k and v."""
        if not self.paged:
            first, slots = 0, []
            for n in self.context_lens:
                slots.append(list(range(first, first + n)))
                first += n
            return slots
        size = self.block_size
        return [[table[p // size] * size + p % size for p in range(n)] for table, n in zip(self.tables, self.context_lens, strict=True)]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size if self.paged else sum(self.context_lens)

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """(sequence, number of visible positions) of each query row."""
        return [
            (i, max(0, context - queries + t + 1))
            for i, (queries, context) in enumerate(zip(self.query_lens, self.context_lens, strict=True))
            for t in range(queries)
        ]

    def table_tensor(self) -> torch.Tensor:
        """(B, M) int32; unused cells hold the filler."""
        width = max([len(table) for table in self.tables] + [1]) + self.spare_columns
        rows = []
        for i, table in enumerate(self.tables):
            foreign = [block for j, other in enumerate(self.tables) if j != i for block in other] or [IMPOSSIBLE]
            unused = width - len(table)
            if self.filler == "minus_one":
                cells = [-1] * unused
            elif self.filler == "impossible":
                cells = [IMPOSSIBLE] * unused
            else:
                cells = [foreign[c % len(foreign)] for c in range(unused)]
            rows.append(table + cells)
        return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)

    def headline(self, implementation: str, device: str) -> str:
        cache = f"S {self.block_size} · " if self.paged else "no cache · "
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{implementation}.{self.function}   {dtype} · {cache}Hk {self.num_kv_heads} · G {self.group_size} · D {self.head_dim} · {device}"

    def literals(self) -> list[tuple[str, str]]:
        shown = [("context_lens", str(list(self.context_lens)))]
        if not self.decode:
            shown.insert(0, ("query_lens", str(list(self.query_lens))))
        if self.paged:
            table = self.table_tensor().tolist()
            shown.append(("block_tables", short(str(table))))
            shown.append(("pool", f"{self.num_blocks} blocks, {self.cache_layout} layout"))
        if self.row_layout != "plain":
            shown.append(("q", f"{self.row_layout} rows"))
        if self.kv_layouts:
            shown.append(("k, v", f"{' and '.join(self.kv_layouts)} rows"))
        if self.metadata_layout != "plain":
            shown.append(("metadata", f"{self.metadata_layout} integers"))
        if self.seqlen_slack:
            shown.append(("max_seqlen", f"{self.seqlen_slack} more than the longest"))
        shown.append(("scale", repr(self.scale)))
        return shown

    def size(self) -> int:
        return sum(self.context_lens)


# --- a case and what a check does with it: the names of the fields stand in a report ---


class WithQueries(NamedTuple):
    case: AttentionCase
    normal_queries_times: float


class WithSplit(NamedTuple):
    case: AttentionCase
    split_number: int  # each sequence's t queries are cut after split_number % (t + 1), or t


class WithScores(NamedTuple):
    case: AttentionCase
    scores_along_the_positions: str
    all_shifted_by: float


class WithLater(NamedTuple):
    case: AttentionCase
    then_a_call_with: AttentionCase


def short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]} … ({len(text)} characters)"


@dataclass(frozen=True)
class Limits:
    """Up to where cases are drawn: an interpreter takes milliseconds a row, a GPU microseconds."""

    context: int = 300
    sequences: int = 4
    queries: int = 40
    elements: int = 60_000  # T * Hq * D of a prefill's output, and of a cache's visible part


@st.composite
def attention_cases(
    draw: st.DrawFn,
    capabilities: Capabilities,
    *,
    decode: bool,
    limits: Limits,
    group_sizes: tuple[int, ...] = GROUP_SIZES,
    dtypes: tuple[torch.dtype, ...] | None = None,
    empties: bool = False,
    paged: bool | None = None,
    strided: bool = True,
    kv_heads: tuple[int, ...] = (1, 2, 3, 4, 8),
    min_sequences: int = 1,
) -> AttentionCase:
    """A batch over every shape that the implementation takes. empties: sequences without queries (prefill), rows of context 0 (decode)."""
    dtype = draw(st.sampled_from(dtypes or capabilities.dtypes), label="dtype")
    is_paged = decode or (draw(st.booleans(), label="paged") if paged is None else paged)
    block_size = draw(st.sampled_from(capabilities.allowed("block_sizes", BLOCK_SIZES)), label="block_size")
    head_dim = draw(st.sampled_from(capabilities.allowed("head_dims", HEAD_DIMS)), label="head_dim")
    group_size = draw(st.sampled_from(capabilities.allowed("group_sizes", group_sizes)), label="group_size")
    num_kv_heads = draw(st.sampled_from(kv_heads), label="num_kv_heads")
    if head_dim * num_kv_heads * group_size > 2048 or num_kv_heads * head_dim > 512:
        num_kv_heads = 1
    per_position = num_kv_heads * head_dim
    context_limit = min(limits.context, capabilities.max_context or limits.context)
    count = draw(st.integers(min_sequences, max(min_sequences, limits.sequences)), label="sequences")
    maximum = max(1, min(context_limit, max(3, limits.elements // per_position)))
    if block_size > 100:
        maximum = max(maximum, min(context_limit, 2 * block_size + 1))
    contexts, queries = [], []
    for i in range(count):
        n = draw(lengths(block_size, maximum), label=f"context {i}")
        if empties and draw(st.booleans(), label=f"empty {i}"):
            n = 0 if decode else draw(st.sampled_from([0, n]), label=f"context of an empty sequence {i}")
            t = 1 if decode else 0
        else:
            t = 1 if decode else draw(query_counts(n, is_paged, limits.queries), label=f"queries {i}")
        contexts.append(n)
        queries.append(t)
    if not is_paged:  # without a cache the keys are those of this pass
        contexts = queries = [min(n, limits.queries) if t else 0 for n, t in zip(contexts, queries, strict=True)]
    return AttentionCase(
        decode=decode,
        dtype=dtype,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        query_lens=tuple(queries),
        context_lens=tuple(contexts),
        paged=is_paged,
        spare_blocks=draw(st.sampled_from([2, 3, 7]), label="spare_blocks"),
        spare_columns=draw(st.sampled_from([0, 1, 3]), label="spare_columns"),
        filler=draw(st.sampled_from(FILLERS), label="filler"),
        cache_layout=draw(st.sampled_from(CACHE_LAYOUTS if strided else CACHE_LAYOUTS[:2]), label="cache_layout"),
        row_layout=draw(st.sampled_from(ROW_LAYOUTS if strided else ROW_LAYOUTS[:1]), label="row_layout"),
        scale=draw(st.sampled_from([head_dim**-0.5, 0.25, 1.0, 0.04]), label="scale"),
        table_seed=draw(st.integers(0, 999), label="table_seed"),
        data_seed=draw(st.integers(0, 999), label="data_seed"),
    )


def query_counts(context: int, paged: bool, maximum: int) -> st.SearchStrategy[int]:
    """How many of a sequence's last positions are queried: one, all, a few around a tile, or anything."""
    most = min(context, maximum)
    if not paged:
        return st.just(most)
    few = sorted({n for n in (1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, most) if n <= most})
    return st.one_of(st.sampled_from(few), st.integers(1, most))


LONG_CONTEXTS = (513, 1024, 1025, 1030, 2047, 2048, 2049, 4090, 4097)


@st.composite
def long_contexts(draw: st.DrawFn, capabilities: Capabilities, *, decode: bool) -> AttentionCase:
    """One or two sequences far past the usual limit, and little beside their length."""
    most = capabilities.max_context or max(LONG_CONTEXTS)
    lengths_drawn = st.sampled_from([n for n in LONG_CONTEXTS if n <= most] or [most])
    contexts = tuple(draw(st.lists(lengths_drawn, min_size=1, max_size=2), label="contexts"))
    queries = tuple(1 if decode else draw(st.sampled_from([1, 2, 17]), label=f"queries {i}") for i in range(len(contexts)))
    head_dim = draw(st.sampled_from(capabilities.allowed("head_dims", (16, 64, 128))), label="head_dim")
    return AttentionCase(
        decode=decode,
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        block_size=draw(st.sampled_from(capabilities.allowed("block_sizes", (16, 64, 256, 1, 100))), label="block_size"),
        num_kv_heads=1,
        group_size=draw(st.sampled_from(capabilities.allowed("group_sizes", (1, 2, 5))), label="group_size"),
        head_dim=head_dim,
        query_lens=queries,
        context_lens=contexts,
        spare_columns=draw(st.sampled_from([0, 2]), label="spare_columns"),
        filler=draw(st.sampled_from(FILLERS), label="filler"),
        scale=head_dim**-0.5,
        table_seed=draw(st.integers(0, 999), label="table_seed"),
        data_seed=draw(st.integers(0, 999), label="data_seed"),
    )


@st.composite
def many_queries(draw: st.DrawFn, capabilities: Capabilities) -> AttentionCase:
    """One prefilled sequence of more queries than the usual tiles hold, half of the time after a cached prefix; little beside that."""
    most = min(150, capabilities.max_context or 150)
    queries = draw(st.sampled_from([n for n in (63, 64, 65, 127, 128, 129, 140) if n <= most] or [most]), label="queries")
    cached = draw(st.sampled_from([n for n in (0, 1, 16, 37, 64) if queries + n <= most] or [0]), label="cached")
    head_dim = draw(st.sampled_from(capabilities.allowed("head_dims", (16, 64))), label="head_dim")
    return AttentionCase(
        decode=False,
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        block_size=draw(st.sampled_from(capabilities.allowed("block_sizes", (16, 1, 64, 256))), label="block_size"),
        num_kv_heads=1,
        group_size=draw(st.sampled_from(capabilities.allowed("group_sizes", (1, 2))), label="group_size"),
        head_dim=head_dim,
        query_lens=(queries,),
        context_lens=(queries + cached,),
        scale=head_dim**-0.5,
        table_seed=draw(st.integers(0, 999), label="table_seed"),
        data_seed=draw(st.integers(0, 999), label="data_seed"),
    )
