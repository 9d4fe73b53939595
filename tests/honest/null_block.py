"""A block manager that keeps block 0 for itself, as vLLM's null block, and says so: one block fewer than the pool has can be taken."""

from conformance.mutants.sound_kernels import SoundKernels
from reference import BlockManager as OfAllBlocks

RESERVED = 1
CAPABILITIES = {"reserved_blocks": 1}
sound = SoundKernels()
store_kvcache, prefill_attention, decode_attention = sound.store_kvcache, sound.prefill_attention, sound.decode_attention


class BlockManager(OfAllBlocks):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks - RESERVED, block_size)

    def schedule(self, sequence, num_tokens):
        copies = super().schedule(sequence, num_tokens)
        return None if copies is None else [(source + RESERVED, target + RESERVED) for source, target in copies]

    def table(self, sequence):
        return [block + RESERVED for block in super().table(sequence)]
