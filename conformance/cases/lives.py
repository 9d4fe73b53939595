"""Lives: a small pool, and a program of what happens to the sequences in it. An operation that does not apply is left out.

Prompts are zeros with a few changed tokens, so that prefixes are shared, and missed, by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from conformance.capabilities import Capabilities
from conformance.cases.sequences import NO_LIMIT

BLOCK_SIZES = (4, 1, 2, 3, 16)
OTHER_TOKENS = (1, 2**16, 2**33)  # what stands beside token 0 in a pool; the latter two are 0 in 16 and in 32 bits
MOST_BLOCKS = 12
MOST_PHRASES = 16
LONG = 1100  # tokens; a prompt of several blocks is not longer, and where a single block is, a prompt ends around it
ALL = 100_000  # tokens of a chunk: all that are left


@dataclass(frozen=True)
class Admit:
    """A prompt of `length` zeros, but for the pool's other token at the positions `changed`."""

    length: int
    changed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prefill:
    """One batch: the i-th sequence that has tokens to compute gets a chunk of chunks[i % len(chunks)] of them; 0 leaves it out."""

    chunks: tuple[int, ...]
    with_decodes: bool = False  # sequences that are decoding ride along, with one token each


@dataclass(frozen=True)
class Decode:
    """Every sequence whose prompt is computed gets a token, and computes it."""

    token: int = 0  # 1: the pool's other token


@dataclass(frozen=True)
class Fork:
    which: int = 0


@dataclass(frozen=True)
class Preempt:
    which: int = 0


@dataclass(frozen=True)
class Resume:
    which: int = 0


@dataclass(frozen=True)
class Finish:
    which: int = 0


Operation = Admit | Prefill | Decode | Fork | Preempt | Resume | Finish


