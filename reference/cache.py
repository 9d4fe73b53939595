"""The flat KV cache, its layer views, and the write of a step's keys and values into their slots."""

from __future__ import annotations

import torch

from reference.preconditions import count, require, require_integers


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """The cache of a model: one tensor (2, layers, N, S, Hk, D), keys first, not initialised.

    >>> tuple(allocate_kv_cache(3, 10, 4, 2, 16).shape)
    (2, 3, 10, 4, 2, 16)
    """
    shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
    require(min(shape) >= 1, f"a cache of shape {shape} has an empty dimension")
    return torch.empty(shape, dtype=dtype, device=device)


def layer_views(kv_cache: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k_cache and v_cache of one layer, each (N, S, Hk, D), views of the model's cache."""
    require(
        kv_cache.dim() == 6 and kv_cache.shape[0] == 2,
        f"a KV cache has 6 dimensions (2, layers, N, S, Hk, D), this one has shape {tuple(kv_cache.shape)}",
    )
    require(0 <= layer < kv_cache.shape[1], f"layer {layer} of a cache with {count(kv_cache.shape[1], 'layer')}")
    return kv_cache[0, layer], kv_cache[1, layer]


def store_kvcache(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write row t of key and value into slot slot_mapping[t], in place; -1 is skipped (clauses KV-1...6).

    key, value: (T, Hk, D); k_cache, v_cache: (N, S, Hk, D) of the same dtype; slot_mapping: (T,) int32 or int64. Any strides.
    A mapping takes rows to distinct slots: two rows for one slot have no right answer (a kernel's programs would race) and are refused.
    Raises ValueError for shapes or dtypes that do not fit, for a slot under -1 or past the cache, and for two rows that go to one slot;
    nothing has been written then.

    >>> k_cache, v_cache = torch.zeros(3, 2, 1, 1), torch.zeros(3, 2, 1, 1)
    >>> row = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> store_kvcache(row, -row, k_cache, v_cache, torch.tensor([5, -1, 2]))
    >>> k_cache.flatten().tolist(), v_cache.flatten().tolist()
    ([0.0, 0.0, 3.0, 0.0, 0.0, 1.0], [0.0, 0.0, -3.0, 0.0, 0.0, -1.0])
    """
    require(k_cache.dim() == 4, f"k_cache has shape {tuple(k_cache.shape)}, it must be (N, S, Hk, D)")
    num_blocks, block_size = k_cache.shape[:2]
    require(key.shape == value.shape, f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}")
    require(k_cache.shape == v_cache.shape, f"k_cache has shape {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}")
    require(
        key.shape[1:] == k_cache.shape[2:],
        f"a row of key has shape {tuple(key.shape[1:])}, a slot of the cache {tuple(k_cache.shape[2:])}",
    )
    require_integers(slot_mapping, "slot_mapping", "(T,)")
    require(
        len(slot_mapping) == len(key),
        f"slot_mapping has {count(len(slot_mapping), 'entry', 'entries')} for the {count(len(key), 'row')} of key and value",
    )
    require(
        key.dtype == k_cache.dtype and value.dtype == v_cache.dtype,
        f"key is {key.dtype} and value {value.dtype}, the caches are {k_cache.dtype} and {v_cache.dtype}",
    )
    slots = slot_mapping.tolist()
    row_of_slot: dict[int, int] = {}
    for row, slot in enumerate(slots):
        require(
            -1 <= slot < num_blocks * block_size,
            f"row {row} goes to slot {slot}, the cache has slots 0 to {num_blocks * block_size - 1} (and -1 for none)",
        )
        if slot != -1:
            require(slot not in row_of_slot, f"rows {row_of_slot.get(slot)} and {row} both go to slot {slot}")
            row_of_slot[slot] = row
    for row, slot in enumerate(slots):
        if slot == -1:
            continue
        block, offset = slot // block_size, slot % block_size
        k_cache[block, offset] = key[row]
        v_cache[block, offset] = value[row]
