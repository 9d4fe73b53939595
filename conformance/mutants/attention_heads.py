"""Mutants of attention: which kv head a query head reads, and which lane of a group is which."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()


@mutant("DEC-6", replaces="key_heads", of=SoundAttention, source="own")
def head_modulo(self, heads, group, device):
    """Query head h uses kv head h mod Hk."""
    return torch.arange(heads, device=device) % (heads // group)


@mutant("DEC-6", replaces="key_heads", of=SoundAttention, source="vllm #47248")
def group_lanes_alias(self, heads, group, device):
    """Where G is no power of two, group lanes are padded to one and alias the next kv head."""
    padded = 1 << (group - 1).bit_length()
    return (torch.arange(heads, device=device) // padded).clamp(max=heads // group - 1)


@mutant("DEC-1", replaces="value_heads", of=SoundAttention, source="own")
def value_of_next_head(self, heads, group, device):
    """K of head h meets V of head h + 1."""
    kv_heads = heads // group
    return (torch.arange(heads, device=device) // group + 1) % kv_heads


@mutant("DEC-6", replaces="key_heads", of=SoundAttention, source="vllm #23424", alone=True)
def decode_groups_over_eight_cut(self, heads, group, device):
    """A decode step cuts a group of more than eight query heads in tiles of eight, and takes the tile's number for the kv head."""
    cut = self.decoding and group > 8
    return (torch.arange(heads, device=device) // (8 if cut else group)).clamp(max=heads // group - 1)


@mutant("PRE-6", replaces="key_heads", of=SoundAttention, source="vllm #23424", alone=True)
def prefill_groups_over_eight_cut(self, heads, group, device):
    """A prefill cuts a group of more than eight query heads in tiles of eight, and takes the tile's number for the kv head."""
    cut = not self.decoding and group > 8
    return (torch.arange(heads, device=device) // (8 if cut else group)).clamp(max=heads // group - 1)


@mutant("DEC-6", replaces="attend", of=SoundAttention, source="own (adversary)")
def query_lanes_over_eight_alias(self, q, keys, values, limits, scale):
    """In groups of more than eight, query lanes past the eighth read the query of the lane eight before."""
    head, group = torch.arange(q.shape[1], device=q.device), q.shape[1] // keys.shape[1]
    lanes = torch.where(head % group >= 8, head - 8, head) if group > 8 else head
    return SOUND.attend(q[:, lanes], keys, values, limits, scale)


@mutant("DEC-1", replaces="key_heads", of=SoundAttention, source="own (adversary)")
def more_than_four_kv_heads_wrap(self, heads, group, device):
    """kv heads past the fourth wrap around."""
    return (torch.arange(heads, device=device) // group) % 4


@mutant("DEC-6", replaces="attend", of=SoundAttention, source="own")
def query_lanes_over_32_alias(self, q, keys, values, limits, scale):
    """In groups of more than 32, query lanes past the 32nd read the query of the lane 32 before."""
    head, group = torch.arange(q.shape[1], device=q.device), q.shape[1] // keys.shape[1]
    lanes = torch.where(head % group >= 32, head - 32, head) if group > 32 else head
    return SOUND.attend(q[:, lanes], keys, values, limits, scale)
