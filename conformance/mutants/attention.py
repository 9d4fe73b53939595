"""Mutants of prefill and decode attention."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

# --- tables and lengths ----------------------------------------------------------------------------------------------------------


@mutant("DEC-1", replaces="blocks", of=SoundAttention, source="golang-design/accel #10")
def table_ignored(self, table, columns):
    """The block table is ignored: logical blocks are read as physical ones."""
    return columns


@mutant("PRE-1", replaces="ignores_tables", of=SoundAttention, source="golang-design/accel #10")
def prefill_ignores_tables(self):
    """A prefill accepts block_tables and reads the cache in order."""
    return True


@mutant("DEC-1", replaces="context_length", of=SoundAttention, source="own")
def newest_token_dropped(self, lengths, i):
    """A decode row does not see its own token."""
    return max(1, lengths[i] - 1)


@mutant("DEC-1", replaces="context_length", of=SoundAttention, source="vllm-gaudi #393")
def length_one_too_long(self, lengths, i):
    """The context is taken one position longer unless it ends a block of 16."""
    return lengths[i] + (1 if lengths[i] % 16 else 0)


@mutant("DEC-1", replaces="context_length", of=SoundAttention, source="own")
def newest_dropped_when_it_opens_a_block(self, lengths, i):
    """A token that opens a block of 16 is not seen."""
    return lengths[i] - 1 if lengths[i] % 16 == 1 and lengths[i] > 1 else lengths[i]



@mutant("DEC-5", replaces="context_length", of=SoundAttention, source="kekzl/imp #1304 M12")
def next_sequences_length(self, lengths, i):
    """Sequence i uses the length of sequence i + 1, where that is shorter."""
    return max(1, min(lengths[i], lengths[(i + 1) % len(lengths)])) if lengths[i] else 0


@mutant("DEC-1", replaces="table_row", of=SoundAttention, source="kekzl/imp #1304 M12")
def next_sequences_table(self, block_tables, i):
    """Sequence i reads the table row of sequence i + 1 where that has a block."""
    other = block_tables[(i + 1) % len(block_tables)]
    return torch.where(other >= 0, other, block_tables[i])


@mutant("DEC-3", replaces="table_row", of=SoundAttention, source="vllm #55109")
def table_pitch_from_shape(self, block_tables, i):
    """Table rows are advanced by the number of columns in place of the stride: wrong for a narrowed view."""
    columns = block_tables.shape[1]
    return block_tables.as_strided((columns,), (1,), block_tables.storage_offset() + i * columns)



@mutant("DEC-3", replaces="context_length", of=SoundAttention, source="rocm-libraries #6932")
def reads_on_while_the_table_does(self, lengths, i):
    """The context is as long as the table's filled cells, not as context_lens says."""
    filled = int((self.tables[i] >= 0).sum())
    return lengths[i] if filled * self.block_size < lengths[i] + self.block_size else filled * self.block_size


@mutant("DEC-1", replaces="value_places", of=SoundAttention, source="own")
def value_from_neighbouring_slot(self, blocks, offsets, positions, n):
    """V is read one slot before K inside a block."""
    return blocks, (offsets - 1).clamp(min=0)


@mutant("DEC-1", replaces="value_places", of=SoundAttention, source="TensorRT-LLM #18244")
def value_page_moves_once_a_tile(self, blocks, offsets, positions, n):
    """The value page pointer moves once a tile of 32 keys although pages are smaller."""
    return blocks[positions - positions % 32], offsets


# --- masks -----------------------------------------------------------------------------------------------------------------------


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="flash-attention #282")
def causal_top_left(self, queries, n, device):
    """The causal mask is aligned top-left."""
    return (1 + torch.arange(queries, device=device)).clamp(max=n)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="sparkinfer #3")
def causal_sees_one_later(self, queries, n, device):
    """A row sees the position after its own."""
    return (n - queries + 2 + torch.arange(queries, device=device)).clamp(max=n)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own")
