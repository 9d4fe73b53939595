"""A sound sampler in plain torch, as an exponential race, with the seams of a sampling kernel."""

from __future__ import annotations

import math

import torch


class SoundSampling:
    def sample(
        self, logits: torch.Tensor, temperatures: torch.Tensor, *, noise: torch.Tensor | None = None, seed: int | None = None
    ) -> torch.Tensor:
        p = self.probabilities(self.scaled(logits, temperatures), logits.dtype)
        if noise is None:
            noise = self.noise_for(p.shape, p.device, seed)
        return self.pick(self.race(p, noise))

    # --- seams --------------------------------------------------------------------------------------------------------------------

    def scaled(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """(B, V) float32: logits / T, up to a constant a row."""
        logits = logits.float()
        return (logits - logits.amax(dim=1, keepdim=True)) / temperatures.float()[:, None]

    def probabilities(self, scaled: torch.Tensor, logits_dtype: torch.dtype) -> torch.Tensor:
        return torch.softmax(scaled, dim=1)

    def noise_for(self, shape: torch.Size, device: torch.device, seed: int | None) -> torch.Tensor:
        """(B, V) of Exp(1) draws, in float64, which has more of them near 0."""
        return torch.empty(shape, dtype=torch.float64, device=device).exponential_(generator=self.generator(device, seed))

    def generator(self, device: torch.device, seed: int | None) -> torch.Generator | None:
        return None if seed is None else torch.Generator(device).manual_seed(seed)

    def race(self, p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(B, V): the larger, the earlier. p = 0 never arrives, noise 0 at once."""
        ratio = p.double() / noise.double().abs()
        return torch.where(p == 0, -math.inf, ratio)

    def pick(self, arrivals: torch.Tensor) -> torch.Tensor:
        return arrivals.argmax(dim=1)


class SoundPlainSampling(SoundSampling):
    """The same, which takes neither noise nor a seed: only its draws tell what it does."""

    def sample(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().sample(logits, temperatures)
