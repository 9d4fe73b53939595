"""Guarded buffers: every tensor that an implementation is handed lies in a larger storage between red zones, and is compared afterwards.

A buffer's storage is filled with a pattern first; the tensor is a view into it, plain or strided the way engines have them. What the
implementation may not write is compared bit for bit, in an integer view, so that NaN payloads and -0.0 count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RED_ZONE = 128  # elements before and after; a multiple of 16 bytes for every dtype, so that views stay as aligned as fresh tensors
PATTERN = 0x2A  # every byte of a red zone and of a stride's gaps: finite in every float dtype
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CACHE_LAYOUTS = ("plain", "layer", "interleaved", "packed", "head_major", "unlike")
ROW_LAYOUTS = ("plain", "fused", "head_major", "unaligned")
METADATA_LAYOUTS = ("plain", "strided", "transposed")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width."""
    return tensor.view(INTEGER[tensor.element_size()])


@dataclass
class Buffer:
    name: str
    storage: torch.Tensor  # one-dimensional, red zones included
    view: torch.Tensor
    before: torch.Tensor  # the storage's bits when the implementation was called

    def image(self, storage_bits: torch.Tensor) -> torch.Tensor:
        """The view's bits within another copy of the storage's bits."""
        return storage_bits.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


class Buffers:
    """The buffers of one call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.all: list[Buffer] = []

    def put(self, name: str, values: torch.Tensor, layout: str = "plain", gap: int | None = None) -> torch.Tensor:
        """A guarded copy of `values`.

        layout "fused": rows are slices of a wider row, as q, k and v of a fused QKV product are; "head_major": (T, heads, D) as a view of
        (heads, T, D); "unaligned": the first element lies one past an aligned address; "strided": every second element; "transposed": a
        matrix whose columns lie together, a vector that is a column of one. gap: what lies between the elements of the last two.
        """
        if layout == "head_major" and values.dim() == 3:  # rows of a head lie together
            wide = self._storage(values.numel(), values.dtype)
            view = self._inner(wide).view(values.shape[1], values.shape[0], values.shape[2]).transpose(0, 1)
        elif layout == "unaligned":
            wide = self._storage(values.numel() + 1, values.dtype)
            view = self._inner(wide)[1:].view(values.shape)
        elif layout == "strided" or (layout == "transposed" and values.dim() == 1):
            step = 2 if layout == "strided" else 3
            wide = self._storage(step * values.numel(), values.dtype)
            if gap is not None:
                self._inner(wide).fill_(gap)
            view = self._inner(wide)[::step].view(values.shape)
        elif layout == "transposed":
            wide = self._storage(values.numel(), values.dtype)
            view = self._inner(wide).view(values.shape[1], values.shape[0]).T
        elif layout == "fused":
            rows, width = values.shape[0], values[0].numel() if len(values) else 1
            wide = self._storage(rows * 3 * width, values.dtype)
            view = self._inner(wide).view(rows, 3 * width)[:, width : 2 * width].view(values.shape)
        else:
            wide = self._storage(values.numel(), values.dtype)
            view = self._inner(wide).view(values.shape)
        view.copy_(values)
        self.all.append(Buffer(name, wide, view, bits(wide)))
        return view

    def put_table(self, name: str, values: torch.Tensor, extra_columns: int) -> torch.Tensor:
        """An int32 table that is a narrowed view of a wider one."""
        rows, columns = values.shape
        wide = self._storage(rows * (columns + extra_columns), values.dtype)
        view = self._inner(wide).view(rows, columns + extra_columns)[:, :columns]
        view.copy_(values)
        self.all.append(Buffer(name, wide, view, bits(wide)))
        return view

    def put_caches(self, keys: torch.Tensor, values: torch.Tensor, layout: str = "plain") -> tuple[torch.Tensor, torch.Tensor]:
        """k_cache and v_cache (N, S, Hk, D) as two views of one storage, laid out as `layout` says."""
        num_blocks, block_size, num_heads, head_dim = keys.shape
        if layout == "plain":
            return self.put("k_cache", keys), self.put("v_cache", values)
        if layout == "unlike":  # keys alone, values beside something else: no stride of one is the other's
            wider = torch.cat([values, values], dim=3)
            return self.put("k_cache", keys), self._half("v_cache", wider, head_dim)
        copies = 6 if layout == "layer" else 2
        storage = self._storage(copies * keys.numel(), keys.dtype)
        inner = self._inner(storage)
        if layout == "layer":  # the middle one of three layers
            whole = inner.view(2, 3, num_blocks, block_size, num_heads, head_dim)
            views = whole[0, 1], whole[1, 1]
        elif layout == "interleaved":  # a block's keys, then its values
            whole = inner.view(num_blocks, 2, block_size, num_heads, head_dim)
            views = whole[:, 0], whole[:, 1]
        elif layout == "packed":  # a head's key and value side by side
            whole = inner.view(num_blocks, block_size, num_heads, 2 * head_dim)
            views = whole[..., :head_dim], whole[..., head_dim:]
        elif layout == "head_major":
            whole = inner.view(2, num_blocks, num_heads, block_size, head_dim)
            views = whole[0].transpose(1, 2), whole[1].transpose(1, 2)
        else:
            raise ValueError(f"cache layout {layout!r} is none of {', '.join(CACHE_LAYOUTS)}")
        for name, view, content in zip(("k_cache", "v_cache"), views, (keys, values), strict=True):
            view.copy_(content)
            self.all.append(Buffer(name, storage, view, bits(storage)))
        return views

    def _half(self, name: str, wider: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The first half of the last dimension of a guarded copy."""
        storage = self._storage(wider.numel(), wider.dtype)
        view = self._inner(storage).view(wider.shape)[..., :head_dim]
        view.copy_(wider[..., :head_dim])
        self.all.append(Buffer(name, storage, view, bits(storage)))
        return view

    def freeze(self) -> None:
        """Remember every byte as it is now, right before the call."""
        frozen: dict[int, torch.Tensor] = {}
        for buffer in self.all:
            key = buffer.storage.data_ptr()
            if key not in frozen:
                frozen[key] = bits(buffer.storage).clone()
            buffer.before = frozen[key]

    def restore(self) -> None:
        """Put every byte back to what it was at `freeze`."""
        for buffer in self.all:
            bits(buffer.storage).copy_(buffer.before)

    def changed(self) -> str:
        """Where a byte differs from `freeze`, in words; empty if nowhere."""
        for buffer in self.all:
            place = first_difference(bits(buffer.storage), buffer.before)
            if place is not None:
                return f"{buffer.name} {self.where(buffer, place)}"
        return ""

    def where(self, buffer: Buffer, element: int) -> str:
        """A storage element's place in words: an index of a view, or a red zone."""
        for other in self.all:
            if other.storage.data_ptr() == buffer.storage.data_ptr():
                index = index_in_view(other.view, element)
                if index is not None:
                    return f"at {other.name}{list(index)}"
        if element < RED_ZONE:
            return f"{RED_ZONE - element} elements before its first"
        if element >= len(buffer.storage) - RED_ZONE:
            return f"{element - (len(buffer.storage) - RED_ZONE) + 1} elements past its last"
        return f"in the gap of its strides, storage element {element - RED_ZONE}"

    def _storage(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        storage = torch.empty(elements + 2 * RED_ZONE, dtype=dtype, device=self.device)
        storage.view(torch.uint8).fill_(PATTERN)
        return storage

    def _inner(self, storage: torch.Tensor) -> torch.Tensor:
        return storage[RED_ZONE : len(storage) - RED_ZONE]


def first_difference(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """The flat index of the first element that differs."""
    if torch.equal(left, right):
        return None
    return int((left != right).flatten().nonzero()[0])


def index_in_view(view: torch.Tensor, element: int) -> tuple[int, ...] | None:
    """The index of the view that lies at this element of its storage, if one does."""
    rest = element - view.storage_offset()
    index = [0] * view.dim()
    for axis in sorted(range(view.dim()), key=lambda a: view.stride()[a], reverse=True):
        if view.stride(axis) > 0 and view.shape[axis] > 1:
            index[axis] = min(rest // view.stride(axis), view.shape[axis] - 1) if rest >= 0 else 0
            rest -= index[axis] * view.stride(axis)
    return tuple(index) if rest == 0 and view.numel() > 0 else None


def dirty_free_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in memory that was just freed, where the next allocation of this size is likely to lie."""
    for _ in range(2):
        torch.full(shape, float("nan"), dtype=dtype, device=device)
