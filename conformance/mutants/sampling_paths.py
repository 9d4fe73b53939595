"""Faults of samplers on a path of their own: few rows, given seeds, logits of half precision, whole tiles (clauses SAMPLE-1...9)."""

from __future__ import annotations

import math

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_sampling import SoundPlainSampling, SoundSampling

sound = SoundSampling()


def is_half(logits: torch.Tensor) -> bool:
    return logits.dtype != torch.float32


# --- few rows, and seeds ----------------------------------------------------------------------------------------------------------------


@mutant("SAMPLE-1", replaces="scaled", of=SoundPlainSampling, source="own")
def a_single_row_ignores_the_temperature(self, logits, temperatures):
    """A path for B = 1 leaves T out, in a sampler that takes no noise."""
    return sound.scaled(logits, torch.ones_like(temperatures) if len(logits) == 1 else temperatures)


@mutant("SAMPLE-1", replaces="noise_for", of=SoundPlainSampling, source="own")
def few_rows_race_with_uniform_noise(self, shape, device, seed):
    """Under 32 rows another path draws its noise from the uniform distribution."""
    return torch.rand(shape, dtype=torch.float64, device=device) if shape[0] < 32 else sound.noise_for(shape, device, seed)


@mutant("SAMPLE-1", replaces="sample", of=SoundSampling, source="own")
def seeded_draws_ignore_the_temperature(self, logits, temperatures, *, noise=None, seed=None):
    """The path of a given seed leaves T out."""
    return sound.sample(logits, temperatures if seed is None else torch.ones_like(temperatures), noise=noise, seed=seed)


@mutant("SAMPLE-1", replaces="sample", of=SoundSampling, source="own")
def seeded_draws_ignore_the_logits(self, logits, temperatures, *, noise=None, seed=None):
    """With a seed the draw is uniform over the vocabulary."""
    return sound.sample(logits if seed is None else torch.zeros_like(logits), temperatures, noise=noise, seed=seed)


@mutant("SAMPLE-3", replaces="sample", of=SoundSampling, source="own")
def seeded_draws_of_half_logits_are_greedy(self, logits, temperatures, *, noise=None, seed=None):
    """With a seed and logits of half precision the noise is left out."""
    if seed is not None and is_half(logits):
        noise = torch.ones(logits.shape, device=logits.device)
    return sound.sample(logits, temperatures, noise=noise, seed=seed)


# --- logits of half precision -----------------------------------------------------------------------------------------------------------


@mutant("SAMPLE-3", replaces="sample", of=SoundSampling, source="own")
def softmax_of_half_logits_at_temperature_one(self, logits, temperatures, *, noise=None, seed=None):
    """Where T is 1 nothing is divided, and the softmax is taken in the dtype of the logits."""
    p = sound.probabilities(sound.scaled(logits, temperatures), logits.dtype)
    if bool((temperatures == 1.0).all()):
        p = torch.softmax(logits, dim=1).float()
    return sound.pick(sound.race(p, sound.noise_for(p.shape, p.device, seed) if noise is None else noise))


@mutant("SAMPLE-7", replaces="scaled", of=SoundSampling, source="own")
def half_minus_infinity_is_the_lowest_half(self, logits, temperatures):
    """-inf of a half-precision row is clamped to the lowest finite number of its dtype."""
    return sound.scaled(logits.clamp_min(torch.finfo(logits.dtype).min) if is_half(logits) else logits, temperatures)


@mutant("SAMPLE-7", replaces="scaled", of=SoundSampling, source="own")
def a_half_nan_row_spreads(self, logits, temperatures):
    """In half precision a NaN row makes the next row NaN."""
    scaled = sound.scaled(logits, temperatures)
    if is_half(logits) and len(logits) > 1:
        scaled[1:][logits[:-1].isnan().all(dim=1)] = math.nan
    return scaled


@mutant("SAMPLE-2", replaces="scaled", of=SoundSampling, source="own")
def half_rows_take_the_first_temperature(self, logits, temperatures):
    """All rows of half-precision logits are divided by the first row's T."""
    return sound.scaled(logits, temperatures[:1].expand_as(temperatures) if is_half(logits) and len(logits) else temperatures)


