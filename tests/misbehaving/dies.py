"""store_kvcache ends its process, the way an address that is out of range does."""

import os
import signal

from reference import compute_slot_mapping

__all__ = ["compute_slot_mapping"]


def store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    os.kill(os.getpid(), signal.SIGSEGV)
