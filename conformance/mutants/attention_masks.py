"""Mutants of attention: the causal mask, the tail past a context, rows that see nothing."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="flash-attention #282")
def causal_top_left(self, queries, n, device):
    """The causal mask is aligned top-left."""
    return (1 + torch.arange(queries, device=device)).clamp(max=n)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="sparkinfer #3")
def causal_sees_one_later(self, queries, n, device):
    """A row sees the position after its own."""
    return (n - queries + 2 + torch.arange(queries, device=device)).clamp(max=n)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own")
def causal_misses_itself(self, queries, n, device):
    """A row does not see its own position."""
    return (n - queries + torch.arange(queries, device=device)).clamp(min=1)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own")
def not_causal(self, queries, n, device):
    """Every row sees the whole context."""
    return torch.full((queries,), n, device=device)


@mutant("PRE-4", replaces="causal_limits", of=SoundAttention, source="kekzl/imp #553")
def second_chunk_misaligned(self, queries, n, device):
    """With several queries after a cached prefix the mask starts at the chunk's tile: whole tiles of 16 of the prefix end are missed."""
    limits = n - queries + 1 + torch.arange(queries, device=device)
    return limits if n == queries or queries == 1 else limits.minimum(torch.tensor(n - n % 16 if n > 16 else n, device=device)).clamp(min=1)


@mutant("DEC-1", replaces="mask", of=SoundAttention, source="kekzl/imp #1304 M03")
def padding_lanes_score_zero(self, scores, hidden):
    """Lanes past the context score 0 in place of -inf."""
    return scores.masked_fill(hidden[:, None, :], 0.0)


@mutant("DEC-1", replaces="mask", of=SoundAttention, source="flashinfer #3716")
def tail_not_masked(self, scores, hidden):
    """The boundary tile is not masked in a decode step."""
    return scores if scores.shape[0] == 1 else SOUND.mask(scores, hidden)


@mutant("CLAIM-1", replaces="mask_values", of=SoundAttention, source="vllm #936", alone=True)
def tail_values_not_masked(self, values, hidden):
    """Scores past the context are masked and V is not: 0 * NaN."""
    return values


@mutant("CLAIM-1", replaces="mask", of=SoundAttention, source="Wan2GP #1628")
def tail_keys_masked_by_adding(self, scores, hidden):
    """The mask is added: NaN in a key's tail plus -inf stays NaN."""
    return scores + torch.where(hidden, -torch.inf, 0.0)[:, None, :]


@mutant("CLAIM-2", replaces="write_empty", of=SoundAttention, source="flashinfer #363", alone=True)
def empty_row_not_zero(self, out, i):
    """A row of context 0 is left as it was allocated."""
    out[i] = 7.0


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="vllm #39303", alone=True)
def own_token_dropped_past_a_thousand(self, queries, n, device):
    """Past 1,024 positions a prefill row does not see its own token."""
    limits = SOUND.causal_limits(queries, n, device)
    return torch.where(limits > 1024, limits - 1, limits)


@mutant("DEC-8", replaces="write_empty", of=SoundAttention, source="flashinfer #363", alone=True)
def empty_row_spreads(self, out, i):
    """A row of context 0 writes NaN over the rows before it."""
    out[:i] = float("nan")


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)")
def second_query_tile_forgets_the_prefix(self, queries, n, device):
    """The second tile of 64 queries counts its positions from the chunk's start, without the cached prefix."""
    limits = SOUND.causal_limits(queries, n, device)
    row = torch.arange(queries, device=device)
    return torch.where(row >= 64, row + 1, limits)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)")
def tile_of_128_queries_ends_early(self, queries, n, device):
    """The last row of a tile of 128 queries misses its own position."""
    limits = SOUND.causal_limits(queries, n, device)
    return torch.where(torch.arange(queries, device=device) == 127, limits - 1, limits)


@mutant("DEC-7", replaces="mask", of=SoundAttention, source="own")
def mask_is_minus_ten_thousand(self, scores, hidden):
    """Hidden scores are -10,000, which a shift of -1e6 makes the largest."""
    return scores.masked_fill(hidden[:, None, :], -1e4)
