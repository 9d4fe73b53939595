"""Mutants that live between steps: a block manager that is wrong once blocks are hit, shared, freed or used again, and what outlives a step."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention
from conformance.mutants.sound_batches import SoundBatches
from conformance.mutants.sound_blocks import SoundBlocks, SoundManager
from conformance.mutants.sound_store import SoundStore

# --- the block manager ------------------------------------------------------------------------------------------------------------------


@mutant("LIFE-5", replaces="taken", of=SoundBlocks, source="nano-vllm #163", alone=True)
def stale_hash_after_reuse(self, manager, block):
    """A block that is used again is still found by what it held before."""


@mutant("LIFE-5", replaces="key", of=SoundBlocks, source="kekzl/imp #1301", alone=True)
def hash_without_last_token(self, tokens, column, block_size):
    """A block's hash leaves out its last token."""
    return tuple(tokens[: (column + 1) * block_size - 1])


@mutant("LIFE-5", replaces="key", of=SoundBlocks, source="kekzl/imp #1304 M24", alone=True)
def hash_without_parent(self, tokens, column, block_size):
    """A block's hash is that of its own tokens: what came before them does not count."""
    return tuple(tokens[column * block_size : (column + 1) * block_size])


@mutant("LIFE-5", replaces="key", of=SoundBlocks, source="own", alone=True)
def hash_of_sorted_tokens(self, tokens, column, block_size):
    """The hash is a sum: the order of a block's tokens does not count."""
    return (*tokens[: column * block_size], *sorted(tokens[column * block_size : (column + 1) * block_size]))


@mutant("LIFE-5", replaces="key", of=SoundBlocks, source="own", alone=True)
def hash_of_tokens_in_16_bits(self, tokens, column, block_size):
    """Tokens are kept in 16 bits."""
    return tuple(token % 2**16 for token in tokens[: (column + 1) * block_size])


@mutant("LIFE-5", replaces="key", of=SoundBlocks, source="own", alone=True)
def hash_of_tokens_in_32_bits(self, tokens, column, block_size):
    """Tokens are kept in 32 bits."""
    return tuple(token % 2**32 for token in tokens[: (column + 1) * block_size])


class TokensOfTheParent(SoundManager):
    def fork(self, sequence, child):
        super().fork(sequence, child)
        self.tokens[child] = self.tokens[sequence]


@mutant("LIFE-5", replaces="BlockManager", of=SoundBlocks, source="own", alone=True)
def fork_shares_the_list_of_tokens(self, num_blocks, block_size):
    """A fork keeps its parent's list of tokens, not a copy: what is appended to one is appended to both."""
    return TokensOfTheParent(self, num_blocks, block_size)


@mutant("LIFE-5", replaces="columns_looked_up", of=SoundBlocks, source="nano-vllm #144", alone=True)
def full_hit_leaves_no_query(self, num_tokens, block_size):
    """A prompt that ends with a block's end may be cached to its last token: nothing is left to run."""
    return num_tokens // block_size