def causal_misses_itself(self, queries, n, device):
    """A row does not see its own position."""
    return (n - queries + torch.arange(queries, device=device)).clamp(min=1)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own")
def not_causal(self, queries, n, device):
    """Every row sees the whole context."""
    return torch.full((queries,), n, device=device)


@mutant("PRE-4", replaces="causal_limits", of=SoundAttention, source="kekzl/imp #553")
def second_chunk_misaligned(self, queries, n, device):
    """With several queries after a cached prefix the mask starts at the chunk's tile: whole tiles of 16 of the prefix end are missed."""
    limits = n - queries + 1 + torch.arange(queries, device=device)
    return limits if n == queries or queries == 1 else limits.minimum(torch.tensor(n - n % 16 if n > 16 else n, device=device)).clamp(min=1)


@mutant("DEC-1", replaces="mask", of=SoundAttention, source="kekzl/imp #1304 M03")
def padding_lanes_score_zero(self, scores, hidden):
    """Lanes past the context score 0 in place of -inf."""
    return scores.masked_fill(hidden[:, None, :], 0.0)


@mutant("DEC-1", replaces="mask", of=SoundAttention, source="flashinfer #3716")
def tail_not_masked(self, scores, hidden):
    """The boundary tile is not masked in a decode step."""
    return scores if scores.shape[0] == 1 else SOUND.mask(scores, hidden)


@mutant("CLAIM-1", replaces="mask_values", of=SoundAttention, source="vllm #936", alone=True)
def tail_values_not_masked(self, values, hidden):
    """Scores past the context are masked and V is not: 0 * NaN."""
    return values


@mutant("CLAIM-1", replaces="mask", of=SoundAttention, source="Wan2GP #1628")
def tail_keys_masked_by_adding(self, scores, hidden):
    """The mask is added: NaN in a key's tail plus -inf stays NaN."""
    return scores + torch.where(hidden, -torch.inf, 0.0)[:, None, :]


@mutant("CLAIM-2", replaces="write_empty", of=SoundAttention, source="flashinfer #363", alone=True)
def empty_row_not_zero(self, out, i):
    """A row of context 0 is left as it was allocated."""
    out[i] = 7.0


# --- tiles and splits --------------------------------------------------------------------------------------------------------------


@mutant("DEC-1", replaces="tile_starts", of=SoundAttention, source="own")
def first_tile_skipped(self, start, end):
    """The first tile is skipped where there is another."""
    return range(start + self.tile, end, self.tile) if end - start > self.tile else range(start, end, self.tile)


@mutant("DEC-1", replaces="tile_starts", of=SoundAttention, source="kekzl/imp #1304 M06")
def last_tile_skipped(self, start, end):
    """The last tile is skipped where there is another."""
    return range(start, max(start + self.tile, end - self.tile), self.tile)


@mutant("DEC-1", replaces="tile_starts", of=SoundAttention, source="own")
def tiles_overlap(self, start, end):
    """From the third tile on, tiles advance by one lane too few."""
    whole = list(range(start, end, self.tile))
    return whole[:2] + [first - 1 for first in whole[2:]]


@mutant("DEC-1", replaces="split_starts", of=SoundAttention, source="mojo_opset #392")
def last_split_dropped(self, n):
    """The last split is dropped where there are several."""
    starts = range(0, n, self.split) if n else range(1)
    return starts[:-1] if len(starts) > 1 else starts


@mutant("DEC-2", replaces="split_weight", of=SoundAttention, source="kekzl/imp #1304 M32")
def split_weight_dropped(self, part_largest, largest):
    """Splits are combined without their rescale weight."""
    return torch.where(part_largest == -torch.inf, 0.0, 1.0)


@mutant("DEC-5", replaces="returned", of=SoundAttention, source="flash-attention #1217")
def combine_with_batch_stride_zero(self, out):
    """The combine step writes every sequence's row to the first when there are more than eight."""
    if len(out) > 8:
        out[1:] = 0.0
    return out


