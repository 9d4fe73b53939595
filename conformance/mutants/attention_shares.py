"""Mutants of decode attention: a batch's tiles of keys, row after row, are shared out among a fixed number of programs, whatever the lengths."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()
TILE = 32  # positions
PROGRAMS = 6


def tiles_of(length: int) -> int:
    return max(1, -(-length // TILE))


def shares_of(lengths: Sequence[int], i: int) -> tuple[list[int], int, int]:
    """(where the shares begin and end, the first tile of row i, the end of its tiles), all of it in tiles of the batch."""
    first = sum(map(tiles_of, lengths[:i]))
    total = sum(map(tiles_of, lengths))
    return [program * total // PROGRAMS for program in range(PROGRAMS + 1)], first, first + tiles_of(lengths[i])


@mutant("DEC-1", replaces="context_length", of=SoundAttention, source="own")
def row_ending_with_a_share_loses_a_part(self, lengths, i):
    """A row that ends where a share of the batch's work ends, before the last, is joined without the part of that share."""
    bounds, first, end = shares_of(lengths, i)
    inside = [bound for bound in bounds if first < bound < end]
    return (inside[-1] - first) * TILE if inside and end in bounds[:-1] else lengths[i]


@mutant("DEC-1", replaces="context_length", of=SoundAttention, source="own")
def row_beginning_with_a_share_loses_a_tile(self, lengths, i):
    """Of a row that begins where a share of the batch's work begins, after the first, and is longer than the share, the last tile is dropped."""
    bounds, first, end = shares_of(lengths, i)
    inside = [bound for bound in bounds if first < bound < end]
    return (end - first - 1) * TILE if inside and first in bounds[1:] else lengths[i]


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own: gpu_impl's first version of such a kernel")
def shares_that_nobody_has_are_joined(self, q, keys, values, limits, scale):
    """Where a batch has fewer tiles than there are programs, what programs without work left in memory is joined to the rows that are split."""
    out = SOUND.attend(q, keys, values, limits, scale)
    return out * 0.5 if self.decoding and sum(map(tiles_of, self.lengths)) < 8 * PROGRAMS and int(limits.max()) > TILE else out
