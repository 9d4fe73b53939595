"""Mutants of attention: rows and sequences of a batch that are missed or disturbed, results and inputs that are overwritten."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()


@mutant("DEC-5", replaces="returned", of=SoundAttention, source="flash-attention #1217")
def combine_with_batch_stride_zero(self, out):
    """The combine step writes every sequence's row to the first when there are more than eight."""
    if len(out) > 8:
        out[1:] = 0.0
    return out


@mutant("DEC-8", replaces="returned", of=SoundAttention, source="flash-attention #1217")
def last_head_not_written(self, out):
    """The last head of every row is never written: it holds what the memory held."""
    out[:, -1] = torch.empty_like(out[:, -1])
    return out


@mutant("PRE-8", replaces="rows_of_batch", of=SoundAttention, source="flashinfer #725")
def last_sequence_not_computed(self, count):
    """The last sequence of several is not computed."""
    return range(count - 1 if count > 1 else count)


@mutant("DEC-5", replaces="rows_of_batch", of=SoundAttention, source="tt-metal #50512")
def decode_rows_after_the_eighth_missing(self, count):
    """Only the first eight rows of a decode step are computed."""
    return range(min(count, 8) if self.decoding else count)


@mutant("PRE-5", replaces="rows_of_batch", of=SoundAttention, source="flash-attention #1217")
def prefill_sequences_after_the_eighth_missing(self, count):
    """Only the first eight sequences of a prefill are computed."""
    return range(count if self.decoding else min(count, 8))


@mutant("PRE-8", replaces="queries_of", of=SoundAttention, source="nano-vllm #144", alone=True)
def empty_sequence_ends_the_batch(self, sums_q, i):
    """A sequence without queries is taken for the batch's end: those after it are not computed."""
    return 0 if any(sums_q[j + 1] == sums_q[j] for j in range(i)) else SOUND.queries_of(sums_q, i)


@mutant("DEC-9", replaces="returned", of=SoundAttention, source="own", alone=True)
def decode_output_buffer_kept(self, out):
    """Decode results of one shape share one buffer: a later call overwrites an earlier result."""
    return kept(self, out) if self.decoding else out


@mutant("PRE-9", replaces="returned", of=SoundAttention, source="own", alone=True)
def prefill_output_buffer_kept(self, out):
    """Prefill results of one shape share one buffer: a later call overwrites an earlier result."""
    return out if self.decoding else kept(self, out)


def kept(self, out):
    buffer = self.__dict__.setdefault("kept", {}).setdefault((out.shape, out.dtype), out)
    return buffer.copy_(out)


@mutant("DEC-9", replaces="read_lengths", of=SoundAttention, source="own")
def lengths_changed(self, context_lens):
    """context_lens are advanced in place."""
    lengths = context_lens.tolist()
    context_lens += 1
    return lengths


@mutant("DEC-5", replaces="scores", of=SoundAttention, source="own (adversary)")
def nan_queries_spread(self, q, keys, scale):
    """A NaN query of one call makes the next row's scores NaN."""
    scores = SOUND.scores(q, keys, scale)
    before, self.saw_nan = self.__dict__.get("saw_nan", False), bool(torch.isnan(q).any())
    return scores * float("nan") if before and not self.saw_nan else scores


@mutant("DEC-5", replaces="returned", of=SoundAttention, source="flash-attention #1217")
def decode_rows_after_the_64th_repeat(self, out):
    """The grid is cut in 64 rows: later rows of a decode step repeat the first ones."""
    return out[torch.arange(len(out)) % 64] if self.decoding else out


@mutant("PRE-5", replaces="rows_of_batch", of=SoundAttention, source="flash-attention #1217")
def prefill_sequences_after_the_32nd_missing(self, count):
    """Only the first 32 sequences of a prefill are computed."""
    return range(count if self.decoding else min(count, 32))


@mutant("DEC-5", replaces="rows_of_batch", of=SoundAttention, source="own (adversary)", alone=True)
def decode_rows_after_the_256th_missing(self, count):
    """Only the first 256 rows of a decode step are computed."""
    return range(min(count, 256) if self.decoding else count)


@mutant("PRE-5", replaces="rows_of_batch", of=SoundAttention, source="own (adversary)", alone=True)
def prefill_sequences_after_the_64th_missing(self, count):
    """Only the first 64 sequences of a prefill are computed."""
    return range(count if self.decoding else min(count, 64))


@mutant("DEC-8", replaces="new_output", of=SoundAttention, source="own")
def empty_batch_has_no_grid(self, q):
    """A batch of nobody launches an empty grid, which is an error."""
    if len(q) == 0:
        raise RuntimeError("invalid argument: grid size 0")
    return SOUND.new_output(q)


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def many_rows_take_the_next_kv_head(self, q, keys, values, limits, scale):
    """From 32 rows on, a decode step reads the kv head after its own."""
    if self.decoding and len(self.lengths) > 32:
        keys, values = keys.roll(1, dims=1), values.roll(1, dims=1)
    return SOUND.attend(q, keys, values, limits, scale)


@mutant("DEC-5", replaces="attend", of=SoundAttention, source="own (adversary)")
def many_rows_of_groups_lose_a_token(self, q, keys, values, limits, scale):
    """From 32 rows on, a decode step of grouped heads does not see the newest token."""
    grouped = self.decoding and len(self.lengths) > 32 and q.shape[1] > keys.shape[1]
    return SOUND.attend(q, keys, values, (limits - 1).clamp(min=1) if grouped else limits, scale)


@mutant("DEC-8", replaces="context_length", of=SoundAttention, source="own (adversary)")
def row_after_an_empty_one_loses_a_token(self, lengths, i):
    """A row that is split, after one of context 0, does not see its newest token."""
    return lengths[i] - 1 if i and lengths[i - 1] == 0 and lengths[i] > 512 else lengths[i]


@mutant("PRE-1", replaces="rows_of_batch", of=SoundAttention, source="own (adversary)")
def sequences_without_a_cache_after_the_16th_missing(self, count):
    """Only the first 16 sequences of a prefill without a cache are computed."""
    return range(min(count, 16) if not self.decoding and self.tables is None else count)
