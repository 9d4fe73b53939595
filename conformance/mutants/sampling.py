"""Faults of samplers (clauses SAMPLE-1...9)."""

from __future__ import annotations

import math

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_sampling import SoundPlainSampling, SoundSampling

sound = SoundSampling()

# --- temperature and upcast: scaled, probabilities ------------------------------------------------------------------------------------


@mutant("SAMPLE-1", replaces="scaled", of=SoundSampling, source="own")
def multiplied_by_the_temperature(self, logits, temperatures):
    """Logits are multiplied by T, not divided."""
    return sound.scaled(logits, 1 / temperatures)


@mutant("SAMPLE-1", replaces="scaled", of=SoundSampling, source="own")
def temperature_five_percent_high(self, logits, temperatures):
    """T is 5 % too high."""
    return sound.scaled(logits, temperatures * 1.05)


@mutant("SAMPLE-1", replaces="scaled", of=SoundSampling, source="own", gpu_only=True)
def temperature_two_percent_high(self, logits, temperatures):
    """T is 2 % too high, which takes the draws that a GPU has time for."""
    return sound.scaled(logits, temperatures * 1.02)


@mutant("SAMPLE-1", replaces="scaled", of=SoundSampling, source="own")
def temperature_is_an_integer(self, logits, temperatures):
    """T is passed as an integer, at least 1."""
    return sound.scaled(logits, temperatures.long().clamp_min(1))


@mutant("SAMPLE-1", replaces="scaled", of=SoundSampling, source="own")
def only_the_512_likeliest_tokens(self, logits, temperatures):
    """A buffer of candidates holds 512 tokens; the others are never drawn."""
    scaled = sound.scaled(logits, temperatures)
    least = scaled.topk(min(512, scaled.shape[1]), dim=1).values[:, -1:]
    return torch.where(scaled < least, -math.inf, scaled)


@mutant("SAMPLE-1", replaces="sample", of=SoundPlainSampling, source="own", alone=True)
def top_p_left_on(self, logits, temperatures):
    """A top-p of 0.999 is left on, in a sampler that takes no noise."""
    p, ids = sound.probabilities(sound.scaled(logits, temperatures), logits.dtype).sort(dim=1, descending=True)
    kept = torch.zeros_like(p).scatter(1, ids, p.masked_fill(p.cumsum(dim=1) - p > 0.999, 0.0))
    return sound.pick(sound.race(kept, sound.noise_for(kept.shape, kept.device, None)))


@mutant("SAMPLE-1", replaces="sample", of=SoundPlainSampling, source="own", alone=True)
def ids_past_fifteen_bits_share_noise(self, logits, temperatures):
    """The counter of the noise keeps 15 bits of an id, in a sampler that takes no noise."""
    p = sound.probabilities(sound.scaled(logits, temperatures), logits.dtype)
    noise = sound.noise_for(p.shape, p.device, None)
    return sound.pick(sound.race(p, noise[:, torch.arange(p.shape[1], device=p.device) % 2**15]))


@mutant("SAMPLE-1", replaces="sample", of=SoundPlainSampling, source="own", alone=True)
def temperature_raised_to_two_hundredths(self, logits, temperatures):
    """T is at least 0.02, in a sampler that takes no noise."""
    return sound.sample(logits, temperatures.clamp_min(0.02))


@mutant("SAMPLE-2", replaces="scaled", of=SoundSampling, source="own", alone=True)
def temperature_of_the_next_row(self, logits, temperatures):
    """Each row is divided by the temperature of the next one."""
    return sound.scaled(logits, temperatures.roll(-1))


@mutant("SAMPLE-2", replaces="scaled", of=SoundSampling, source="own", alone=True)
def temperature_of_the_first_row(self, logits, temperatures):
    """All rows are divided by the temperature of the first."""
    return sound.scaled(logits, temperatures[:1].expand(len(logits)))


@mutant("SAMPLE-2", replaces="scaled", of=SoundSampling, source="own", alone=True)
def temperatures_read_without_their_stride(self, logits, temperatures):
    """A column of temperatures is read as if its elements lay side by side."""
    read = temperatures.as_strided(temperatures.shape, (1,))
    return sound.scaled(logits, temperatures if temperatures.stride() == (1,) else read.abs().clamp(0.05, 10.0))


