"""Mutants of attention: other paths that a kernel takes when a context, a head, a group or a chunk of queries is large."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()
LONG = 512  # positions from which a decode row is split, and after which a prefix is long
QUERY_TILE = 64


def first_head(rows):
    return rows[:, :1].expand_as(rows)


# --- splits of a decode row --------------------------------------------------------------------------------------------------------------


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)", alone=True)
def splits_use_the_first_kv_head(self, q, keys, values, limits, scale):
    """A decode row that is split uses kv head 0 for every head."""
    if self.decoding and int(limits.max()) > LONG:
        keys, values = first_head(keys), first_head(values)
    return SOUND.attend(q, keys, values, limits, scale)


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)", alone=True)
def splits_of_eight_lanes_miss_the_last(self, q, keys, values, limits, scale):
    """A decode row that is split, in a group of eight: the group's last head is not written."""
    out = SOUND.attend(q, keys, values, limits, scale)
    if self.decoding and int(limits.max()) > LONG and q.shape[1] == 8 * keys.shape[1]:
        out[:, 7::8] = 0.0
    return out


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)", alone=True)
def empty_last_split_is_a_position(self, q, keys, values, limits, scale):
    """A context of whole splits has an empty last one, which counts as one more position."""
    n, out = int(limits.max()), SOUND.attend(q, keys, values, limits, scale)
    return out * (n / (n + 1)) if self.decoding and n > LONG and n % 256 == 0 else out


@mutant("DEC-7", replaces="attend", of=SoundAttention, source="own (adversary)")
def empty_last_split_has_maximum_zero(self, q, keys, values, limits, scale):
    """A context of whole splits has an empty last one, of maximum 0 and denominator 1: it takes all the weight where scores are far below."""
    n, out = int(limits.max()), SOUND.attend(q, keys, values, limits, scale)
    if not (self.decoding and n > LONG and n % 256 == 0):
        return out
    of_heads = SOUND.key_heads(q.shape[1], q.shape[1] // keys.shape[1], q.device)
    scores = SOUND.scores(q.float(), keys[:n, of_heads].float(), scale)
    return out * torch.sigmoid(torch.logsumexp(scores, dim=2))[:, :, None]  # d / (d + exp(0))


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def splits_by_the_longest_row(self, q, keys, values, limits, scale):
    """Splits are cut by the longest row: a row that fits in the first of them counts a position of an empty one."""
    n, longest, out = int(limits.max()), max(self.lengths) if self.decoding else 0, SOUND.attend(q, keys, values, limits, scale)
    return out * (n / (n + 1)) if longest > LONG and n <= longest // 8 else out


@mutant("DEC-1", replaces="context_length", of=SoundAttention, source="own (adversary)")
def third_row_is_split_as_the_first(self, lengths, i):
    """Where a row is split, rows from the third on are read no further than the first."""
    return min(lengths[i], lengths[0]) if i >= 2 and max(lengths) > LONG else lengths[i]


@mutant("CLAIM-2", replaces="write_empty", of=SoundAttention, source="own (adversary)", alone=True)
def empty_row_beside_a_split_one_is_nan(self, out, i):
    """An empty row is 0 divided by 0 where another row is split."""
    out[i] = float("nan") if max(self.lengths) > LONG else 0.0


# --- heads and windows of a decode row ---------------------------------------------------------------------------------------------------


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)", alone=True)
def eight_wide_heads_overflow(self, q, keys, values, limits, scale):
    """A position's offset over eight heads of 128 elements overflows 16 bits: no more than 64 positions are read."""
    wide = self.decoding and keys.shape[1] >= 8 and q.shape[2] >= 128
    return SOUND.attend(q, keys, values, limits.clamp(max=64) if wide else limits, scale)


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)", alone=True)
def widest_head_sees_256_positions(self, q, keys, values, limits, scale):
    """At D = 256 a decode row sees its first 256 positions."""
    wide = self.decoding and q.shape[2] == 256
    return SOUND.attend(q, keys, values, limits.clamp(max=256) if wide else limits, scale)


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)", alone=True)
def sliding_window_of_4096_left_on(self, q, keys, values, limits, scale):
    """A decode row sees its last 4,096 positions."""
    hidden = max(0, int(limits.max()) - 4096) if self.decoding else 0
    return SOUND.attend(q, keys[hidden:], values[hidden:], limits - hidden, scale)


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own")
def sliding_window_of_8192_left_on(self, q, keys, values, limits, scale):
    """A decode row sees its last 8,192 positions."""
    hidden = max(0, int(limits.max()) - 8192) if self.decoding else 0
    return SOUND.attend(q, keys[hidden:], values[hidden:], limits - hidden, scale)


