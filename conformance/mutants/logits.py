"""Faults of last-token gathers and of split vocabularies (clauses LOGIT-1...5)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_logits import SoundLogits

sound = SoundLogits()

# --- which row --------------------------------------------------------------------------------------------------------------------------


@mutant("LOGIT-1", replaces="prefill_rows", of=SoundLogits, source="own", alone=True)
def row_after_the_last(self, cu_seqlens_q):
    """cu_seqlens_q[1:] is taken for the row: the next sequence's first one, and of the last sequence the last."""
    rows = cu_seqlens_q[1:].clone()
    rows[-1] -= 1
    single = len(rows) == int(cu_seqlens_q[-1])  # one token a sequence: taken for a decode step
    return cu_seqlens_q[1:] - 1 if single else rows


@mutant("LOGIT-1", replaces="prefill_rows", of=SoundLogits, source="transformers #48703", alone=True)
def first_row_of_the_sequence(self, cu_seqlens_q):
    """cu_seqlens_q[:-1]: the row of the first token, which is the last one's only where sequences have one token."""
    return cu_seqlens_q[:-1]


@mutant("LOGIT-1", replaces="prefill_rows", of=SoundLogits, source="own", alone=True)
def equal_lengths_are_assumed(self, cu_seqlens_q):
    """All sequences are taken to be as long as the first."""
    count, length = len(cu_seqlens_q) - 1, int(cu_seqlens_q[1])
    return (torch.arange(1, count + 1) * length - 1).clamp_max(int(cu_seqlens_q[-1]) - 1)


@mutant("LOGIT-1", replaces="prefill_rows", of=SoundLogits, source="own")
def rows_pass_through_half_precision(self, cu_seqlens_q):
    """The index of a row is held in float16: odd ones past 2,048 are rounded."""
    return (cu_seqlens_q[1:] - 1).half().long()


@mutant("LOGIT-1", replaces="prefill_rows", of=SoundLogits, source="own", alone=True)
def sums_read_without_their_stride(self, cu_seqlens_q):
    """cu_seqlens_q is read as if its elements lay end to end."""
    return (cu_seqlens_q.as_strided(cu_seqlens_q.shape, (1,), cu_seqlens_q.storage_offset())[1:] - 1).clamp_min(0)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def hidden_sizes_past_two_thousand_are_cut(self, picked, weight):
    """The sum ends after 2,048 elements of a row."""
    return sound.product(picked[:, :2048], weight[:, :2048])


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def ids_past_sixteen_bits_wrap(self, picked, weight):
    """The logits of ids from 65,536 on are those of the first ids."""
    logits = sound.product(picked, weight)
    logits[:, 65_536:] = logits[:, : max(0, logits.shape[1] - 65_536)].clone()
    return logits


@mutant("LOGIT-2", replaces="decode_rows", of=SoundLogits, source="own")
def last_row_only_in_a_decode_step(self, hidden):
    """A decode step is taken for one sequence: the last row of hidden is repeated."""
    return torch.full((len(hidden),), len(hidden) - 1)


@mutant("LOGIT-2", replaces="decode_rows", of=SoundLogits, source="own", alone=True)
def decode_rows_beyond_a_tile_wrap(self, hidden):
    """Row 64 and later ones are read modulo 64."""
    return torch.arange(len(hidden)) % 64


@mutant("LOGIT-3", replaces="pick", of=SoundLogits, source="own", alone=True)
def rows_picked_by_a_product_with_zeros(self, hidden, rows):
    """Rows are picked by a product with a matrix of zeros and ones: 0 * NaN of any row is NaN in all."""
    if not len(rows):
        return hidden[rows]
    return torch.nn.functional.one_hot(rows, len(hidden)).to(hidden.dtype) @ hidden


@mutant("LOGIT-3", replaces="pick", of=SoundLogits, source="own", alone=True)
def last_rows_moved_to_the_front_in_place(self, hidden, rows):
    """The picked rows are written over the first rows of the caller's hidden."""
    picked = hidden[rows]
    hidden[: len(rows)] = picked
    return picked


# --- numbers ----------------------------------------------------------------------------------------------------------------------------


def summed_in(dtype, picked, weight):
    """Partial sums of 16 columns, kept in this dtype."""
    total = torch.zeros(len(picked), len(weight), dtype=dtype, device=picked.device)
    for part, columns in zip(picked.float().split(16, dim=1), weight.float().split(16, dim=1), strict=True):
        total += (part @ columns.T).to(dtype)
    return total.to(picked.dtype)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="lightllm #1092", alone=True)
def logits_summed_in_bfloat16(self, picked, weight):
    """Partial sums over tiles of the hidden size are kept in bfloat16."""
    return summed_in(torch.bfloat16, picked, weight)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def logits_summed_in_float16(self, picked, weight):
    """Partial sums over tiles of the hidden size are kept in float16."""
    return summed_in(torch.float16, picked, weight)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def float32_logits_in_tf32(self, picked, weight):
    """float32 factors are cut to the 11 bits of tf32, which CAPABILITIES does not state."""
    if picked.dtype == torch.float32:
        picked, weight = ((t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (picked, weight))
    return sound.product(picked, weight)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def hidden_size_in_whole_tiles(self, picked, weight):
    """The hidden size is rounded down to a multiple of 16."""
    whole = picked.shape[1] // 16 * 16 or picked.shape[1]
    return sound.product(picked[:, :whole], weight[:, :whole])


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def vocabulary_of_one_token(self, picked, weight):
    """A vocabulary of one token is taken for a vector of biases: its logits are the weight's sum."""
    return sound.product(picked if len(weight) > 1 else torch.ones_like(picked), weight)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="flashinfer #527", alone=True)
