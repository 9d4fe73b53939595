"""Three functions of the contract in plain torch: copy this file, put your kernels in, and judge them.

    make conformance IMPL=examples/my_kernels.py
    pytest conformance/ --impl examples/my_kernels.py -k slot_mapping

What a file does not offer is reported as not offered, and the suite takes it from the reference.
"""

import torch

CAPABILITIES = {"dtypes": (torch.float32, torch.float16, torch.bfloat16), "float32_products": "ieee"}


def compute_slot_mapping(positions, cu_seqlens_q, block_tables, block_size):
    """(T,) int32: block_tables[sequence, position // block_size] * block_size + position % block_size."""
    tokens = torch.arange(len(positions), dtype=cu_seqlens_q.dtype, device=positions.device)
    # a token's sequence is the number of ends at or before it; sequences without tokens are stepped over
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True)
    blocks = block_tables[sequence, positions // block_size]
    return (blocks * block_size + positions % block_size).int()


def store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    """Row t of key and value (T, Hk, D) into slot slot_mapping[t] of the caches (N, S, Hk, D), in place; -1 is skipped."""
    mapped = slot_mapping >= 0
    slots = slot_mapping[mapped].long()
    block_size = k_cache.shape[1]
    k_cache[slots // block_size, slots % block_size] = key[mapped]
    v_cache[slots // block_size, slots % block_size] = value[mapped]


def decode_attention(q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """(B, Hq, D): one query per sequence over the first context_lens[i] positions of its block table."""
    out = torch.zeros_like(q)
    for i, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue  # a row of graph padding
        keys, values = gather(k_cache, block_tables[i], length), gather(v_cache, block_tables[i], length)
        out[i] = attend(q[i], keys, values, scale)
    return out


def gather(cache, block_table, length):
    """(length, Hk, D) float32: positions 0 ... length - 1 of one sequence, as its block table says."""
    block_size = cache.shape[1]
    num_blocks = (length + block_size - 1) // block_size
    return cache[block_table[:num_blocks].long()].flatten(0, 1)[:length].float()


def attend(q, keys, values, scale):
    """One query row q (Hq, D) over keys and values (n, Hk, D): softmax(scale * q K^T) V, query head h with kv head h // G."""
    group_size = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group_size, dim=1), values.repeat_interleave(group_size, dim=1)
    scores = scale * torch.einsum("hd,nhd->hn", q.float(), keys)
    return torch.einsum("hn,nhd->hd", scores.softmax(dim=1), values).to(q.dtype)