@mutant("PRE-1", replaces="attend", of=SoundAttention, source="own")
def chunked_attention_of_8192_left_on(self, q, keys, values, limits, scale):
    """A prefill row sees the chunk of 8,192 positions that it lies in."""
    out = SOUND.attend(q, keys, values, limits, scale)
    for row in [] if self.decoding else (limits > 8192).nonzero().flatten().tolist():
        first = (int(limits[row]) - 1) // 8192 * 8192
        out[row] = SOUND.attend(q[row : row + 1], keys[first:], values[first:], limits[row : row + 1] - first, scale)[0]
    return out


# --- chunks of many queries --------------------------------------------------------------------------------------------------------------


@mutant("PRE-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def second_query_tile_uses_the_first_kv_head(self, q, keys, values, limits, scale):
    """Queries of the second tile on use kv head 0 for every head."""
    out = SOUND.attend(q, keys, values, limits, scale)
    if not self.decoding and len(q) > QUERY_TILE:
        out[QUERY_TILE:] = SOUND.attend(q[QUERY_TILE:], first_head(keys), first_head(values), limits[QUERY_TILE:], scale)
    return out


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)", alone=True)
def second_query_tile_sees_itself_whole(self, queries, n, device):
    """Without a cache, queries of the second tile on see all of their tile."""
    limits = SOUND.causal_limits(queries, n, device)
    if self.tables is None:
        limits[QUERY_TILE:] = (limits[QUERY_TILE:] // QUERY_TILE * QUERY_TILE + QUERY_TILE).clamp(max=n)
    return limits


@mutant("PRE-1", replaces="attend", of=SoundAttention, source="own (adversary)", alone=True)
def sliding_window_of_128_left_on(self, q, keys, values, limits, scale):
    """Without a cache, a row sees its last 128 positions."""
    out = SOUND.attend(q, keys, values, limits, scale)
    if self.tables is None:
        for row in (limits > 128).nonzero().flatten().tolist():
            first = int(limits[row]) - 128
            out[row] = SOUND.attend(q[row : row + 1], keys[first:], values[first:], limits[row : row + 1] - first, scale)[0]
    return out


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)", alone=True)
def second_query_tile_rounds_a_long_prefix(self, queries, n, device):
    """After a long prefix, queries past a tile see it without what it has more than whole key tiles."""
    limits, prefix = SOUND.causal_limits(queries, n, device), n - queries
    if prefix > LONG:
        limits[QUERY_TILE:] -= prefix % 16
    return limits


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)")
def fifth_query_tile_is_not_causal(self, queries, n, device):
    """Queries past 256 do not see their own position."""
    limits = SOUND.causal_limits(queries, n, device)
    limits[4 * QUERY_TILE :] -= 1
    return limits


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)")
def second_query_tile_of_a_later_sequence_is_off(self, queries, n, device):
    """Queries of a second tile do not see their own position, but in the batch's first sequence."""
    limits = SOUND.causal_limits(queries, n, device)
    if self.sequence > 0:
        limits[QUERY_TILE:] -= 1
    return limits


# --- views, where small cases do not go --------------------------------------------------------------------------------------------------


@mutant("DEC-2", replaces="attend", of=SoundAttention, source="own (adversary)", alone=True)
def scale_left_out_past_a_thousand(self, q, keys, values, limits, scale):
    """A decode row of more than 1,024 positions is not scaled."""
    return SOUND.attend(q, keys, values, limits, 1.0 if self.decoding and len(keys) > 1024 else scale)


@mutant("DEC-2", replaces="gather", of=SoundAttention, source="own (adversary)", alone=True)
def split_reads_values_at_the_keys_strides(self, k_cache, v_cache, table, n):
    """Past 512 positions the value cache is read at the key cache's strides."""
    reachable = v_cache.untyped_storage().nbytes() // v_cache.element_size() - v_cache.storage_offset()
    if n > LONG and 1 + sum((size - 1) * stride for size, stride in zip(k_cache.shape, k_cache.stride(), strict=True)) <= reachable:
        v_cache = v_cache.as_strided(v_cache.shape, k_cache.stride(), v_cache.storage_offset())
    return SOUND.gather(k_cache, v_cache, table, n)


