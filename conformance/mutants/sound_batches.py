"""A sound implementation of the batch functions in plain Python, with a seam wherever engines have gone wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from reference.records import DecodeBatch, PrefillBatch, SequenceState


class SoundBatches:
    CAPABILITIES: ClassVar[dict[str, Any]] = {"claims": ("spare_blocks",)}

    def prepare_prefill(self, sequences: Sequence[SequenceState], block_size: int, *, device: Any = "cpu") -> PrefillBatch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for i, s in enumerate(sequences):
            start, end = self.chunk(s)
            ids += list(self.scheduled_ids(s, start, end))
            positions += list(self.scheduled_positions(s, start, end))
            if s.block_table:
                slots += self.slots(self.table_of(sequences, i), start, end, block_size)
        lengths_q = [self.query_length(s) for s in sequences]
        lengths_k = [self.key_length(s) for s in sequences]
        largest_q, largest_k = self.largest(lengths_q, lengths_k)
        return PrefillBatch(
            torch.tensor(ids, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(self.prefix_sums(lengths_q), dtype=torch.int32, device=device),
            torch.tensor(self.prefix_sums(lengths_k), dtype=torch.int32, device=device),
            largest_q,
            largest_k,
            torch.tensor(slots, dtype=torch.int32, device=device),
            self.tables(sequences, device) if self.wants_tables(sequences) else None,
        )

    def prepare_decode(self, sequences: Sequence[SequenceState], block_size: int, *, device: Any = "cpu") -> DecodeBatch:
        lengths = [self.known_length(s) for s in sequences]
        return DecodeBatch(
            torch.tensor([self.decode_id(s) for s in sequences], dtype=torch.int64, device=device),
            torch.tensor([self.decode_position(s) for s in sequences], dtype=torch.int64, device=device),
            torch.tensor([self.decode_slot(s, block_size) for s in sequences], dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            self.decode_tables(sequences, device),
        )

    def compute_slot_mapping(
        self, positions: torch.Tensor, cu_seqlens_q: torch.Tensor, block_tables: torch.Tensor, block_size: int
    ) -> torch.Tensor:
        rows = torch.arange(len(positions), device=positions.device)
        sequence = self.sequence_of_row(rows, cu_seqlens_q)
        blocks = block_tables[sequence, positions // block_size]
        return self.computed(blocks.long() * block_size + positions % block_size)

    # --- seams --------------------------------------------------------------------------------------------------------------------

    def chunk(self, s: SequenceState) -> tuple[int, int]:
        return s.num_cached_tokens, s.num_cached_tokens + s.num_scheduled_tokens

    def scheduled_ids(self, s: SequenceState, start: int, end: int) -> Sequence[int]:
        return s.token_ids[start:end]

    def scheduled_positions(self, s: SequenceState, start: int, end: int) -> Sequence[int]:
        return range(start, end)

    def table_of(self, sequences: Sequence[SequenceState], i: int) -> Sequence[int]:
        return sequences[i].block_table

    def slots(self, table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
        slots: list[int] = []
        for logical in range(start // block_size, -(-end // block_size)):
            first = max(start, logical * block_size)
            last = min(end, (logical + 1) * block_size)
            slots += [table[logical] * block_size + p % block_size for p in range(first, last)]
        return slots

    def query_length(self, s: SequenceState) -> int:
        return s.num_scheduled_tokens

    def key_length(self, s: SequenceState) -> int:
        return s.num_cached_tokens + s.num_scheduled_tokens

    def largest(self, lengths_q: list[int], lengths_k: list[int]) -> tuple[int, int]:
        return max(lengths_q), max(lengths_k)

    def prefix_sums(self, lengths: list[int]) -> list[int]:
        sums = [0]
        for n in lengths:
            sums.append(sums[-1] + n)
        return sums

    def wants_tables(self, sequences: Sequence[SequenceState]) -> bool:
        return any(s.num_cached_tokens for s in sequences)

    def tables(self, sequences: Sequence[SequenceState], device: Any) -> torch.Tensor:
        width = max(len(s.block_table) for s in sequences)
        rows = [list(s.block_table) + [-1] * (width - len(s.block_table)) for s in sequences]
        return torch.tensor(rows, dtype=torch.int32, device=device)

    def decode_tables(self, sequences: Sequence[SequenceState], device: Any) -> torch.Tensor:
        return SoundBatches.tables(self, sequences, device)

    def known_length(self, s: SequenceState) -> int:
        return len(s.token_ids)

    def decode_id(self, s: SequenceState) -> int:
        return s.token_ids[-1]

    def decode_position(self, s: SequenceState) -> int:
        return len(s.token_ids) - 1

    def decode_slot(self, s: SequenceState, block_size: int) -> int:
        return s.block_table[(len(s.token_ids) - 1) // block_size] * block_size + (len(s.token_ids) - 1) % block_size

    def sequence_of_row(self, rows: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows.to(cu_seqlens_q.dtype), right=True)

    def computed(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.to(torch.int32)