@mutant("SAMPLE-3", replaces="scaled", of=SoundSampling, source="vllm #48641", alone=True)
def divided_in_the_dtype_of_the_logits(self, logits, temperatures):
    """The upcast is dropped: bf16 and fp16 logits are divided in their own dtype, where the quotient rounds, and overflows in fp16."""
    return (logits / temperatures.to(logits.dtype)[:, None]).float()


@mutant("SAMPLE-3", replaces="probabilities", of=SoundSampling, source="Megatron-LM #7182", alone=True)
def softmax_in_the_dtype_of_the_logits(self, scaled, logits_dtype):
    """The softmax is taken, and rounded, in the dtype of the logits."""
    return torch.softmax(scaled.to(logits_dtype), dim=1)


@mutant("SAMPLE-7", replaces="scaled", of=SoundSampling, source="own", alone=True)
def masked_logits_are_finite(self, logits, temperatures):
    """-inf becomes -10,000, which is no bar where all other logits are lower."""
    return sound.scaled(torch.where(logits == -math.inf, -1e4, logits.float()), temperatures)


@mutant("SAMPLE-7", replaces="scaled", of=SoundSampling, source="flashinfer #2456", alone=True)
def a_nan_row_spreads(self, logits, temperatures):
    """The largest logit of the batch is subtracted, not the row's own: one NaN makes all rows NaN."""
    logits = logits.float()
    finite = torch.where(logits.isinf(), torch.zeros_like(logits), logits)
    return sound.scaled(logits, temperatures) + 0.0 * finite.amax() if logits.numel() else logits


@mutant("SAMPLE-9", replaces="scaled", of=SoundSampling, source="own", alone=True)
def logits_divided_in_place(self, logits, temperatures):
    """The caller's logits are overwritten with logits / T."""
    scaled = sound.scaled(logits, temperatures)
    logits.div_(temperatures[:, None])
    return scaled


@mutant("SAMPLE-9", replaces="scaled", of=SoundSampling, source="vllm #5404")
def smallest_temperatures_are_raised(self, logits, temperatures):
    """T under 0.01 is taken for 0.1."""
    return sound.scaled(logits, torch.where(temperatures < 0.01, 0.1, temperatures))


# --- the race: race, pick ---------------------------------------------------------------------------------------------------------------


@mutant("SAMPLE-1", replaces="race", of=SoundSampling, source="own")
def noise_times_p(self, p, noise):
    """p is multiplied by the noise, not divided."""
    return torch.where(p == 0, -math.inf, p.double() * noise.double())


@mutant("SAMPLE-1", replaces="race", of=SoundSampling, source="own")
def noise_is_clamped_to_a_hundredth(self, p, noise):
    """Noise is at least 1e-2, so that early arrivals tie."""
    return sound.race(p, noise.clamp_min(1e-2))


@mutant("SAMPLE-1", replaces="race", of=SoundSampling, source="own")
def greedy_always(self, p, noise):
    """The likeliest token, whatever the noise."""
    return p


@mutant("SAMPLE-1", replaces="race", of=SoundSampling, source="own")
def uniform_always(self, p, noise):
    """The first token to arrive if all had the same rate."""
    return torch.where(p == 0, -math.inf, 1 / noise.double().abs())


@mutant("SAMPLE-4", replaces="race", of=SoundSampling, source="nano-vllm, sampler.py")
def noise_is_clamped_to_1e_10(self, p, noise):
    """Noise is at least 1e-10: a fair price for drawn noise, and not the argmax for noise that is given."""
    return sound.race(p, noise.clamp_min(1e-10))


@mutant("SAMPLE-4", replaces="race", of=SoundSampling, source="sglang #25133")
def gumbel_of_a_uniform_that_reaches_one(self, p, noise):
    """The race is run with -log(-log u), u = exp(-noise) in float32: u is 1 below 6e-8, and all such tokens arrive at once."""
    gumbel = -torch.log(-torch.log(torch.exp(-noise.abs().float())))
    return torch.where(p == 0, -math.inf, torch.log(p) + gumbel)


@mutant("SAMPLE-4", replaces="race", of=SoundSampling, source="own", alone=True)
def noise_read_without_its_stride(self, p, noise):
    """Noise that is a slice of wider rows is read as if its rows lay end to end."""
    read = noise.as_strided(noise.shape, (noise.shape[1], 1))
    return sound.race(p, torch.where(read.isfinite(), read, 1.0).abs())