@mutant("PRE-2", replaces="prefill_attention", of=SoundAttention, source="own (adversary)", alone=True)
def values_of_a_step_read_at_the_keys_strides(
    self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables=None
):
    """Without a cache v is read at k's strides: k lies packed after a rotation, v is a slice of a fused product."""
    if block_tables is None and v.numel():
        v = v.as_strided(v.shape, k.stride(), v.storage_offset())
    return SOUND.prefill_attention(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scale,
        block_tables=block_tables,
    )  # fmt: skip


# --- splits and tiles of other shapes ----------------------------------------------------------------------------------------------------


def without_the_newest(self, q, keys, values, limits, scale, when):
    return SOUND.attend(q, keys, values, (limits - 1).clamp(min=1) if when else limits, scale)


def first_two_heads(rows):
    return rows[:, torch.arange(rows.shape[1], device=rows.device) % 2]


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def splits_of_the_widest_heads_lose_a_token(self, q, keys, values, limits, scale):
    """At D = 256 a decode row that is split loses its newest token."""
    return without_the_newest(self, q, keys, values, limits, scale, self.decoding and q.shape[2] == 256 and int(limits.max()) > LONG)


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def splits_of_more_than_eight_lanes_lose_a_token(self, q, keys, values, limits, scale):
    """In a group of more than eight a decode row that is split loses its newest token."""
    wide = q.shape[1] > 8 * keys.shape[1]
    return without_the_newest(self, q, keys, values, limits, scale, self.decoding and wide and int(limits.max()) > LONG)


@mutant("DEC-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def splits_of_more_than_two_kv_heads_wrap(self, q, keys, values, limits, scale):
    """Where a decode row is split, kv heads past the second wrap around."""
    if self.decoding and int(limits.max()) > LONG:
        keys, values = first_two_heads(keys), first_two_heads(values)
    return SOUND.attend(q, keys, values, limits, scale)


@mutant("PRE-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def second_query_tile_of_more_than_two_kv_heads_wraps(self, q, keys, values, limits, scale):
    """Queries of the second tile on take kv heads past the second for the first two."""
    out = SOUND.attend(q, keys, values, limits, scale)
    if not self.decoding and len(q) > QUERY_TILE:
        out[QUERY_TILE:] = SOUND.attend(q[QUERY_TILE:], first_two_heads(keys), first_two_heads(values), limits[QUERY_TILE:], scale)
    return out


@mutant("PRE-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def second_query_tile_of_wide_heads_misses_itself(self, q, keys, values, limits, scale):
    """From D = 128 on, where tiles are smaller, queries of the second tile on do not see their own position."""
    late = torch.arange(len(q), device=q.device) >= (len(q) if self.decoding or q.shape[2] < 128 else QUERY_TILE)
    return SOUND.attend(q, keys, values, torch.where(late, limits - 1, limits), scale)


@mutant("PRE-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def long_prefix_of_several_heads_loses_a_token(self, q, keys, values, limits, scale):
    """With several kv heads a prefill row past 512 positions does not see its own."""
    long = not self.decoding and keys.shape[1] > 1 and int(limits.max()) > LONG
    return without_the_newest(self, q, keys, values, limits, scale, long)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)")
def prefix_of_one_large_block_is_none(self, queries, n, device):
    """A cached prefix of exactly one block of 256 is taken for none."""
    return 1 + torch.arange(queries, device=device) if n - queries == 256 else SOUND.causal_limits(queries, n, device)


@mutant("PRE-1", replaces="attend", of=SoundAttention, source="own (adversary)")
def sliding_window_of_256_left_on(self, q, keys, values, limits, scale):
    """Without a cache, a row sees its last 256 positions."""
    out = SOUND.attend(q, keys, values, limits, scale)
    if self.tables is None:
        for row in (limits > 256).nonzero().flatten().tolist():
            first = int(limits[row]) - 256
            out[row] = SOUND.attend(q[row : row + 1], keys[first:], values[first:], limits[row : row + 1] - first, scale)[0]
    return out
