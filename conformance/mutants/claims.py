"""Mutants of what is claimed: a capture that is baked in, sums whose order changes from call to call, or with the batch."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention
from conformance.mutants.sound_store import SoundStore


class SoundBuckets(SoundStore, SoundAttention):
    """Store and attend in one object, for padded batches over buffers that stay. On a GPU it cannot be captured: lengths are read on the host."""

    CAPABILITIES: ClassVar[dict[str, Any]] = {"claims": (*SoundAttention.CAPABILITIES["claims"], "cuda_graph")}


class SoundRepeats(SoundAttention):
    """It claims no more than that a call repeats."""

    CAPABILITIES: ClassVar[dict[str, Any]] = {"claims": ("deterministic",)}


@mutant("CLAIM-5", replaces="read_lengths", of=SoundBuckets, source="aprender #2030", alone=True)
def lengths_baked_in_at_capture(self, context_lens):
    """No row of a buffer that was used before is longer than the longest one of its first call: the number of tiles was captured."""
    lengths = BUCKETS.read_lengths(context_lens)
    known = self.__dict__.setdefault("known", [])
    for buffer, longest in known:
        if buffer is context_lens:
            return [min(n, longest) for n in lengths]
    known.append((context_lens, max(lengths, default=0)))
    return lengths


@mutant("CLAIM-5", replaces="skips", of=SoundBuckets, source="rvllm #32")
def padding_goes_to_slot_zero(self, slot, cache):
    """A row of padding writes into slot 0."""
    if slot < 0:
        cache[0, 0] = 0.0
    return slot < 0


@mutant("CLAIM-6", replaces="tile_starts", of=SoundRepeats, source="aiter #5428", alone=True)
def tiles_race(self, start, end):
    """Tiles are summed in the order in which they happen to be done: every third call another way round."""
    calls = self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
    return ATTENTION.tile_starts(start, end)[::-1] if calls % 3 == 0 else ATTENTION.tile_starts(start, end)


@mutant("CLAIM-7", replaces="tile_starts", of=SoundAttention, source="vllm #27433", alone=True)
def tiles_by_batch_size(self, start, end):
    """The order of a decode row's tiles depends on how many rows there are."""
    many = self.decoding and len(self.lengths) > 1
    return ATTENTION.tile_starts(start, end)[::-1] if many else ATTENTION.tile_starts(start, end)


@mutant("CLAIM-7", replaces="rows_of_batch", of=SoundAttention, source="own (adversary)", alone=True)
def tiles_by_sixteen_sequences(self, count):
    """Tiles of another size are taken for a prefill of 16 sequences or more."""
    self.tile = 16 if not self.decoding and count >= 16 else 32
    return range(count)


@mutant("CLAIM-7", replaces="tile_starts", of=SoundAttention, source="own (adversary)", alone=True)
def tiles_by_sixty_four_rows(self, start, end):
    """The order of a decode row's tiles is another one from 64 rows on."""
    many = self.decoding and len(self.lengths) >= 64
    return ATTENTION.tile_starts(start, end)[::-1] if many else ATTENTION.tile_starts(start, end)


BUCKETS, ATTENTION = SoundBuckets(), SoundAttention()
