"""A sound attention in plain torch, shaped like a kernel: tiles with an online softmax, splits that are combined, masked tails.

Every step is a small method, so that a fault is one method replaced.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # running maximum (t, Hq), denominator (t, Hq), weighted values (t, Hq, D)


class SoundAttention:
    CAPABILITIES: ClassVar[dict[str, Any]] = {"claims": ("nan_tail", "empty_zero", "deterministic", "batch_invariant", "checked")}
    tile = 32
    split = 128  # positions a split takes
    decoding: bool  # of the call that is running: its phase, its block_tables, a decode step's block size
    tables: torch.Tensor | None
    block_size: int
    lengths: list[int]  # of a decode step
    max_seqlen_k: int  # of a prefill
    sequence: int  # of a prefill, the one being computed

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        out = self.new_output(q)
        self.decoding, self.tables, self.block_size = True, block_tables, k_cache.shape[1]
        lengths = self.lengths = self.read_lengths(context_lens)
        for i in self.rows_of_batch(len(q)):
            n = self.context_length(lengths, i)
            if n <= 0:
                self.write_empty(out, i)
                continue
            table = self.table_row(block_tables, i)
            self.require_blocks(table[: -(-n // k_cache.shape[1])].tolist(), k_cache.shape[0], i)
            limits = torch.tensor([n], device=q.device)
            keys, values = self.gather(k_cache, v_cache, table, self.keys_read(n))
            out[i : i + 1] = self.attend(q[i : i + 1], keys, values, limits, scale).to(q.dtype)
        return self.returned(out)

    def prefill_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        block_tables: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = self.new_output(q)
        self.decoding, self.tables, self.max_seqlen_k = False, block_tables, max_seqlen_k
        sums_q, sums_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for i in self.rows_of_batch(len(sums_q) - 1):
            queries, n = self.queries_of(sums_q, i), self.keys_of(sums_k, i)
            if queries == 0:
                continue
            self.sequence = i
            if block_tables is None or self.ignores_tables():
                keys, values = self.padded(k.flatten(0, -3), sums_k[i], n), self.padded(v.flatten(0, -3), sums_k[i], n)
            else:
                keys, values = self.gather(k, v, self.table_row(block_tables, i), self.keys_read(n))
            rows = slice(sums_q[i], sums_q[i + 1])
            limits = self.causal_limits(queries, n, q.device)
            out[rows] = self.attend(q[rows], keys, values, limits, scale).to(q.dtype)
        return self.returned(out)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, limits: torch.Tensor, scale: float) -> torch.Tensor:
        """q (t, Hq, D) over padded keys, values (n, Hk, D); row r sees the first limits[r]. Returns (t, Hq, D) float32."""
        heads, group = q.shape[1], q.shape[1] // keys.shape[1]
        keys = keys[:, self.key_heads(heads, group, keys.device)].float()
        values = values[:, self.value_heads(heads, group, keys.device)].float()
        parts = []
        for start in self.split_starts(len(keys)):
            end = min(start + self.split, len(keys))
            parts.append(self.partial(q.float(), keys, values, start, end, limits, scale))
        return self.combine(parts)

    def partial(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, end: int, limits: torch.Tensor, scale: float
    ) -> Part:
        """One split: tiles of positions with an online softmax."""
        t, heads, dim = q.shape
        largest = torch.full((t, heads), -torch.inf, device=q.device)
        denominator, acc = torch.zeros(t, heads, device=q.device), torch.zeros(t, heads, dim, device=q.device)
        for first in self.tile_starts(start, end):
            last = min(first + self.tile, end)
            positions = torch.arange(first, last, device=q.device)
            hidden = positions[None, :] >= limits[:, None]
            scores = self.mask(self.scores(q, keys[first:last], scale), hidden)
            new_largest = self.new_maximum(largest, scores)
            safe = torch.where(new_largest == -torch.inf, 0.0, new_largest)
            rescale = torch.exp(largest - safe)
            weights = self.weights(scores, safe)
            denominator = denominator * rescale + weights.sum(dim=2)
            tail = self.mask_values(values[first:last], positions >= limits.max())
            acc = self.rescaled(acc, rescale) + torch.einsum("thn,nhd->thd", weights, tail)
            largest = new_largest
        return largest, denominator, acc

    def combine(self, parts: list[Part]) -> torch.Tensor:
        """Splits weighed by their share of the whole denominator; a row that sees nothing is 0."""
        largest = torch.stack([part[0] for part in parts]).amax(dim=0)
        safe = torch.where(largest == -torch.inf, 0.0, largest)
        denominator = torch.zeros_like(largest)
        acc = torch.zeros_like(parts[0][2])
        for part_largest, part_denominator, part_acc in parts:
            weight = self.split_weight(part_largest, safe)
            denominator = denominator + weight * part_denominator
            acc = acc + weight[:, :, None] * part_acc
        return self.divide(acc, denominator)

    def gather(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, n: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of n positions, padded to whole tiles; lanes past n hold what lies next in the cache, to be masked."""
        block_size, num_blocks = k_cache.shape[1], k_cache.shape[0]
        positions = torch.arange(-(-n // self.tile) * self.tile, device=table.device)
        columns = positions // block_size
        held = columns < -(-n // block_size)
        blocks = torch.where(held, self.blocks(table, torch.where(held, columns, 0)), 0).clamp(0, num_blocks - 1)
        offsets = positions % block_size
        value_blocks, value_offsets = self.value_places(blocks, offsets, positions, n)
        return k_cache[blocks, offsets], v_cache[value_blocks, value_offsets]

    def padded(self, rows: torch.Tensor, start: int, n: int) -> torch.Tensor:
        index = torch.arange(start, start + -(-n // self.tile) * self.tile, device=rows.device)
        return rows[index.clamp(max=len(rows) - 1)] if len(rows) else rows.new_zeros((0, *rows.shape[1:]))

    # --- seams --------------------------------------------------------------------------------------------------------------------

    def new_output(self, q: torch.Tensor) -> torch.Tensor:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)

    def returned(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def read_lengths(self, context_lens: torch.Tensor) -> list[int]:
        return context_lens.tolist()

    def rows_of_batch(self, count: int) -> range:
        return range(count)

    def context_length(self, lengths: list[int], i: int) -> int:
        return lengths[i]

    def keys_of(self, sums_k: list[int], i: int) -> int:
        return sums_k[i + 1] - sums_k[i]

    def queries_of(self, sums_q: list[int], i: int) -> int:
        return sums_q[i + 1] - sums_q[i]

    def keys_read(self, n: int) -> int:
        return n

    def write_empty(self, out: torch.Tensor, i: int) -> None:
        out[i] = 0.0

    def require_blocks(self, blocks: list[int], num_blocks: int, i: int) -> None:
        for column, block in enumerate(blocks):
            if not 0 <= block < num_blocks:
                raise ValueError(f"sequence {i} has block id {block} in column {column} of its table, the cache has {num_blocks} blocks")

    def ignores_tables(self) -> bool:
        return False

    def table_row(self, block_tables: torch.Tensor, i: int) -> torch.Tensor:
        return block_tables[i]

    def blocks(self, table: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return table[columns].long()

    def value_places(
        self, blocks: torch.Tensor, offsets: torch.Tensor, positions: torch.Tensor, n: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return blocks, offsets

    def key_heads(self, heads: int, group: int, device: Any) -> torch.Tensor:
        return torch.arange(heads, device=device) // group

    def value_heads(self, heads: int, group: int, device: Any) -> torch.Tensor:
        return self.key_heads(heads, group, device)

    def causal_limits(self, queries: int, n: int, device: Any) -> torch.Tensor:
        return n - queries + 1 + torch.arange(queries, device=device)

    def split_starts(self, n: int) -> range:
        return range(0, n, self.split) if n else range(1)

    def tile_starts(self, start: int, end: int) -> range:
        return range(start, end, self.tile)

    def scores(self, q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        return scale * torch.einsum("thd,nhd->thn", q, keys)

    def mask(self, scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(hidden[:, None, :], -torch.inf)

    def mask_values(self, values: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(hidden[:, None, None], 0.0)

    def new_maximum(self, largest: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.maximum(largest, scores.amax(dim=2))

    def weights(self, scores: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return torch.exp(scores - largest[:, :, None])

    def rescaled(self, acc: torch.Tensor, rescale: torch.Tensor) -> torch.Tensor:
        return acc * rescale[:, :, None]

    def split_weight(self, part_largest: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return torch.exp(part_largest - largest)

    def divide(self, acc: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        return acc / torch.where(denominator == 0, 1.0, denominator)[:, :, None]