@mutant("SAMPLE-4", replaces="race", of=SoundSampling, source="pytorch #192577")
def negative_zero_comes_last(self, p, noise):
    """p / -0.0 is -inf."""
    return torch.where(p == 0, -math.inf, p.double() / noise.double())


@mutant("SAMPLE-7", replaces="race", of=SoundSampling, source="pytorch #48841", alone=True)
def zero_over_zero_wins(self, p, noise):
    """A forbidden token with noise 0 has the ratio 0 / 0 = NaN, which argmax takes for the largest."""
    return p.double() / noise.double().abs()


@mutant("SAMPLE-1", replaces="pick", of=SoundSampling, source="own")
def argmin_in_place_of_argmax(self, arrivals):
    """The last to arrive."""
    return arrivals.argmin(dim=1)


@mutant("SAMPLE-1", replaces="pick", of=SoundSampling, source="own")
def ids_off_by_one(self, arrivals):
    """Ids are those of the next token, the last one's is 0."""
    return (arrivals.argmax(dim=1) + 1) % max(1, arrivals.shape[1])


@mutant("SAMPLE-7", replaces="pick", of=SoundSampling, source="own", alone=True)
def ids_are_int32(self, arrivals):
    """Tokens are int32."""
    return arrivals.argmax(dim=1).int()


@mutant("SAMPLE-7", replaces="pick", of=SoundSampling, source="tt-metal #47021", alone=True)
def ids_of_the_padding(self, arrivals):
    """The vocabulary is padded with lanes that win where every logit of the row is NaN or -inf."""
    nowhere = (arrivals.isnan() | (arrivals == -math.inf)).all(dim=1)
    return torch.where(nowhere, arrivals.shape[1] + 64, arrivals.argmax(dim=1))


