"""Implementations whose second rank does not do its part."""

import os
import signal
import time
from types import SimpleNamespace

import torch.distributed as dist

import gpu_impl


def parallel_logits_with(fault):
    def parallel_logits(hidden, weight_shard, cu_seqlens_q=None, *, group=None):
        if dist.get_rank() == 1:
            fault()
        return gpu_impl.parallel_logits(hidden, weight_shard, cu_seqlens_q, group=group)

    return SimpleNamespace(parallel_logits=parallel_logits)


def fail():
    raise RuntimeError("no workspace left")


killed = parallel_logits_with(lambda: os.kill(os.getpid(), signal.SIGKILL))
hanging = parallel_logits_with(lambda: time.sleep(1000))
failing = parallel_logits_with(fail)


def depends_on_the_heads_beside_it(q, k, v, **keywords):
    return gpu_impl.prefill_attention(q, k, v, **keywords) * (1 + 0.01 * k.shape[-2])


heads = SimpleNamespace(prefill_attention=depends_on_the_heads_beside_it)
