"""The sound implementation as one object: `--impl conformance.mutants:sound`. It must hold every clause."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.mutants.sound_attention import SoundAttention
from conformance.mutants.sound_batches import SoundBatches
from conformance.mutants.sound_store import SoundStore


class SoundKernels(SoundBatches, SoundStore, SoundAttention):
    """Prepare, store and attend: what a step of a model's layer needs."""

    CAPABILITIES: ClassVar[dict[str, Any]] = {
        "claims": tuple(claim for part in (SoundBatches, SoundStore, SoundAttention) for claim in part.CAPABILITIES["claims"])
    }
