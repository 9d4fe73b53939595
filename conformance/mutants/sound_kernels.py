"""The sound implementation as one object: `--impl conformance.mutants:sound`. It must hold every clause."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.clauses import CLAUSES
from conformance.mutants.sound_attention import SoundAttention
from conformance.mutants.sound_batches import SoundBatches
from conformance.mutants.sound_blocks import SoundBlocks
from conformance.mutants.sound_logits import SoundLogits
from conformance.mutants.sound_sampling import SoundSampling
from conformance.mutants.sound_store import SoundStore

PARTS = (SoundBatches, SoundStore, SoundAttention)


def claims_of_parts() -> dict[str, list[str]]:
    """Each part's claims, of the functions that it offers."""
    claims: dict[str, list[str]] = {}
    for clause in CLAUSES.values():
        for part in PARTS if clause.claim else ():
            if clause.claim in part.CAPABILITIES["claims"]:
                claims.setdefault(clause.claim or "", []).extend(name for name in clause.functions if hasattr(part, name))
    return claims


class SoundKernels:
    """Every function of the contract, each from its own sound part."""

    CAPABILITIES: ClassVar[dict[str, Any]] = {"claims": claims_of_parts()}

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
