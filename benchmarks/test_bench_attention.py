"""prefill_attention and decode_attention over a paged cache. Bytes moved: q, the visible K and V once, and the output."""

from __future__ import annotations

import pytest

from benchmarks import trace
from benchmarks.attention_calls import Inputs, decode_inputs, prefill_inputs
from benchmarks.cases import (
    LLAMA_1B,
    PHI_2,
    AttentionCase,
    on_this_machine,
    real_attention,
    real_batch,
    small_attention,
    small_batch,
)
from benchmarks.contenders import Contender, pairs
from benchmarks.judge import unless_refused

EVEN_PREFILLS = ((4, 8192), (16, 2048), (64, 512))
EVEN_DECODES = ((1, 8192), (8, 32768), (64, 8192), (256, 2048))
# tokens of a prompt block of the trace that a CPU is handed in place of 512
SMALL_BLOCK = 2

PREFILL_CASES = on_this_machine(
    small_attention(q_len=19, cached=0, block_size=None),
    small_attention(q_len=19, cached=21, block_size=16),
    small_batch("trace-chunks-3", trace.prefilling(3, 8, SMALL_BLOCK)),
    small_batch("trace-mixed-1+2", trace.mixed(1, 8, 2, SMALL_BLOCK)),
    *(real_attention(b, n, 0, s) for b, n in EVEN_PREFILLS for s in (None, 16, 256)),
    real_attention(16, 512, 7680, 256),
    *(real_attention(16, 2048, 0, 256, model) for model in (LLAMA_1B, PHI_2)),
    *(real_batch("trace-chunks-16", trace.prefilling(16, 2048), s) for s in (16, 256)),
    *(real_batch("trace-mixed-4+60", trace.mixed(4, 2048, 60), s) for s in (16, 256)),
)
DECODE_CASES = on_this_machine(
    small_attention(q_len=1, cached=48, block_size=16),  # the newest token opens a block
    small_batch("trace-3", trace.decoding(3, SMALL_BLOCK)),
    *(real_attention(b, 1, n - 1, s) for b, n in EVEN_DECODES for s in (16, 256)),
    *(real_attention(64, 1, 8191, s, model) for model in (LLAMA_1B, PHI_2) for s in (16, 256)),
    *(real_batch("trace-64", trace.decoding(64), s) for s in (16, 256)),
)


@pytest.mark.parametrize("case, contender", pairs("prefill_attention", PREFILL_CASES))
def test_prefill_attention(case: AttentionCase, contender: Contender, timed):
    judge_and_time(prefill_inputs(case), contender, timed)


@pytest.mark.parametrize("case, contender", pairs("decode_attention", DECODE_CASES))
def test_decode_attention(case: AttentionCase, contender: Contender, timed):
    judge_and_time(decode_inputs(case), contender, timed)


def judge_and_time(inputs: Inputs, contender: Contender, timed) -> None:
    case = inputs.case
    inputs.judge(unless_refused(lambda: inputs.call(contender.functions)), contender.name)
    timed(
        inputs.calls(contender.functions),
        group=f"{inputs.function} {case.name}",
        contender=contender.name,
        bytes_moved=case.bytes_moved,
        flops=case.flops,
    )
