"""Mutants of attention: tiles of keys, splits of a context, their running maximum and their weights."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()


@mutant("DEC-1", replaces="tile_starts", of=SoundAttention, source="own")
def first_tile_skipped(self, start, end):
    """The first tile is skipped where there is another."""
    return range(start + self.tile, end, self.tile) if end - start > self.tile else range(start, end, self.tile)


@mutant("DEC-1", replaces="tile_starts", of=SoundAttention, source="kekzl/imp #1304 M06")
def last_tile_skipped(self, start, end):
    """The last tile is skipped where there is another."""
    return range(start, max(start + self.tile, end - self.tile), self.tile)


@mutant("DEC-1", replaces="tile_starts", of=SoundAttention, source="own")
def tiles_overlap(self, start, end):
    """From the third tile on, tiles advance by one lane too few."""
    whole = list(range(start, end, self.tile))
    return whole[:2] + [first - 1 for first in whole[2:]]


@mutant("DEC-1", replaces="split_starts", of=SoundAttention, source="mojo_opset #392")
def last_split_dropped(self, n):
    """The last split is dropped where there are several."""
    starts = range(0, n, self.split) if n else range(1)
    return starts[:-1] if len(starts) > 1 else starts


@mutant("DEC-2", replaces="split_weight", of=SoundAttention, source="kekzl/imp #1304 M32")
def split_weight_dropped(self, part_largest, largest):
    """Splits are combined without their rescale weight."""
    return torch.where(part_largest == -torch.inf, 0.0, 1.0)


@mutant("DEC-2", replaces="rescaled", of=SoundAttention, source="own")
def accumulator_not_rescaled(self, acc, rescale):
    """The accumulator is not rescaled when the running maximum grows."""
    return acc


@mutant("DEC-7", replaces="new_maximum", of=SoundAttention, source="vllm #4405")
def maximum_starts_at_zero(self, largest, scores):
    """The running maximum starts at 0: all weights underflow where every score is far below."""
    return torch.maximum(largest.clamp(min=0.0), scores.amax(dim=2))


@mutant("DEC-7", replaces="new_maximum", of=SoundAttention, source="own", alone=True)
def decode_subtracts_no_maximum(self, largest, scores):
    """A decode step exponentiates without subtracting the maximum: right until scores pass the thousands."""
    known = SOUND.new_maximum(largest, scores)
    return known if not self.decoding or float(scores.abs().nan_to_num(0.0, 0.0, 0.0).max()) < 2000 else torch.zeros_like(largest)


@mutant("PRE-7", replaces="new_maximum", of=SoundAttention, source="own", alone=True)
def prefill_subtracts_no_maximum(self, largest, scores):
    """A prefill exponentiates without subtracting the maximum: right until scores pass the thousands."""
    known = SOUND.new_maximum(largest, scores)
    return known if self.decoding or float(scores.abs().nan_to_num(0.0, 0.0, 0.0).max()) < 2000 else torch.zeros_like(largest)
