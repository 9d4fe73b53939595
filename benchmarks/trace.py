"""Lengths of real batches: snapshots of an engine that serves the public conversation trace of `conformance/data`.

A snapshot begins at request FIRST, so that the cache is warm: a prompt's leading blocks that an earlier request had are prefix hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from conformance.cases.requests import TOKENS_PER_HASH, Request, read_requests

FIRST = 500  # of the trace's 1,000 requests


class Lengths(NamedTuple):
    """Of each sequence of a batch: query tokens of this step, and tokens that they may see, themselves included."""

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]


def decoding(num_sequences: int, tokens_per_hash: int = TOKENS_PER_HASH, *, first: int = FIRST) -> Lengths:
    """One step of requests that are halfway through their answers."""
    requests = read_requests(tokens_per_hash)[first : first + num_sequences]
    return Lengths((1,) * len(requests), tuple(request.num_tokens + -(-request.num_generated // 2) for request in requests))


def prefilling(num_sequences: int, chunk: int, tokens_per_hash: int = TOKENS_PER_HASH) -> Lengths:
    """Chunks of prompts whose leading blocks hit the prefix cache, each prompt in the middle one of the chunks that are left to it."""
    requests = read_requests(tokens_per_hash)
    seen = {hash_id for request in requests[:FIRST] for hash_id in request.hash_ids}
    chunks = [middle_chunk(request, cached_tokens(request, seen, tokens_per_hash), chunk) for request in requests[FIRST : FIRST + num_sequences]]
    return Lengths(tuple(end - start for start, end in chunks), tuple(end for _, end in chunks))


def mixed(num_prefilling: int, chunk: int, num_decoding: int, tokens_per_hash: int = TOKENS_PER_HASH) -> Lengths:
    """A step that carries chunks of prompts and, after them, the single tokens of others."""
    return joined([prefilling(num_prefilling, chunk, tokens_per_hash), decoding(num_decoding, tokens_per_hash, first=FIRST + num_prefilling)])


def cached_tokens(request: Request, seen: set[int], tokens_per_hash: int) -> int:
    """Leading tokens that are in the cache: whole blocks, and never the whole prompt, whose last token has to be computed."""
    hits = len(list(takewhile(lambda hash_id: hash_id in seen, request.hash_ids)))
    return min(hits, (request.num_tokens - 1) // tokens_per_hash) * tokens_per_hash


def middle_chunk(request: Request, cached: int, chunk: int) -> tuple[int, int]:
    """(start, end) of it, in tokens of the prompt."""
    num_chunks = -(-(request.num_tokens - cached) // chunk)
    start = cached + num_chunks // 2 * chunk
    return start, min(start + chunk, request.num_tokens)


def joined(batches: Sequence[Lengths]) -> Lengths:
    return Lengths(tuple(n for batch in batches for n in batch.q_lens), tuple(n for batch in batches for n in batch.k_lens))
