"""A second honest implementation, in vectorised torch on padded batches: no loop over tokens, blocks or tiles, no class, no seam.

It shares nothing with the sound one that mutants are made from: attention is scaled_dot_product_attention in float32, slots come from
tensors, shards are summed, and a race is run on logarithms.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from reference.records import DecodeBatch, PrefillBatch

CAPABILITIES = {"claims": ("nan_tail", "empty_zero", "spare_blocks", "checked", "deterministic")}


def from_zero(counts):
    return F.pad(torch.cumsum(counts, 0), (1, 0)).to(torch.int32)


def table_of(sequences):
    return pad_sequence([torch.tensor(s.block_table, dtype=torch.int32) for s in sequences], batch_first=True, padding_value=-1)


def prepare_prefill(sequences, block_size, *, device="cpu"):
    cached, scheduled = torch.tensor([(s.num_cached_tokens, s.num_scheduled_tokens) for s in sequences]).T
    cu_seqlens_q = from_zero(scheduled)
    positions = torch.arange(int(scheduled.sum())) + (cached - cu_seqlens_q[:-1]).repeat_interleave(scheduled)
    tokens = [torch.tensor(s.token_ids)[s.num_cached_tokens :][: s.num_scheduled_tokens] for s in sequences]
    tables = table_of(sequences)
    slots = compute_slot_mapping(positions, cu_seqlens_q, tables, block_size) if tables.shape[1] else torch.empty(0, dtype=torch.int32)
    lengths = cached + scheduled
    return PrefillBatch(
        torch.cat(tokens).to(device), positions.to(device), cu_seqlens_q.to(device), from_zero(lengths).to(device), int(scheduled.max()),
        int(lengths.max()), slots.to(device), tables.to(device) if cached.any() else None,
    )  # fmt: skip


def prepare_decode(sequences, block_size, *, device="cpu"):
    lengths = torch.tensor([len(s.token_ids) for s in sequences], dtype=torch.int32)
    positions, tables = lengths.long() - 1, table_of(sequences)
    slots = compute_slot_mapping(positions, torch.arange(len(sequences) + 1), tables, block_size)
    tokens = torch.tensor([s.token_ids[-1] for s in sequences])
    return DecodeBatch(*(t.to(device) for t in (tokens, positions, slots, lengths, tables)))


def compute_slot_mapping(positions, cu_seqlens_q, block_tables, block_size):
    sequence = torch.repeat_interleave(torch.arange(len(block_tables), device=positions.device), cu_seqlens_q.diff())
    block = block_tables.long()[sequence].gather(1, positions[:, None] // block_size).squeeze(1)
    return torch.add(positions % block_size, block, alpha=block_size).int()


def store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    num_slots, block_size = k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1]
    mapped = slot_mapping >= 0
    slots = slot_mapping[mapped].long()
    if (slots >= num_slots).any():
        raise ValueError(f"the largest slot is {int(slots.max())}, the cache has {num_slots}")
    for rows, cache in ((key, k_cache), (value, v_cache)):
        cache.index_put_((slots // block_size, slots % block_size), rows[mapped])


def padded_attention(q, keys, values, visible, scale):
    """q (B, t, Hq, D) over keys, values (B, n, Hk, D); query r of sequence b sees the first visible[b, r]. (B, t, Hq, D) float32."""
    seen = torch.arange(keys.shape[1], device=q.device) < visible[:, :, None]  # (B, t, n)
    held = seen.any(1)[:, :, None, None]
    keys, values = (t.float().masked_fill(~held, 0.0).transpose(1, 2) for t in (keys, values))
    out = F.scaled_dot_product_attention(q.float().transpose(1, 2), keys, values, attn_mask=seen[:, None], scale=scale, enable_gqa=True)
    return out.transpose(1, 2).masked_fill((visible <= 0)[:, :, None, None], 0.0)


def gathered(cache, block_tables, lengths):
    """(B, n, Hk, D): each sequence's positions; what lies past its length is block 0, to be masked."""
    block_size = cache.shape[1]
    positions = torch.arange(int(lengths.max()) if len(lengths) else 0, device=cache.device)
    needed = -(-lengths[:, None] // block_size) > positions // block_size
    blocks = block_tables.long()[:, positions // block_size].masked_fill(~needed, 0)
    if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(cache):
        raise ValueError(f"block ids go from {int(blocks.min())} to {int(blocks.max())}, the cache has {len(cache)} blocks")
    return cache[blocks, positions % block_size]


def decode_attention(q, k_cache, v_cache, *, context_lens, block_tables, scale):
    keys, values = (gathered(cache, block_tables, context_lens) for cache in (k_cache, v_cache))
    if keys.shape[1] == 0:
        return torch.zeros_like(q)
    return padded_attention(q[:, None], keys, values, context_lens[:, None], scale)[:, 0].to(q.dtype)


def prefill_attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables=None):
    queries, lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    if len(q) == 0 or int(lengths.max()) == 0:
        return torch.zeros_like(q)
    rows = pad_sequence(q.split(queries.tolist()), batch_first=True)
    if block_tables is None:
        keys, values = (pad_sequence(t.split(lengths.tolist()), batch_first=True) for t in (k, v))
    else:
        keys, values = (gathered(t, block_tables, lengths) for t in (k, v))
    row = torch.arange(rows.shape[1], device=q.device)
    real = row < queries[:, None]
    visible = torch.where(real, (lengths - queries)[:, None] + row + 1, 0)
    return padded_attention(rows, keys, values, visible, scale)[real].to(q.dtype)


def last_token_logits(hidden, weight, cu_seqlens_q=None):
    rows = hidden if cu_seqlens_q is None else hidden.index_select(0, cu_seqlens_q[1:] - 1)
    return (rows.float() @ weight.float().T).to(hidden.dtype)


def parallel_logits(hidden, weight_shard, cu_seqlens_q=None, *, group=None):
    widths = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    rank = dist.get_rank(group)
    widths[rank] = len(weight_shard)
    dist.all_reduce(widths, group=group)
    before, after = int(widths[:rank].sum()), int(widths[rank + 1 :].sum())
    whole = F.pad(last_token_logits(hidden, weight_shard, cu_seqlens_q), (before, after))
    dist.all_reduce(whole, group=group)
    return whole if rank == 0 else None


def sample(logits, temperatures, *, noise=None, seed=None):
    logits = logits.double()
    log_p = torch.log_softmax((logits - logits.amax(1, keepdim=True)) / temperatures.double()[:, None], dim=1)
    if noise is None:
        generator = None if seed is None else torch.Generator(logits.device).manual_seed(seed)
        noise = torch.empty_like(log_p).exponential_(generator=generator)
    return (log_p - noise.double().log()).masked_fill(logits == -torch.inf, -torch.inf).argmax(1)
