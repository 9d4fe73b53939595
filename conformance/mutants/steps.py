"""Mutants that live between steps: state that one call leaves to the next."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention
from conformance.mutants.sound_store import SoundStore


class SoundSteps(SoundStore, SoundAttention):
    """Store and attend in one object."""

    CAPABILITIES = SoundAttention.CAPABILITIES


@mutant("STEP-1", replaces="gather", of=SoundSteps, source="xLLM #932", alone=True)
def third_step_reuses_the_gathered_keys(self, k_cache, v_cache, table, n):
    """Where D is 32 or more, gathered keys are kept while a table grows by a token a step: the third step in a row finds its own slot stale."""
    keys, values = SOUND.gather(k_cache, v_cache, table, n)
    kept = self.__dict__.setdefault("kept", {})
    place = (k_cache.data_ptr(), int(table[0]), tuple(keys.shape[1:]))
    length, in_a_row, old, old_values = kept.get(place, (0, 0, keys, values))
    in_a_row = in_a_row + 1 if n == length + 1 and torch.equal(values[:length], old_values[:length]) else 0
    kept[place] = (n, in_a_row, keys, values)
    if in_a_row >= 2 and old.shape == keys.shape and keys.shape[-1] >= 32:
        keys = keys.clone()
        keys[n - 1] = old[n - 1]
    return keys, values


@mutant("STEP-1", replaces="store_kvcache", of=SoundSteps, source="own")
def store_is_queued(self, key, value, k_cache, v_cache, slot_mapping):
    """A store is queued and written by the next one: attention runs before its own tokens are there."""
    queued, self.queue = self.__dict__.get("queue"), (key, value, k_cache, v_cache, slot_mapping)
    if queued is not None:
        SOUND.store_kvcache(*queued)


SOUND = SoundSteps()
