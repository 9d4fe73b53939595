"""The optimized path of the contract: Triton kernels, device-side batches, a fused sampler. Same names as `reference`.

Without a GPU the kernels run on the CPU through Triton's interpreter: TRITON_INTERPRET=1 is set here, before triton is imported, unless
it is set already. FlashAttention 2, 3 and 4 stand behind the same two attention functions in `gpu_impl.flash`. Attention goes through
`gpu_impl.fastest` to the fastest of them that a table names; `gpu_impl.attention` has the Triton kernels alone.
"""

import os
from collections.abc import Mapping

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gpu_impl.attention import HEAD_DIMS
from gpu_impl.batches import compute_slot_mapping, prepare_decode, prepare_prefill
from gpu_impl.fastest import decode_attention, prefill_attention
from gpu_impl.logits import last_token_logits, parallel_logits
from gpu_impl.sampling import sample
from gpu_impl.store import store_kvcache

CAPABILITIES: Mapping[str, object] = {
    "dtypes": (torch.float32, torch.float16, torch.bfloat16),
    "head_dims": HEAD_DIMS,
    "float32_products": "ieee",
    "claims": {
        # sums have a fixed order: no atomics, and splits are combined by one program
        "deterministic": ("prefill_attention", "decode_attention", "last_token_logits", "sample"),
        # the launches depend on shapes alone. Tiles and splits of attention and the library's product do depend on them, on the batch's
        # size too, so that batch_invariant is claimed of `sample` alone: with its own noise a row is the argmax of an order of p / noise
        "batch_invariant": ("sample",),
        "cuda_graph": ("store_kvcache", "decode_attention"),
        "nan_tail": ("prefill_attention", "decode_attention"),
        "empty_zero": ("prefill_attention", "decode_attention"),
        "spare_blocks": ("prepare_decode",),
    },
}

__all__ = [
    "CAPABILITIES",
    "compute_slot_mapping",
    "decode_attention",
    "last_token_logits",
    "parallel_logits",
    "prefill_attention",
    "prepare_decode",
    "prepare_prefill",
    "sample",
    "store_kvcache",
]