@mutant("LIFE-5", replaces="full_blocks", of=SoundBlocks, source="kekzl/imp #1304 M37", alone=True)
def partial_block_published(self, computed, block_size):
    """The block that a chunk ends in is published as if it were full."""
    return -(-computed // block_size)


@mutant("LIFE-6", replaces="blocks_needed", of=SoundBlocks, source="nano-vllm #233", alone=True)
def count_taken_before_the_table_grew(self, computed, count, block_size):
    """The table grows by one block at most: it was counted before the step's tokens were."""
    return min(-(-computed // block_size) + 1, -(-(computed + count) // block_size))


@mutant("LIFE-6", replaces="blocks_needed", of=SoundBlocks, source="kekzl/imp #1304 M39")
def block_count_rounded_down(self, computed, count, block_size):
    """The number of blocks is floored."""
    return (computed + count) // block_size


@mutant("LIFE-6", replaces="hit", of=SoundBlocks, source="ROCm/ATOM #902", alone=True)
def hit_block_stays_free(self, manager, block):
    """A free block that is hit stays in the free list, and is handed out a second time."""


@mutant("LIFE-6", replaces="left", of=SoundBlocks, source="own")
def freed_while_shared(self, manager, block):
    """The first of two sequences that leaves gives their shared blocks back."""
    if block not in manager.idle:
        manager.idle.append(block)


@mutant("LIFE-7", replaces="copies_before_writing", of=SoundBlocks, source="own", alone=True)
def shared_block_written_in_place(self, manager, block):
    """A fork's last block is written by both branches."""
    return False


@mutant("LIFE-7", replaces="copies_before_writing", of=SoundBlocks, source="own (adversary)")
def block_of_three_written_in_place(self, manager, block):
    """A block is copied where two sequences share it, and written where three do."""
    return manager.users(block) == 2


class CopiesOfOneToken(SoundManager):
    seams: SoundCopies

    def schedule(self, sequence, num_tokens):
        self.seams.writes_one = num_tokens == 1
        return super().schedule(sequence, num_tokens)


class SoundCopies(SoundBlocks):
    writes_one: bool  # of the call that is running: whether it schedules a single token

    def BlockManager(self, num_blocks, block_size):
        return CopiesOfOneToken(self, num_blocks, block_size)


@mutant("LIFE-7", replaces="copies_before_writing", of=SoundCopies, source="own (adversary)")
def chunk_written_into_a_shared_block(self, manager, block):
    """A shared block is copied for a token, and not for a chunk."""
    return self.writes_one and manager.users(block) > 1


@mutant("LIFE-8", replaces="left", of=SoundBlocks, source="sglang #39040", alone=True)
def published_blocks_leak(self, manager, block):
    """A block that can be hit never comes back to the pool."""
    if manager.users(block) == 0 and block not in manager.found_by.values():
        manager.idle.append(block)


# --- what outlives a step ---------------------------------------------------------------------------------------------------------------


@mutant("LIFE-1", replaces="decode_tables", of=SoundBatches, source="vllm-rbln #676", alone=True)
def table_of_before_the_copy(self, sequences, device):
    """A sequence that grew by a token keeps the table row of its last step: a block that was copied or computed anew since is not in it."""
    kept = self.__dict__.setdefault("kept", {})
    rows = []
    for s in sequences:
        before = kept.get(tuple(s.token_ids[:-1]), ())
        rows.append(s._replace(block_table=before if len(before) == len(s.block_table) and before[0] == s.block_table[0] else s.block_table))
    kept.clear()
    kept.update({tuple(s.token_ids): tuple(s.block_table) for s in sequences})
    return BATCHES.decode_tables(rows, device)


@mutant("LIFE-2", replaces="write", of=SoundStore, source="own", alone=True)
def row_that_was_written_before_is_skipped(self, cache, block, offset, row):
    """A row that went to the same slot before is not written again, although the block held something else in between."""
    kept = self.__dict__.setdefault("kept", {})
    place = (cache.data_ptr(), cache.shape, block, offset)
    if place in kept and torch.equal(kept[place], row):
        return
    kept[place] = row.clone()
    STORE.write(cache, block, offset, row)


def kept_for_the_table(self, k_cache, v_cache, table, n):
    """What was gathered for the same cache, blocks and length before."""
    place = (id(k_cache), tuple(table[: -(-n // k_cache.shape[1])].tolist()), n)
    kept = self.__dict__.setdefault("kept", {})
    if place not in kept:
        kept[place] = (k_cache, ATTENTION.gather(k_cache, v_cache, table, n))
    return kept[place][1]


@mutant("LIFE-3", replaces="gather", of=SoundAttention, source="nano-vllm #163 (its like in a kernel)", alone=True)
def prefill_keeps_what_it_gathered(self, k_cache, v_cache, table, n):
    """Prefill keeps what it gathered by table and length: blocks that were used again give what they held before."""
    return ATTENTION.gather(k_cache, v_cache, table, n) if self.decoding else kept_for_the_table(self, k_cache, v_cache, table, n)


@mutant("LIFE-4", replaces="gather", of=SoundAttention, source="nano-vllm #163 (its like in a kernel)", alone=True)
def decode_keeps_what_it_gathered(self, k_cache, v_cache, table, n):
    """Decode keeps what it gathered by table and length: blocks that were used again give what they held before."""
    return kept_for_the_table(self, k_cache, v_cache, table, n) if self.decoding else ATTENTION.gather(k_cache, v_cache, table, n)


BATCHES, STORE, ATTENTION = SoundBatches(), SoundStore(), SoundAttention()
