"""Mutants of attention: caches that are views, launch grids that are cut, output buffers in turn, rows of a large page."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()
LONG = 512  # positions from which a decode row is split
MANY = 16  # rows of a decode step
LARGE = 1024  # slots of a page


def without_the_newest_token(context_lens):
    return torch.where(context_lens > LONG, context_lens - 1, context_lens)


def sound_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables):
    return SOUND.prefill_attention(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scale,
        block_tables=block_tables,
    )  # fmt: skip


# --- caches that are views ---------------------------------------------------------------------------------------------------------------


@mutant("DEC-1", replaces="decode_attention", of=SoundAttention, source="own (adversary)")
def long_rows_of_views_lose_a_token(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """Where the caches are not contiguous, a decode row past 512 positions loses its newest token."""
    lens = context_lens if k_cache.is_contiguous() else without_the_newest_token(context_lens)
    return SOUND.decode_attention(q, k_cache, v_cache, context_lens=lens, block_tables=block_tables, scale=scale)


@mutant("DEC-1", replaces="decode_attention", of=SoundAttention, source="own (adversary)", alone=True)
def long_rows_of_views_lose_a_token_among_many(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """The same, but only in a batch of more than 16 rows."""
    lens = context_lens if k_cache.is_contiguous() or len(q) <= MANY else without_the_newest_token(context_lens)
    return SOUND.decode_attention(q, k_cache, v_cache, context_lens=lens, block_tables=block_tables, scale=scale)


# --- launch grids ------------------------------------------------------------------------------------------------------------------------


def past_the_grid(out, num_kv_heads, programs):
    """The heads of programs b * Hk + h from `programs` on hold what the memory held."""
    out.view(len(out) * num_kv_heads, out.shape[1] // num_kv_heads, out.shape[2])[programs:] = float("nan")
    return out


@mutant("DEC-8", replaces="decode_attention", of=SoundAttention, source="own (adversary)")
def decode_grid_of_512_programs(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """The grid of a decode step ends at 512 programs, one for each sequence and kv head: rows past them are not written."""
    out = SOUND.decode_attention(q, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=scale)
    return past_the_grid(out, k_cache.shape[2], 512)


@mutant("DEC-8", replaces="decode_attention", of=SoundAttention, source="own (adversary)")
def decode_grid_of_1024_programs(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """The grid of a decode step ends at 1,024 programs."""
    out = SOUND.decode_attention(q, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=scale)
    return past_the_grid(out, k_cache.shape[2], 1024)


def sequences_past_the_grid(out, cu_seqlens_q, num_kv_heads, programs):
    by_head = out.view(len(out), num_kv_heads, out.shape[1] // num_kv_heads, out.shape[2])
    sums = cu_seqlens_q.tolist()
    for i in range(len(sums) - 1):
        by_head[sums[i] : sums[i + 1], max(0, programs - i * num_kv_heads) :] = float("nan")
    return out


@mutant("PRE-8", replaces="prefill_attention", of=SoundAttention, source="own (adversary)")
def prefill_grid_of_512_programs(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables=None):
    """The grid of a prefill ends at 512 programs, one for each sequence and kv head."""
    out = sound_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables)
    return sequences_past_the_grid(out, cu_seqlens_q, k.shape[-2], 512)


@mutant("PRE-8", replaces="prefill_attention", of=SoundAttention, source="own (adversary)")
def prefill_grid_of_1024_programs(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables=None):
    """The grid of a prefill ends at 1,024 programs."""
    out = sound_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables)
    return sequences_past_the_grid(out, cu_seqlens_q, k.shape[-2], 1024)


# --- output buffers ----------------------------------------------------------------------------------------------------------------------


def in_turn(self, out, count):
    """One of `count` buffers of a shape, in turn."""
    key = (tuple(out.shape), out.dtype)
    buffers = self.__dict__.setdefault("buffers", {}).setdefault(key, [])
    if len(buffers) < count:
        buffers.append(out)
        return out
    buffers.append(buffers.pop(0))
    return buffers[-1].copy_(out)


@mutant("DEC-9", replaces="returned", of=SoundAttention, source="own (adversary)", alone=True)
def decode_two_output_buffers_in_turn(self, out):
    """Decode results of one shape go to two buffers in turn: the call after the next overwrites a result."""
    return in_turn(self, out, 2) if self.decoding else out


@mutant("PRE-9", replaces="returned", of=SoundAttention, source="own (adversary)", alone=True)
def prefill_two_output_buffers_in_turn(self, out):
    """Prefill results of one shape go to two buffers in turn."""
    return out if self.decoding else in_turn(self, out, 2)


@mutant("DEC-9", replaces="returned", of=SoundAttention, source="own", alone=True)
def decode_four_output_buffers_in_turn(self, out):
    """Decode results of one shape go to four buffers in turn."""
    return in_turn(self, out, 4) if self.decoding else out


# --- large pages -------------------------------------------------------------------------------------------------------------------------


class LargePages(SoundAttention):
    CAPABILITIES: ClassVar[dict[str, Any]] = {**SoundAttention.CAPABILITIES, "block_sizes": (2048,)}


def without_row(out, block_tables, cu_seqlens_q, cu_seqlens_k, place):
    """The rows at `place` of a page are 0, in sequences that reach past 1,024 positions."""
    if block_tables is None:
        return out
    sums, lens = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    for i, n in enumerate(lens):
        row = sums[i + 1] - n + place
        if n > LARGE and sums[i] <= row < sums[i + 1]:
            out[row] = 0.0
    return out


def rows_of_pages(place):
    def prefill_attention(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables=None):
        out = sound_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables)
        return without_row(out, block_tables, cu_seqlens_q, cu_seqlens_k, place(k.shape[1]) if k.shape[1] >= LARGE else -1)

    return prefill_attention


def last_row_of_a_large_page_is_zero(size):
    """The query row at the last position of a page of 1,024 slots or more is 0."""
    return size - 1


def first_row_after_a_large_page_is_zero(size):
    """The query row at the first position of the second page of 1,024 slots or more is 0."""
    return size


def middle_row_of_a_large_page_is_zero(size):
    """One query row in the middle of a page of 1,024 slots or more is 0."""
    return size // 2 + 77


for fault in (last_row_of_a_large_page_is_zero, first_row_after_a_large_page_is_zero, middle_row_of_a_large_page_is_zero):
    for sound, suffix in ((SoundAttention, ""), (LargePages, "_alone")):
        planted = rows_of_pages(fault)
        planted.__name__, planted.__doc__ = fault.__name__ + suffix, fault.__doc__
        mutant("PRE-1", replaces="prefill_attention", of=sound, source="own (adversary)")(planted)
