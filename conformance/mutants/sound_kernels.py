"""The sound implementation as one object: `--impl conformance.mutants:sound`. It must hold every clause."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.mutants.sound_attention import SoundAttention
from conformance.mutants.sound_batches import SoundBatches
from conformance.mutants.sound_blocks import SoundBlocks
from conformance.mutants.sound_logits import SoundLogits
from conformance.mutants.sound_sampling import SoundSampling
from conformance.mutants.sound_store import SoundStore

PARTS = (SoundBatches, SoundStore, SoundAttention)


class SoundKernels:
    """Every function of the contract, each from its own sound part."""

    CAPABILITIES: ClassVar[dict[str, Any]] = {"claims": tuple({claim for part in PARTS for claim in part.CAPABILITIES["claims"]})}

    def __init__(self) -> None:
        batches, store, attention = SoundBatches(), SoundStore(), SoundAttention()
        self.prepare_prefill = batches.prepare_prefill
        self.prepare_decode = batches.prepare_decode
        self.compute_slot_mapping = batches.compute_slot_mapping
        self.store_kvcache = store.store_kvcache
        self.prefill_attention = attention.prefill_attention
        self.decode_attention = attention.decode_attention
        logits, sampling = SoundLogits(), SoundSampling()
        self.last_token_logits = logits.last_token_logits
        self.parallel_logits = logits.parallel_logits
        self.sample = sampling.sample
        self.BlockManager = SoundBlocks().BlockManager
