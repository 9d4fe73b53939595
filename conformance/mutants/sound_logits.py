"""Sound logits in plain torch, with the seams of a last-token gather and of a head whose vocabulary is split over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


class SoundLogits:
    def last_token_logits(self, hidden: torch.Tensor, weight: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.decode_rows(hidden) if cu_seqlens_q is None else self.prefill_rows(cu_seqlens_q)
        return self.product(self.pick(hidden, rows.long()), weight)

    def parallel_logits(
        self,
        hidden: torch.Tensor,
        weight_shard: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor | None:
        shard = self.last_token_logits(hidden, weight_shard, cu_seqlens_q)
        widths = self.widths(shard, group)
        padded = torch.nn.functional.pad(shard, (0, max(widths) - shard.shape[1]))
        parts = self.collect(padded, len(widths), group)
        return None if parts is None else self.whole(self.in_order(parts), widths)

    # --- seams --------------------------------------------------------------------------------------------------------------------

    def prefill_rows(self, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
        return cu_seqlens_q[1:] - 1

    def decode_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(hidden), device=hidden.device)

    def pick(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden[rows]

    def product(self, picked: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(picked.float(), weight.float()).to(picked.dtype)  # in bfloat16 cuBLAS may add in bfloat16

    def widths(self, shard: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
        """How many tokens each rank holds."""
        own = torch.tensor([shard.shape[1]], device=shard.device)
        widths = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(widths, own, group=group)
        return [int(width) for width in widths]

    def destination(self, group: dist.ProcessGroup | None) -> int:
        """The global rank that gets the logits."""
        return 0 if group is None else dist.get_global_rank(group, 0)

    def collect(self, padded: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> list[torch.Tensor] | None:
        """Every rank's part on the destination, None elsewhere."""
        destination = self.destination(group)
        parts = [torch.empty_like(padded) for _ in range(size)] if dist.get_rank() == destination else None
        dist.gather(padded, parts, dst=destination, group=group)
        return parts

    def in_order(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return parts

    def starts(self, widths: list[int]) -> list[int]:
        """The first column of each shard."""
        return [sum(widths[:rank]) for rank in range(len(widths))]

    def whole(self, parts: list[torch.Tensor], widths: list[int]) -> torch.Tensor:
        """The shards side by side, without their padding."""
        logits = parts[0].new_zeros((len(parts[0]), sum(widths)))
        for part, start, width in zip(parts, self.starts(widths), widths, strict=True):
            logits[:, start : start + width] = part[:, :width]
        return logits