@mutant("SAMPLE-7", replaces="pick", of=SoundSampling, source="own")
def tiles_race_and_one_is_all_minus_infinity(self, arrivals):
    """Tiles of 64 race first, and the largest of a tile that is all -inf is subtracted: -inf - -inf = NaN, which argmax takes for the largest."""
    rows, vocab_size = arrivals.shape
    padded = torch.nn.functional.pad(arrivals, (0, -vocab_size % 64), value=-math.inf)
    tiles = padded.view(rows, padded.shape[1] // 64, 64)
    best = tiles.amax(dim=2)
    tile = torch.where(best == -math.inf, math.nan, best).argmax(dim=1)
    return (64 * tile + tiles[torch.arange(rows), tile].argmax(dim=1)).clamp_max(vocab_size - 1)


@mutant("SAMPLE-1", replaces="pick", of=SoundSampling, source="own")
def tokens_after_the_last_full_tile_are_left_out(self, arrivals):
    """Tiles of 16 are counted with V // 16: what comes after the last full one is never drawn."""
    return arrivals[:, : max(16, arrivals.shape[1] // 16 * 16)].argmax(dim=1)


# --- the noise: noise_for, generator ------------------------------------------------------------------------------------------------------


@mutant("SAMPLE-7", replaces="pick", of=SoundSampling, source="own")
def a_row_with_one_finite_logit_gives_the_first_id(self, arrivals):
    """The mass of a row is taken without its largest logit, and where that is all there is, the row counts as empty."""
    alone = (arrivals > -math.inf).sum(dim=1) == 1
    return torch.where(alone, 0, sound.pick(arrivals))


@mutant("SAMPLE-1", replaces="noise_for", of=SoundSampling, source="own")
def the_last_sixteenth_is_never_drawn(self, shape, device, seed):
    """The last 1/16 of the vocabulary never arrives."""
    noise = sound.noise_for(shape, device, seed)
    noise[:, shape[1] - shape[1] // 16 :] = math.inf
    return noise


@mutant("SAMPLE-1", replaces="noise_for", of=SoundSampling, source="own", alone=True)
def a_tile_is_never_drawn(self, shape, device, seed):
    """The tile of ids 512 to 639 never arrives."""
    noise = sound.noise_for(shape, device, seed)
    if shape[1] >= 1000:
        noise[:, 512:640] = math.inf
    return noise


@mutant("SAMPLE-1", replaces="noise_for", of=SoundSampling, source="own")
def uniform_noise(self, shape, device, seed):
    """Noise is uniform on (0, 1) in place of exponential."""
    return 1 - torch.rand(shape, dtype=torch.float64, device=device, generator=sound.generator(device, seed))


@mutant("SAMPLE-8", replaces="noise_for", of=SoundSampling, source="own", alone=True)
def uniform_of_16_bits(self, shape, device, seed):
    """Noise is -log(1 - u) of a u with 16 random bits: the earliest arrival is 2^-17, and a token 14 nats under the top never wins."""
    return noise_of_bits(16, shape, device, seed)


@mutant("SAMPLE-8", replaces="noise_for", of=SoundSampling, source="pytorch, exponential_ of float32 on CUDA", alone=True, gpu_only=True)
def uniform_of_24_bits(self, shape, device, seed):
    """Noise has the 24 random bits of a float32 uniform: a token 16 nats under the top loses 10 % of its mass, at 18 nats 90 %."""
    return noise_of_bits(24, shape, device, seed)


def noise_of_bits(bits, shape, device, seed):
    uniform = torch.randint(1, 2**bits + 1, shape, device=device, generator=sound.generator(device, seed))
    return -torch.log1p(-(uniform.double() - 0.5) / 2**bits)


@mutant("SAMPLE-7", replaces="sample", of=SoundPlainSampling, source="own", alone=True)
def ids_past_seventeen_bits(self, logits, temperatures):
    """The tiles of a row end at 2^17 ids, in a sampler that takes no noise."""
    p = sound.probabilities(sound.scaled(logits, temperatures), logits.dtype)
    p[:, 2**17 :] = 0
    return sound.pick(sound.race(p, sound.noise_for(p.shape, p.device, None)))


@mutant("SAMPLE-8", replaces="noise_for", of=SoundSampling, source="own", alone=True)
def drawn_noise_is_clamped_to_1e_5(self, shape, device, seed):
    """Drawn noise is at least 1e-5, which no bulk test can see."""
    return sound.noise_for(shape, device, seed).clamp_min(1e-5)


@mutant("SAMPLE-5", replaces="noise_for", of=SoundSampling, source="own")
def noise_shared_between_rows(self, shape, device, seed):
    """One row of noise serves all rows."""
    return sound.noise_for(torch.Size((1, shape[1])), device, seed).expand(shape)


@mutant("SAMPLE-5", replaces="noise_for", of=SoundSampling, source="local-inference-lab/vllm #205")
def counters_of_rows_overlap(self, shape, device, seed):
    """The counter of row i and token v is i + v, not i V + v: a row's noise is the row's before, moved by one token."""
    rows, vocab_size = shape
    return sound.noise_for(torch.Size((1, rows + vocab_size)), device, seed)[0].unfold(0, vocab_size, 1)[:rows]


@mutant("SAMPLE-5", replaces="noise_for", of=SoundSampling, source="local-inference-lab/vllm #205", alone=True)
def pairs_of_rows_share_counters(self, shape, device, seed):
    """An odd row has the noise of the row before, moved by half the vocabulary."""
    noise = sound.noise_for(shape, device, seed)
    noise[1::2] = noise[0 : shape[0] // 2 * 2 : 2].roll(shape[1] // 2, dims=1)
    return noise


@mutant("SAMPLE-6", replaces="noise_for", of=SoundSampling, source="flashinfer #2132")
def noise_frozen_between_calls(self, shape, device, seed):
    """Every call draws with the same seed, as a captured graph does whose generator is baked in."""
    return sound.noise_for(shape, device, 0 if seed is None else seed)


@mutant("SAMPLE-6", replaces="generator", of=SoundSampling, source="vllm #51226", alone=True)
def the_seed_is_ignored(self, device, seed):
    """The seed is taken and not used."""
    return None


@mutant("SAMPLE-6", replaces="generator", of=SoundSampling, source="own", alone=True)
def the_seed_goes_to_the_default_generator(self, device, seed):
    """A call with a seed reseeds the generator of all calls without one, which then repeat."""
    if seed is not None:
        torch.manual_seed(seed)


@mutant("SAMPLE-6", replaces="generator", of=SoundSampling, source="own", alone=True)
def the_seed_is_cut_to_16_bits(self, device, seed):
    """A seed is handed to the kernel in 16 bits."""
    return None if seed is None else torch.Generator(device).manual_seed(seed % 2**16)


@mutant("SAMPLE-6", replaces="generator", of=SoundSampling, source="TensorRT-LLM #1742", alone=True)
def neighbouring_seeds_are_one(self, device, seed):
    """Seeds 2 n and 2 n + 1 give the same draws."""
    return None if seed is None else torch.Generator(device).manual_seed(seed // 2)