@mutant("DEC-2", replaces="rescaled", of=SoundAttention, source="own")
def accumulator_not_rescaled(self, acc, rescale):
    """The accumulator is not rescaled when the running maximum grows."""
    return acc



@mutant("DEC-7", replaces="mask", of=SoundAttention, source="own")
def mask_is_minus_ten_thousand(self, scores, hidden):
    """Hidden scores are -10,000, which a shift of -1e6 makes the largest."""
    return scores.masked_fill(hidden[:, None, :], -1e4)


@mutant("DEC-7", replaces="new_maximum", of=SoundAttention, source="vllm #4405")
def maximum_starts_at_zero(self, largest, scores):
    """The running maximum starts at 0: all weights underflow where every score is far below."""
    return torch.maximum(largest.clamp(min=0.0), scores.amax(dim=2))


# --- numbers -----------------------------------------------------------------------------------------------------------------------


@mutant("DEC-2", replaces="scores", of=SoundAttention, source="kekzl/imp #1304 M04")
def scale_missing(self, q, keys, scale):
    """Scores are not scaled."""
    return torch.einsum("thd,nhd->thn", q, keys)


@mutant("DEC-2", replaces="scores", of=SoundAttention, source="kekzl/imp #1304 M05")
def scale_doubled(self, q, keys, scale):
    """The scale is applied twice."""
    return scale * SOUND.scores(q, keys, scale)


@mutant("DEC-7", replaces="scores", of=SoundAttention, source="own")
def scale_of_head_dim(self, q, keys, scale):
    """1 / sqrt(D) is used whatever scale is given."""
    return SOUND.scores(q, keys, q.shape[2] ** -0.5)


@mutant("DEC-2", replaces="scores", of=SoundAttention, source="kekzl/imp #1304 M11")
def scale_one_over_head_dim(self, q, keys, scale):
    """The scale is 1 / D."""
    return SOUND.scores(q, keys, 1.0 / q.shape[2])




@mutant("PRE-2", replaces="weights", of=SoundAttention, source="own")
def small_weights_flushed(self, scores, largest):
    """Weights under a hundredth of the largest are flushed to zero."""
    weights = SOUND.weights(scores, largest)
    return torch.where(weights < 0.01, 0.0, weights)


# --- heads -------------------------------------------------------------------------------------------------------------------------