@mutant("SAMPLE-9", replaces="scaled", of=SoundSampling, source="own")
def small_temperatures_of_half_logits_are_raised(self, logits, temperatures):
    """T of half-precision logits is 0.05 at least."""
    return sound.scaled(logits, temperatures.clamp_min(0.05) if is_half(logits) else temperatures)


@mutant("SAMPLE-3", replaces="scaled", of=SoundSampling, source="own")
def half_rows_are_read_as_packed(self, logits, temperatures):
    """Rows of half-precision logits are taken to lie end to end."""
    if is_half(logits) and logits.numel():
        logits = logits.as_strided(logits.shape, (logits.shape[1], 1), logits.storage_offset())
    return sound.scaled(logits, temperatures)


@mutant("SAMPLE-7", replaces="probabilities", of=SoundSampling, source="own (adversary)")
def half_ids_past_four_thousand_are_left_out(self, scaled, logits_dtype):
    """A row of half-precision logits ends after one tile of 4,096 ids."""
    p = sound.probabilities(scaled, logits_dtype)
    if logits_dtype != torch.float32:
        p[:, 4096:] = 0
    return p


@mutant("SAMPLE-3", replaces="sample", of=SoundSampling, source="nano-vllm, sampler.py")
def noise_of_half_logits_is_clamped(self, logits, temperatures, *, noise=None, seed=None):
    """Given noise is at least 1e-10 where the logits are of half precision."""
    return sound.sample(logits, temperatures, noise=noise.clamp_min(1e-10) if noise is not None and is_half(logits) else noise, seed=seed)


@mutant("SAMPLE-6", replaces="sample", of=SoundSampling, source="vllm #51226")
def the_seed_of_half_logits_is_ignored(self, logits, temperatures, *, noise=None, seed=None):
    """With logits of half precision the seed is taken and not used."""
    return sound.sample(logits, temperatures, noise=noise, seed=None if is_half(logits) else seed)


@mutant("SAMPLE-8", replaces="sample", of=SoundSampling, source="own (adversary)")
def drawn_noise_of_half_logits_is_clamped(self, logits, temperatures, *, noise=None, seed=None):
    """Drawn noise is at least 1e-5 where the logits are of half precision."""
    if noise is None and is_half(logits):
        noise = sound.noise_for(logits.shape, logits.device, seed).clamp_min(1e-5)
    return sound.sample(logits, temperatures, noise=noise, seed=seed)


# --- small and large temperatures -------------------------------------------------------------------------------------------------------


@mutant("SAMPLE-1", replaces="scaled", of=SoundPlainSampling, source="own (adversary)")
def temperature_cut_at_ten(self, logits, temperatures):
    """T is at most 10, in a sampler that takes no noise."""
    return sound.scaled(logits, temperatures.clamp_max(10.0))


@mutant("SAMPLE-2", replaces="sample", of=SoundSampling, source="own (adversary)")
def one_greedy_row_makes_all_greedy(self, logits, temperatures, *, noise=None, seed=None):
    """Where a row's T is under 1e-3, the argmax of every row is taken."""
    if bool((temperatures < 1e-3).any()):
        noise = torch.ones(logits.shape, device=logits.device)
    return sound.sample(logits, temperatures, noise=noise, seed=seed)


@mutant("SAMPLE-2", replaces="scaled", of=SoundSampling, source="own (adversary)")
def greedy_rows_are_drawn_beside_others(self, logits, temperatures):
    """T under 1e-3 counts as 1, and the argmax is taken only where all rows have such a T."""
    small = temperatures < 1e-3
    return sound.scaled(logits, temperatures if bool(small.all()) else torch.where(small, 1.0, temperatures))


# --- whole tiles ------------------------------------------------------------------------------------------------------------------------


@mutant("SAMPLE-7", replaces="race", of=SoundSampling, source="own")
def the_last_id_of_whole_tiles_is_left_out(self, p, noise):
    """Where the vocabulary is a power of two from 1,024 on, its last id never wins."""
    arrivals = sound.race(p, noise)
    if p.shape[1] >= 1024 and p.shape[1] & (p.shape[1] - 1) == 0:
        arrivals[:, -1] = -math.inf
    return arrivals