@dataclass(frozen=True)
class Pool:
    """Where a life takes place."""

    dtype: torch.dtype
    block_size: int
    num_blocks: int
    num_kv_heads: int = 1
    group_size: int = 1
    head_dim: int = 16
    order_seed: int = 0  # in which order blocks are handed out
    other_token: int = 1  # besides 0
    longest: int = NO_LIMIT  # tokens of a sequence: a longer prompt is cut, and what is so long gets no more tokens

    def headline(self, implementation: str, device: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{implementation}   {dtype} · S {self.block_size} · Hk {self.num_kv_heads} · G {self.group_size} · D {self.head_dim} · {device}"
        )

    def literals(self) -> list[tuple[str, str]]:
        other = f", tokens are 0 and {self.other_token}" if self.other_token != 1 else ""
        return [("pool", f"{self.num_blocks} blocks of {self.block_size} tokens{other}")]

    def size(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class LifeCase:
    pool: Pool
    program: tuple[Operation, ...]

    def headline(self, implementation: str, device: str) -> str:
        return self.pool.headline(implementation, device)

    def literals(self) -> list[tuple[str, str]]:
        """The program is told as the life that it became."""
        return self.pool.literals()

    def size(self) -> int:
        """Tokens of its prompts."""
        return sum(operation.length for operation in self.program if isinstance(operation, Admit)) + len(self.program)


@st.composite
def pools(draw: st.DrawFn, capabilities: Capabilities) -> Pool:
    block_size = draw(st.sampled_from(capabilities.allowed("block_sizes", BLOCK_SIZES)), label="block_size")
    most = min(MOST_BLOCKS, max(4, MOST_BLOCKS * 256 // block_size))
    pool = Pool(
        dtype=draw(st.sampled_from(capabilities.dtypes), label="dtype"),
        block_size=block_size,
        num_blocks=draw(st.one_of(st.integers(min(2, most), min(5, most)), st.integers(1, most)), label="num_blocks") + capabilities.reserved_blocks,
        num_kv_heads=draw(st.sampled_from((1, 2)), label="num_kv_heads"),
        group_size=draw(st.sampled_from(capabilities.allowed("group_sizes", (1, 2))), label="group_size"),
        head_dim=draw(st.sampled_from(capabilities.allowed("head_dims", (16,))), label="head_dim"),
        order_seed=draw(st.integers(0, 99), label="order_seed"),
        longest=capabilities.max_context or NO_LIMIT,
    )
    return replace(pool, other_token=OTHER_TOKENS[pool.order_seed % len(OTHER_TOKENS)])


def near_blocks(block_size: int, most_blocks: int) -> st.SearchStrategy[int]:
    """A number of tokens, from 1 on: around the end of a block, or anywhere."""
    most_blocks = max(1, min(most_blocks, LONG // block_size))
    around = sorted({max(1, k * block_size + d) for k in range(most_blocks + 1) for d in (-1, 0, 1)})
    return st.one_of(st.sampled_from(around), st.integers(1, most_blocks * block_size + 1))


def admits(block_size: int) -> st.SearchStrategy[Admit]:
    """Most prompts are zeros alone: they hit. A changed token lies at a block's end, in the first block, or anywhere."""
    changed = st.one_of(st.just(()), st.tuples(st.sampled_from(sorted({0, block_size - 1, 2 * block_size - 1, block_size}))),
                        st.tuples(st.integers(0, 3 * block_size)))  # fmt: skip
    return st.builds(Admit, near_blocks(block_size, 3), changed)


def prefills(block_size: int) -> st.SearchStrategy[Prefill]:
    chunk = st.one_of(st.just(ALL), near_blocks(block_size, 2), st.integers(0, 3))
    return st.builds(Prefill, st.lists(chunk, min_size=1, max_size=3).map(tuple), st.booleans())


def phrases(block_size: int) -> st.SearchStrategy[tuple[Operation, ...]]:
    """What follows each other in an engine: a prompt and its prefill, a request from end to end, a fork between two tokens."""
    which, admit, whole = st.integers(0, 3), admits(block_size), st.just(Prefill((ALL,)))
    alone = st.one_of(
        admit, prefills(block_size), st.builds(Decode, st.integers(0, 1)), st.builds(Fork, which), st.builds(Preempt, which),
        st.builds(Resume, which), st.builds(Finish, which),
    )  # fmt: skip
    return st.one_of(
        alone.map(lambda operation: (operation,)),
        st.tuples(admit, whole),
        st.tuples(admit, prefills(block_size), whole),
        st.tuples(admit, prefills(block_size), whole, st.builds(Finish, which)),
        st.tuples(admit, whole, st.builds(Finish, which)),
        st.tuples(admit, whole, st.just(Decode()), st.builds(Finish, which)),
        st.tuples(admit, whole, st.builds(Fork, which), st.just(Decode())),
        st.tuples(st.just(Decode()), st.builds(Fork, which), st.just(Decode())),
        st.tuples(st.builds(Preempt, which), st.builds(Resume, which), whole),
    )  # fmt: skip


@st.composite
def lives(draw: st.DrawFn, capabilities: Capabilities) -> LifeCase:
    """A program begins with a prompt."""
    pool = draw(pools(capabilities))
    first = draw(admits(pool.block_size))
    rest = draw(st.lists(phrases(pool.block_size), min_size=1, max_size=MOST_PHRASES))
    return LifeCase(pool, (first, *(operation for phrase in rest for operation in phrase)))


def fixed_lives(capabilities: Capabilities) -> list[LifeCase]:
    """What every effort tries of a block manager: prompts whose tokens are alike in 16 and in 32 bits, and branches that grow apart."""
    size = capabilities.allowed("block_sizes", (1, *BLOCK_SIZES))[0]
    pool = Pool(
        capabilities.dtypes[0], size, MOST_BLOCKS + capabilities.reserved_blocks, group_size=capabilities.allowed("group_sizes", (1, 2))[0],
        head_dim=capabilities.allowed("head_dims", (16,))[0], longest=capabilities.max_context or NO_LIMIT,
    )  # fmt: skip
    whole = Prefill((ALL,))
    length = (2 if 2 * size <= LONG else 1) * size + 1
    alike = (Admit(length), whole, Admit(length, (0,)), whole)
    # the parent's tokens are 0 0 0, its fork's 0 1 1: a prompt of 0 0 1 0 hits no third block
    apart = (Admit(1), whole, Fork(), Decode(), Decode(), Admit(4, (2,)), whole)
    fixed = [*(LifeCase(replace(pool, other_token=token), alike) for token in OTHER_TOKENS[1:]), LifeCase(pool, apart)]
    size = capabilities.allowed("block_sizes", (4, 3, 16))[0]
    if size >= 3:  # a block that three share, or two that are about to write a chunk into it
        three = (Admit(1), whole, Fork(), Fork(), Decode())
        chunks = (Admit(3), Prefill((1,)), Fork(), whole)
        fixed += [LifeCase(replace(pool, block_size=size), program) for program in (three, chunks)]
    return fixed