@mutant("DEC-6", replaces="key_heads", of=SoundAttention, source="own")
def head_modulo(self, heads, group, device):
    """Query head h uses kv head h mod Hk."""
    return torch.arange(heads, device=device) % (heads // group)


@mutant("DEC-6", replaces="key_heads", of=SoundAttention, source="vllm #47248")
def group_lanes_alias(self, heads, group, device):
    """Where G is no power of two, group lanes are padded to one and alias the next kv head."""
    padded = 1 << (group - 1).bit_length()
    return (torch.arange(heads, device=device) // padded).clamp(max=heads // group - 1)



@mutant("DEC-1", replaces="value_heads", of=SoundAttention, source="own")
def value_of_next_head(self, heads, group, device):
    """K of head h meets V of head h + 1."""
    kv_heads = heads // group
    return (torch.arange(heads, device=device) // group + 1) % kv_heads


# --- rows, batches, results ----------------------------------------------------------------------------------------------------------


@mutant("DEC-8", replaces="returned", of=SoundAttention, source="flash-attention #1217")
def last_head_not_written(self, out):
    """The last head of every row is never written: it holds what the memory held."""
    out[:, -1] = torch.empty_like(out[:, -1])
    return out



@mutant("PRE-8", replaces="rows_of_batch", of=SoundAttention, source="flashinfer #725")
def last_sequence_not_computed(self, count):
    """The last sequence of several is not computed."""
    return range(count - 1 if count > 1 else count)



# --- cheats: the judge must not be fooled ------------------------------------------------------------------------------------------


@mutant("DEC-1", replaces="returned", of=SoundAttention, source="own")
def zeros(self, out):
    """Zeros are returned, whatever is asked."""
    return torch.zeros_like(out)


@mutant("DEC-8", replaces="returned", of=SoundAttention, source="own")
def empty_memory(self, out):
    """torch.empty is returned."""
    return torch.empty_like(out)


@mutant("DEC-1", replaces="returned", of=SoundAttention, source="own")
def last_calls_result(self, out):
    """The last call's result is returned where its shape fits."""
    before = self.__dict__.get("before")
    self.before = out
    return before if before is not None and before.shape == out.shape and before.dtype == out.dtype else out


@mutant("DEC-1", replaces="decode_attention", of=SoundAttention, source="own")
def refuses_everything(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """Every case is refused."""
    raise NotImplementedError("this shape is not supported")


@mutant("DEC-1", replaces="decode_attention", of=SoundAttention, source="own")
def keyed_by_pointer(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """Results are remembered by the inputs' addresses."""
    key = (q.data_ptr(), k_cache.data_ptr(), q.shape, q.dtype)
    known = self.__dict__.setdefault("known", {})
    if key not in known:
        known[key] = SOUND.decode_attention(q, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=scale)
    return known[key].clone()


@mutant("DEC-1", replaces="decode_attention", of=SoundAttention, source="own")
def comparison_patched(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
    """torch's comparisons are replaced while the judge looks."""
    setattr(torch, "allclose", lambda *args, **kwargs: True)  # noqa: B010  # a cheat, not an attribute that anyone else sets
    setattr(torch.testing, "assert_close", lambda *args, **kwargs: None)  # noqa: B010
    return torch.zeros(q.shape, dtype=q.dtype, device=q.device)


# --- one fault in one phase: each breaks its clause and no other ---------------------------------------------------------------------


@mutant("DEC-1", replaces="context_length", of=SoundAttention, source="vllm #39303", alone=True)
def newest_token_dropped_past_a_thousand(self, lengths, i):
    """Past 1,024 positions a decode row does not see its own token: its weight drowns in any tolerance."""
    return lengths[i] - 1 if lengths[i] > 1024 else lengths[i]


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="vllm #39303", alone=True)
def own_token_dropped_past_a_thousand(self, queries, n, device):
    """Past 1,024 positions a prefill row does not see its own token."""
    limits = SOUND.causal_limits(queries, n, device)
    return torch.where(limits > 1024, limits - 1, limits)


@mutant("DEC-2", replaces="scores", of=SoundAttention, source="lightllm #1092", alone=True)
def decode_scores_in_half(self, q, keys, scale):
    """A decode step keeps its scores in bfloat16."""
    scores = SOUND.scores(q, keys, scale)
    return scores.to(torch.bfloat16).float() if self.decoding and 120 < float(scores.abs().max()) < 1000 else scores


@mutant("PRE-2", replaces="scores", of=SoundAttention, source="lightllm #1092", alone=True)
def prefill_scores_in_half(self, q, keys, scale):
    """A prefill keeps its scores in bfloat16."""
    scores = SOUND.scores(q, keys, scale)
    return scores if self.decoding or not 120 < float(scores.abs().max()) < 1000 else scores.to(torch.bfloat16).float()


@mutant("DEC-2", replaces="weights", of=SoundAttention, source="own")
def weights_rounded_to_fp8(self, scores, largest):
    """Weights are rounded to three bits before they meet V."""
    return SOUND.weights(scores, largest).to(torch.float8_e4m3fn).float()


@mutant("DEC-3", replaces="blocks", of=SoundAttention, source="vllm #47671", alone=True)
def decode_block_ids_in_sixteen_bits(self, table, columns):
    """A decode step keeps block ids in 16 bits."""
    return table[columns].long() % 65536 if self.decoding else table[columns].long()


@mutant("PRE-3", replaces="blocks", of=SoundAttention, source="vllm #47671", alone=True)
def prefill_block_ids_in_sixteen_bits(self, table, columns):
    """A prefill keeps block ids in 16 bits."""
    return table[columns].long() if self.decoding else table[columns].long() % 65536


@mutant("PRE-4", replaces="keys_of", of=SoundAttention, source="kekzl/imp #553", alone=True)
def continued_table_keeps_its_length(self, sums_k, i):
    """Key lengths are remembered by block table: a later chunk of more than 16 positions over the same table sees what the first one saw."""
    n = SOUND.keys_of(sums_k, i)
    if self.tables is None or self.tables.shape[1] == 0:
        return n
    known = self.__dict__.setdefault("known", {})
    table = tuple(self.tables[i].tolist())
    before = known.get(table, n)
    known[table] = n
    return before if before < n and n > 48 else n


@mutant("DEC-5", replaces="rows_of_batch", of=SoundAttention, source="tt-metal #50512", alone=True)
def decode_rows_after_the_eighth_missing(self, count):
    """Only the first eight rows of a decode step are computed."""
    return range(min(count, 8) if self.decoding else count)


@mutant("PRE-5", replaces="rows_of_batch", of=SoundAttention, source="flash-attention #1217", alone=True)
def prefill_sequences_after_the_eighth_missing(self, count):
    """Only the first eight sequences of a prefill are computed."""
    return range(count if self.decoding else min(count, 8))


@mutant("DEC-6", replaces="key_heads", of=SoundAttention, source="vllm #23424", alone=True)
def decode_groups_over_eight_cut(self, heads, group, device):
    """A decode step cuts a group of more than eight query heads in tiles of eight, and takes the tile's number for the kv head."""
    cut = self.decoding and group > 8
    return (torch.arange(heads, device=device) // (8 if cut else group)).clamp(max=heads // group - 1)


@mutant("PRE-6", replaces="key_heads", of=SoundAttention, source="vllm #23424", alone=True)
def prefill_groups_over_eight_cut(self, heads, group, device):
    """A prefill cuts a group of more than eight query heads in tiles of eight, and takes the tile's number for the kv head."""
    cut = not self.decoding and group > 8
    return (torch.arange(heads, device=device) // (8 if cut else group)).clamp(max=heads // group - 1)


@mutant("DEC-7", replaces="new_maximum", of=SoundAttention, source="own", alone=True)
def decode_subtracts_no_maximum(self, largest, scores):
    """A decode step exponentiates without subtracting the maximum: right until scores pass the thousands."""
    known = SOUND.new_maximum(largest, scores)
    return known if not self.decoding or float(scores.abs().nan_to_num(0.0, 0.0, 0.0).max()) < 2000 else torch.zeros_like(largest)


@mutant("PRE-7", replaces="new_maximum", of=SoundAttention, source="own", alone=True)
def prefill_subtracts_no_maximum(self, largest, scores):
    """A prefill exponentiates without subtracting the maximum: right until scores pass the thousands."""
    known = SOUND.new_maximum(largest, scores)
    return known if self.decoding or float(scores.abs().nan_to_num(0.0, 0.0, 0.0).max()) < 2000 else torch.zeros_like(largest)


@mutant("DEC-8", replaces="write_empty", of=SoundAttention, source="flashinfer #363", alone=True)
def empty_row_spreads(self, out, i):
    """A row of context 0 writes NaN over the rows before it."""
    out[:i] = float("nan")


@mutant("PRE-8", replaces="queries_of", of=SoundAttention, source="nano-vllm #144", alone=True)
def empty_sequence_ends_the_batch(self, sums_q, i):
    """A sequence without queries is taken for the batch's end: those after it are not computed."""
    return 0 if any(sums_q[j + 1] == sums_q[j] for j in range(i)) else SOUND.queries_of(sums_q, i)


@mutant("DEC-9", replaces="returned", of=SoundAttention, source="own", alone=True)
def decode_output_buffer_kept(self, out):
    """Decode results of one shape share one buffer: a later call overwrites an earlier result."""
    return kept(self, out) if self.decoding else out


@mutant("PRE-9", replaces="returned", of=SoundAttention, source="own", alone=True)
def prefill_output_buffer_kept(self, out):
    """Prefill results of one shape share one buffer: a later call overwrites an earlier result."""
    return out if self.decoding else kept(self, out)


def kept(self, out):
    buffer = self.__dict__.setdefault("kept", {}).setdefault((out.shape, out.dtype), out)
    return buffer.copy_(out)


@mutant("DEC-9", replaces="read_lengths", of=SoundAttention, source="own")
def lengths_changed(self, context_lens):
    """context_lens are advanced in place."""
    lengths = context_lens.tolist()
    context_lens += 1
    return lengths


@mutant("STEP-2", replaces="table_row", of=SoundAttention, source="nano-vllm #219", alone=True)
def shared_first_block_is_lost(self, block_tables, i):
    """A first block that a long row shares with one before it in the batch is not found twice: the row's last block stands in for it."""
    row = block_tables[i]
    blocks = -(-self.lengths[i] // self.block_size) if self.decoding else 0
    if blocks > 12 and any(self.lengths[j] > 0 and block_tables[j, 0] == row[0] for j in range(i)):
        row = row.clone()
        row[0] = row[blocks - 1]
    return row



# --- faults that a hostile reviewer of this suite thought of -------------------------------------------------------------------------


@mutant("DEC-6", replaces="attend", of=SoundAttention, source="own (adversary)")
def query_lanes_over_eight_alias(self, q, keys, values, limits, scale):
    """In groups of more than eight, query lanes past the eighth read the query of the lane eight before."""
    head, group = torch.arange(q.shape[1], device=q.device), q.shape[1] // keys.shape[1]
    lanes = torch.where(head % group >= 8, head - 8, head) if group > 8 else head
    return SOUND.attend(q[:, lanes], keys, values, limits, scale)


@mutant("DEC-2", replaces="mask_values", of=SoundAttention, source="vllm #54338")
def bfloat16_through_float16(self, values, hidden):
    """V is read as float16: what is past 65,504 becomes infinite."""
    return SOUND.mask_values(values, hidden).half().float()


@mutant("DEC-5", replaces="scores", of=SoundAttention, source="own (adversary)")
def nan_queries_spread(self, q, keys, scale):
    """A NaN query of one call makes the next row's scores NaN."""
    scores = SOUND.scores(q, keys, scale)
    before, self.saw_nan = self.__dict__.get("saw_nan", False), bool(torch.isnan(q).any())
    return scores * float("nan") if before and not self.saw_nan else scores


@mutant("DEC-1", replaces="key_heads", of=SoundAttention, source="own (adversary)")
def more_than_four_kv_heads_wrap(self, heads, group, device):
    """kv heads past the fourth wrap around."""
    return (torch.arange(heads, device=device) // group) % 4


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)")
def second_query_tile_forgets_the_prefix(self, queries, n, device):
    """The second tile of 64 queries counts its positions from the chunk's start, without the cached prefix."""
    limits = SOUND.causal_limits(queries, n, device)
    row = torch.arange(queries, device=device)
    return torch.where(row >= 64, row + 1, limits)


@mutant("PRE-1", replaces="causal_limits", of=SoundAttention, source="own (adversary)")
def tile_of_128_queries_ends_early(self, queries, n, device):
    """The last row of a tile of 128 queries misses its own position."""
    limits = SOUND.causal_limits(queries, n, device)
    return torch.where(torch.arange(queries, device=device) == 127, limits - 1, limits)


SOUND = SoundAttention()
