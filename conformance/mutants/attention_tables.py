"""Mutants of attention: block tables, lengths and what lies where: which slot a position is read from."""

from __future__ import annotations

import itertools

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()


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


@mutant("DEC-1", replaces="context_length", of=SoundAttention, source="vllm #39303")
def newest_token_dropped_past_a_thousand(self, lengths, i):
    """Past 1,024 positions a decode row does not see its own token: its weight drowns in any tolerance."""
    return lengths[i] - 1 if lengths[i] > 1024 else lengths[i]


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
    """A call over the same tables as the one before is taken for the same step: a later chunk sees as many keys as the first one saw."""
    n = SOUND.keys_of(sums_k, i)
    if self.tables is None or self.tables.shape[1] == 0:
        return n
    if self.tables is not self.__dict__.get("held"):
        self.held, self.before = self.tables, self.__dict__.get("now", ([], {}))
        self.now = self.tables.tolist(), {}
    self.now[1][i] = n
    tables, lengths = self.before
    before = lengths.get(i, n) if tables == self.now[0] else n
    return before if before < n and n > 48 and self.tables.shape[1] > 3 else n


@mutant("STEP-2", replaces="table_row", of=SoundAttention, source="nano-vllm #219", alone=True)
def shared_first_block_is_lost(self, block_tables, i):
    """A first block that a long row shares with one before it in the batch is not found twice: the row's last block stands in for it."""
    row = block_tables[i]
    blocks = -(-self.lengths[i] // self.block_size) if self.decoding else 0
    if blocks > 12 and any(self.lengths[j] > 0 and block_tables[j, 0] == row[0] for j in range(i)):
        row = row.clone()
        row[0] = row[blocks - 1]
    return row


@mutant("DEC-3", replaces="table_row", of=SoundAttention, source="vllm #55109", alone=True)
def table_columns_packed(self, block_tables, i):
    """A decode step takes the columns of block_tables to lie side by side, whatever their stride."""
    if not self.decoding:
        return block_tables[i]
    return block_tables.as_strided((block_tables.shape[1],), (1,), block_tables.storage_offset() + i * block_tables.stride(0))


@mutant("DEC-3", replaces="read_lengths", of=SoundAttention, source="xLLM #932", alone=True)
def lengths_read_without_their_stride(self, context_lens):
    """context_lens is read as if it were contiguous."""
    return context_lens.as_strided(context_lens.shape, (1,), context_lens.storage_offset()).tolist()


@mutant("PRE-3", replaces="keys_of", of=SoundAttention, source="own", alone=True)
def longest_sequence_has_max_seqlen_keys(self, sums_k, i):
    """The longest sequence is taken to have max_seqlen_k keys, which is an upper bound."""
    n = SOUND.keys_of(sums_k, i)
    return n if self.tables is None or n < max(b - a for a, b in itertools.pairwise(sums_k)) else self.max_seqlen_k
