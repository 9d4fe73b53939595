"""The error budget of values: exact and honestly rounded outputs keep it, the four controls and lost score precision do not."""

from dataclasses import replace

import pytest
import torch
from planted import DTYPES, judge_of, random_case

from conformance.checks.attention_call import attend
from conformance.checks.values import QUERY_SCALES, budgeted, random_numbers, require_within
from conformance.findings import Broken

HALVES = (torch.bfloat16, torch.float16)
EACH = 12


class Scripted:
    """Gives back what it was told to, rounded to q's dtype."""

    def __init__(self, out):
        self.out = out

    def decode_attention(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
        return self.out.to(q.dtype)

    def prefill_attention(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables=None):
        return self.out.to(q.dtype)


def cases(dtype, decode):
    for seed in range(EACH):
        yield random_case(seed, decode=decode, dtype=dtype)[0]


def expected_of(case, numbers):
    return budgeted(judge_of(Scripted(None), "DEC-2"), case, numbers)


def check(judge, case, numbers):
    require_within(judge, case, attend(judge, case, numbers), budgeted(judge, case, numbers))


def share(case, numbers, out):
    """error / budget of this output, and whether the judge fails it."""
    judge = judge_of(Scripted(out), "DEC-2" if case.decode else "PRE-2", case.function)
    try:
        check(judge, case, numbers)
    except Broken:
        return judge.record.worst_budget[str(case.dtype).removeprefix("torch.")], True
    return judge.record.worst_budget[str(case.dtype).removeprefix("torch.")], False


def each_row(case, numbers, attention):
    """(T, Hq, D): attention(q (Hq, 1, D), keys (Hq, n, D), values (Hq, n, D)) of every row over its own visible positions."""
    out = torch.zeros(numbers.q.shape)
    for row, (sequence, visible) in enumerate(case.rows):
        slots = case.slots[sequence][:visible]
        keys, values = (t[slots].repeat_interleave(case.group_size, dim=1).transpose(0, 1) for t in (numbers.keys, numbers.values))
        out[row] = attention(numbers.q[row][:, None], keys, values)[:, 0].float()
    return out


def controls(case, exact, numbers):
    """Outputs that no attention gives, by name."""
    return {
        "zeros": torch.zeros_like(exact),
        "a constant": torch.full_like(exact, 0.1),
        "the mean of V": each_row(case, numbers, lambda q, keys, values: values.mean(dim=1, keepdim=True)),
        "the neighbour's row": exact.roll(1, dims=0),
    }


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_outputs_rounded_once_keep_the_budget(dtype, decode):
    for case in cases(dtype, decode):
        for query_scale in QUERY_SCALES:
            numbers = random_numbers(case, query_scale)
            worst, failed = share(case, numbers, expected_of(case, numbers).exact)
            assert worst <= 1 and not failed, (query_scale, worst, case)


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdpa_in_float32_keeps_the_budget(dtype, decode):
    for case in cases(dtype, decode):
        for query_scale in QUERY_SCALES:
            numbers = random_numbers(case, query_scale)
            out = each_row(case, numbers, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=case.scale))
            worst, failed = share(case, numbers, out)
            assert worst <= 1 and not failed, (query_scale, worst, case)


@pytest.mark.parametrize("control", ["zeros", "a constant", "the mean of V", "the neighbour's row"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_controls_fail(dtype, decode, control):
    for case in cases(dtype, decode):
        if control == "the neighbour's row" and len(case.rows) == 1:
            continue  # nobody is beside it
        for query_scale in QUERY_SCALES:
            numbers = random_numbers(case, query_scale)
            exact = expected_of(case, numbers).exact
            worst, failed = share(case, numbers, controls(case, exact, numbers)[control])
            assert failed and worst > 1, (query_scale, worst, case)


@pytest.mark.parametrize("query_scale", [4.0, 16.0])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_scores_kept_in_the_inputs_dtype_fail(dtype, query_scale):
    """Plain torch whose products, softmax and weights are all of the input's dtype: a batch of some hundred positions tells it."""
    for seed in range(EACH):
        case, *_ = random_case(seed, decode=True, dtype=dtype)
        case = replace(case, context_lens=(150, 200, 260), query_lens=(1, 1, 1), head_dim=64, num_kv_heads=2, group_size=2, scale=0.125)
        numbers = random_numbers(case, query_scale)

        def attention(q, keys, values):
            q, keys, values = (t.to(dtype) for t in (q, keys, values))
            return torch.softmax((q @ keys.transpose(1, 2)) * case.scale, dim=2) @ values

        worst, failed = share(case, numbers, each_row(case, numbers, attention))
        assert failed and worst > 1, (seed, worst)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_error_of_twice_the_budget_in_one_element_fails(dtype):
    """Anywhere, and NaN and infinities too: the comparison is element by element, not a mean."""
    for seed, case in enumerate(cases(dtype, True)):
        numbers = random_numbers(case, 1.0)
        expected = expected_of(case, numbers)
        place = tuple(int(torch.randint(size, (), generator=torch.Generator().manual_seed(seed))) for size in expected.exact.shape)
        for wrong in (expected.exact[place] + 2.5 * expected.limit[place], float("nan"), float("inf"), -float("inf")):
            out = expected.exact.clone()
            out[place] = wrong
            judge = judge_of(Scripted(out), "DEC-2")
            with pytest.raises(Broken) as caught:
                check(judge, case, numbers)
            assert dict(caught.value.finding.facts)["wrong"].startswith("1 of ")
            assert f"row {place[0]}, query head {place[1]} " in caught.value.finding.facts[0][0]
            assert caught.value.finding.facts[0][0].endswith(f"dimension {place[2]}")
