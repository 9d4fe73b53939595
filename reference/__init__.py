"""The specification of paged-KV inference kernels, as code that is read more than run: pure PyTorch, loops, explicit indices.

The functions, the records and the block manager exported here are the contract. An implementation is any module or object that offers some
of them under the same names. `BlockManager(num_blocks, block_size)` is a class, or any callable that returns an object with its methods
(`admit`, `schedule`, `computed`, `append`, `fork`, `free`, `table`); where none is offered, sequences live under the reference's.
This package imports torch alone, and nothing of what it judges.
"""

from reference.attention import decode_attention, prefill_attention
from reference.batches import prepare_decode, prepare_prefill
from reference.blocks import BlockManager
from reference.cache import allocate_kv_cache, layer_views, store_kvcache
from reference.logits import last_token_logits, parallel_logits
from reference.records import DecodeBatch, PrefillBatch, SequenceState
from reference.sampling import sample
from reference.slots import compute_slot_mapping

__all__ = [
    "BlockManager",
    "DecodeBatch",
    "PrefillBatch",
    "SequenceState",
    "allocate_kv_cache",
    "compute_slot_mapping",
    "decode_attention",
    "last_token_logits",
    "layer_views",
    "parallel_logits",
    "prefill_attention",
    "prepare_decode",
    "prepare_prefill",
    "sample",
    "store_kvcache",
]
