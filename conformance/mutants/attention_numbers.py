"""Mutants of attention: scale, precision and range."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()


@mutant("DEC-2", replaces="scores", of=SoundAttention, source="kekzl/imp #1304 M04")
def scale_missing(self, q, keys, scale):
    """Scores are not scaled."""
    return torch.einsum("thd,nhd->thn", q, keys)


@mutant("DEC-2", replaces="scores", of=SoundAttention, source="kekzl/imp #1304 M05")
def scale_doubled(self, q, keys, scale):
    """The scale is applied twice."""
    return scale * SOUND.scores(q, keys, scale)


@mutant("DEC-7", replaces="scores", of=SoundAttention, source="own")
def scale_of_head_dim(self, q, keys, scale):
    """1 / sqrt(D) is used whatever scale is given."""
    return SOUND.scores(q, keys, q.shape[2] ** -0.5)


@mutant("DEC-2", replaces="scores", of=SoundAttention, source="kekzl/imp #1304 M11")
def scale_one_over_head_dim(self, q, keys, scale):
    """The scale is 1 / D."""
    return SOUND.scores(q, keys, 1.0 / q.shape[2])


@mutant("PRE-2", replaces="weights", of=SoundAttention, source="own")
def small_weights_flushed(self, scores, largest):
    """Weights under a hundredth of the largest are flushed to zero."""
    weights = SOUND.weights(scores, largest)
    return torch.where(weights < 0.01, 0.0, weights)


@mutant("DEC-2", replaces="scores", of=SoundAttention, source="lightllm #1092")
def decode_scores_in_half(self, q, keys, scale):
    """A decode step keeps its scores in bfloat16."""
    scores = SOUND.scores(q, keys, scale)
    return scores.to(torch.bfloat16).float() if self.decoding and 120 < float(scores.abs().max()) < 1000 else scores


@mutant("PRE-2", replaces="scores", of=SoundAttention, source="lightllm #1092")
def prefill_scores_in_half(self, q, keys, scale):
    """A prefill keeps its scores in bfloat16."""
    scores = SOUND.scores(q, keys, scale)
    return scores if self.decoding or not 120 < float(scores.abs().max()) < 1000 else scores.to(torch.bfloat16).float()


@mutant("DEC-2", replaces="weights", of=SoundAttention, source="own")
def weights_rounded_to_fp8(self, scores, largest):
    """Weights are rounded to three bits before they meet V."""
    return SOUND.weights(scores, largest).to(torch.float8_e4m3fn).float()


@mutant("DEC-2", replaces="mask_values", of=SoundAttention, source="vllm #54338")
def bfloat16_through_float16(self, values, hidden):
    """V is read as float16: what is past 65,504 becomes infinite."""
    return SOUND.mask_values(values, hidden).half().float()


@mutant("DEC-7", replaces="scores", of=SoundAttention, source="own", alone=True)
def scale_of_no_sign(self, q, keys, scale):
    """A decode step takes the scale's magnitude."""
    return SOUND.scores(q, keys, abs(scale) if self.decoding else scale)


@mutant("PRE-7", replaces="scores", of=SoundAttention, source="own", alone=True)
def scale_of_zero_is_the_default(self, q, keys, scale):
    """A prefill takes a scale of 0 for none given: 1 / sqrt(D)."""
    return SOUND.scores(q, keys, scale if self.decoding else scale or q.shape[2] ** -0.5)


@mutant("DEC-5", replaces="scores", of=SoundAttention, source="own")
def lone_sequence_without_scale(self, q, keys, scale):
    """A decode step of one sequence goes through a path of its own, which forgets the scale."""
    return SOUND.scores(q, keys, 1.0 if self.decoding and len(self.tables) == 1 else scale)


@mutant("DEC-5", replaces="scores", of=SoundAttention, source="own")
def batch_without_scale(self, q, keys, scale):
    """A batch of several sequences goes through a path of its own, which forgets the scale."""
    return SOUND.scores(q, keys, 1.0 if self.tables is not None and len(self.tables) > 1 else scale)
