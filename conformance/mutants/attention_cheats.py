"""Cheats in place of attention: the judge must not be fooled."""

from __future__ import annotations

import torch

from conformance.mutants.catalogue import mutant
from conformance.mutants.sound_attention import SoundAttention

SOUND = SoundAttention()


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