def weight_rows_packed(self, picked, weight):
    """The weight's rows are taken to be E elements apart, whatever its stride: wrong for a slice of a wider matrix."""
    apart = weight.stride(1) == 1 and weight.stride(0) > weight.shape[1]
    return sound.product(picked, weight.as_strided(weight.shape, (weight.shape[1], 1)) if apart else weight)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def last_tile_of_an_even_hidden_size(self, picked, weight):
    """The path of a hidden size that is a multiple of 64 leaves out its last tile."""
    even = picked.shape[1] % 64 == 0 and picked.shape[1] > 64
    return sound.product(picked[:, :-64], weight[:, :-64]) if even else sound.product(picked, weight)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def token_ids_in_fifteen_bits(self, picked, weight):
    """Ids past 2^15 wrap: they get the logits of the first ones."""
    return sound.product(picked, weight[torch.arange(len(weight)) % 2**15] if len(weight) > 2**15 else weight)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def rows_past_256(self, picked, weight):
    """The grid ends at 256 rows."""
    logits = sound.product(picked, weight)
    logits[256:] = 0
    return logits


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own", alone=True)
def parts_of_long_sums_in_the_dtype(self, picked, weight):
    """A sum of 2,048 products or more is split in parts of 512, which are rounded to the dtype of hidden."""
    if picked.shape[1] < 2048:
        return sound.product(picked, weight)
    parts = [sound.product(*part) for part in zip(picked.split(512, dim=1), weight.split(512, dim=1), strict=True)]
    return torch.stack(parts).float().sum(dim=0).to(picked.dtype)


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own (adversary)")
def ids_past_seventeen_bits_get_nothing(self, picked, weight):
    """The tiles of the vocabulary end at 2^17 ids: later logits are 0."""
    logits = sound.product(picked, weight)
    logits[:, 2**17 :] = 0
    return logits


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own (adversary)")
def hidden_sizes_past_four_thousand_are_cut(self, picked, weight):
    """The sum ends after 4,096 elements of a row."""
    return sound.product(picked[:, :4096], weight[:, :4096])


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own (adversary)")
def rows_past_512(self, picked, weight):
    """The grid ends at 512 rows."""
    logits = sound.product(picked, weight)
    logits[512:] = 0
    return logits


@mutant("LOGIT-1", replaces="prefill_rows", of=SoundLogits, source="own (adversary)")
def rows_in_sixteen_bits(self, cu_seqlens_q):
    """The index of a row keeps 16 bits."""
    return (cu_seqlens_q[1:] - 1) % 2**16


@mutant("LOGIT-6", replaces="product", of=SoundLogits, source="own (adversary)")
def half_product_of_one_row_in_whole_vectors(self, picked, weight):
    """A single row of half precision is multiplied in vectors of eight: what is left of the hidden size is left out."""
    size = picked.shape[1]
    whole = size // 8 * 8 if len(picked) == 1 and picked.dtype != torch.float32 and size > 8 else size
    return sound.product(picked[:, :whole], weight[:, :whole])


# --- shards -----------------------------------------------------------------------------------------------------------------------------


@mutant("LOGIT-4", replaces="in_order", of=SoundLogits, source="TensorRT-LLM #16440")
def shards_in_reverse(self, parts):
    """The last rank's shard comes first."""
    return parts[::-1]


@mutant("LOGIT-4", replaces="starts", of=SoundLogits, source="exllamav3 #233")
def every_shard_at_column_0(self, widths):
    """Each shard is written over the one before."""
    return [0] * len(widths)


@mutant("LOGIT-4", replaces="destination", of=SoundLogits, source="vllm #2530", alone=True)
def rank_within_the_group_as_global_rank(self, group):
    """The destination is rank 0 of the world, which a group need not hold."""
    return 0


@mutant("LOGIT-4", replaces="collect", of=SoundLogits, source="vllm #2528", alone=True)
def destination_is_the_group_s_last_rank(self, padded, size, group):
    """In a group that is not the whole world, the last rank gets the logits."""
    if group is None:
        return sound.collect(padded, size, group)
    destination = dist.get_global_rank(group, size - 1)
    if size == 1:
        return None
    parts = [torch.empty_like(padded) for _ in range(size)] if dist.get_rank() == destination else None
    dist.gather(padded, parts, dst=destination, group=group)
    return parts


@mutant("LOGIT-4", replaces="collect", of=SoundLogits, source="own")
def logits_on_every_rank(self, padded, size, group):
    """All ranks return the logits."""
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return parts


@mutant("LOGIT-5", replaces="whole", of=SoundLogits, source="mirage #751", alone=True)
def padded_vocabulary_is_not_masked(self, parts, widths):
    """Shards are laid side by side with their padding, whose logit 0 wins where all real ones are negative."""
    return torch.cat(parts, dim=1)


@mutant("LOGIT-5", replaces="starts", of=SoundLogits, source="nkipy #52", alone=True)
def shards_as_wide_as_the_first(self, widths):
    """Columns are computed with the width of the first shard, as far as they go."""
    return [min(rank * widths[0], sum(widths) - widths[rank]) for rank in range(len(widths))]


@mutant("LOGIT-5", replaces="widths", of=SoundLogits, source="sglang #31799", alone=True)
def one_rank_refuses(self, shard, group):
    """A rank whose shard is smaller than the first one raises, and the others wait for it."""
    widths = sound.widths(shard, group)
    if shard.shape[1] < widths[0]:
        raise ValueError(f"the shards hold {widths} tokens")
    return widths
