"""decode_attention does not come back, and catches what would stop it."""

import time

from reference import compute_slot_mapping

__all__ = ["compute_slot_mapping"]


def decode_attention(q, k_cache, v_cache, *, context_lens, block_tables, scale):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue
