"""A sound store in plain torch, over the bits of a flat view, with the seams of a store kernel: guard, offsets, strides, tiles."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

INTEGERS = {2: torch.int16, 4: torch.int32}


class SoundStore:
    CAPABILITIES: ClassVar[dict[str, Any]] = {"claims": ("checked",)}
    mapping: list[int]  # the slots of the call that is running

    def store_kvcache(
        self, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        integers = INTEGERS[key.element_size()]
        slots = self.mapping = self.read_mapping(slot_mapping).tolist()
        self.require_slots(slots, k_cache.shape[0] * k_cache.shape[1])
        sources = self.sources(key.view(integers), value.view(integers))
        for rows, cache in zip(sources, (k_cache.view(integers), v_cache.view(integers)), strict=True):
            block_size = cache.shape[1]
            for t in self.rows_written(len(rows)):
                slot = self.slot_of_row(slots, t)
                if self.skips(slot, cache):
                    continue
                block, offset = self.block_and_offset(slot, block_size)
                self.write(cache, block, offset, self.row(rows, t))

    # --- seams --------------------------------------------------------------------------------------------------------------------

    def read_mapping(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        return slot_mapping

    def sources(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def rows_written(self, count: int) -> range:
        return range(count)

    def require_slots(self, slots: list[int], num_slots: int) -> None:
        for t, slot in enumerate(slots):
            if not -1 <= slot < num_slots:
                raise ValueError(f"row {t} goes to slot {slot}, the cache has {num_slots}")

    def slot_of_row(self, slots: list[int], t: int) -> int:
        return slots[t]

    def skips(self, slot: int, cache: torch.Tensor) -> bool:
        return slot < 0

    def block_and_offset(self, slot: int, block_size: int) -> tuple[int, int]:
        return slot // block_size, slot % block_size

    def row(self, rows: torch.Tensor, t: int) -> torch.Tensor:
        return rows[t]

    def write(self, cache: torch.Tensor, block: int, offset: int, row: torch.Tensor) -> None:
        cache[block, offset] = row


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage that the tensor lies in, as one dimension: what a kernel's pointer arithmetic reaches."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
