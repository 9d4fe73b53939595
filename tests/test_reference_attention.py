"""Attention of the reference: its two formulations, torch's and a numpy one held against each other (clauses PRE-*, DEC-*)."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from reference import decode_attention, prefill_attention
from reference.attention import attend_dense, attend_token_by_token, decode_attention_with_lse, prefill_attention_with_lse


def assert_close(actual, expected, what):
    """Two float64 formulations differ by rounding alone: scores of up to 1e5 are off by up to 1e-11, and so are weights."""
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def randn(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sdpa_with_mask(q, keys, values, scale):
    """torch's own, with the bottom-right mask spelled out; rows that see nothing are left out by the caller."""
    rows, visible = torch.arange(len(q))[:, None], torch.arange(len(keys))[None, :]
    mask = visible <= len(keys) - len(q) + rows
    group_size = q.shape[1] // keys.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1).transpose(0, 1)[None] for x in (keys, values))
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)


def numpy_attention(q, keys, values, scale):
    """A third opinion: all heads at once, the group as an axis of its own. Returns out, lse; no row may see nothing."""
    rows, heads, head_dim = q.shape
    grouped = q.numpy().reshape(rows, keys.shape[1], heads // keys.shape[1], head_dim)
    scores = scale * np.einsum("rkgd,nkd->rkgn", grouped, keys.numpy())
    hidden = np.triu(np.ones((rows, len(keys)), dtype=bool), k=len(keys) - rows + 1)
    scores[np.broadcast_to(hidden[:, None, None], scores.shape)] = -np.inf
    lse = logsumexp(scores, axis=-1)
    out = np.einsum("rkgn,nkd->rkgd", np.exp(scores - lse[..., None]), values.numpy())
    return out.reshape(q.shape), lse.reshape(rows, heads)


@st.composite
def sequences(draw, min_len=0):
    """One sequence: q (rows, Hq, D), keys, values (n, Hk, D), scale. Queries may outnumber keys; either may be missing."""
    kv_heads, group_size, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 5])), draw(st.integers(1, 9))
    rows, length = draw(st.integers(min_len, 5), label="q_len"), draw(st.integers(min_len, 9), label="k_len")
    q = randn(rows, kv_heads * group_size, head_dim, seed=draw(st.integers(0, 2**31)))
    keys, values = randn(2, length, kv_heads, head_dim, seed=draw(st.integers(0, 2**31)))
    return draw(st.sampled_from([1.0, 4.0, 1000.0])) * q, keys, values, head_dim**-0.5


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_token_by_token_dense_and_torch_agree(case):
    q, keys, values, scale = case
    out, lse = attend_token_by_token(q, keys, values, scale)
    assert out.dtype == lse.dtype == torch.float64
    dense_out, dense_lse = attend_dense(q, keys, values, scale)
    assert_close(out, dense_out, "out, token by token and dense")
    assert_close(lse, dense_lse, "log-sum-exp, token by token and dense")
    blind = max(0, len(q) - len(keys))
    assert torch.all(out[:blind] == 0) and torch.all(lse[:blind] == -math.inf)
    if blind < len(q):
        assert_close(out[blind:], sdpa_with_mask(q, keys, values, scale)[blind:], "token by token and scaled_dot_product_attention")
        numpy_out, numpy_lse = numpy_attention(q[blind:], keys, values, scale)
        assert_close(out[blind:], numpy_out, "out, token by token and numpy")
        assert_close(lse[blind:], numpy_lse, "log-sum-exp, token by token and numpy")


def test_by_hand_uniform_weights_show_what_is_visible():
    """q = 0 weighs all visible keys alike: the mean of positions 0 ... p is p / 2, and exp(lse) counts them. 2 rows over 5 keys."""
    values = torch.arange(5.0, dtype=torch.float64).reshape(5, 1, 1)
    out, lse = attend_token_by_token(torch.zeros(2, 1, 1), torch.ones(5, 1, 1), values, 1.0)
    assert_close(out.flatten(), [1.5, 2.0], "means")
    assert_close(lse.flatten().exp(), [4.0, 5.0], "counts")


def test_by_hand_heads_of_a_group_read_one_kv_head():
    """Hq = 6, Hk = 2: heads 0, 1, 2 read kv head 0; 3, 4, 5 read kv head 1. Keys differ too: a score of 0 or log 3 for position 1."""
    q, keys = torch.ones(1, 6, 1), torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)[..., None]
    values = torch.tensor([[0.0, 0.0], [1.0, 4.0]])[..., None]
    out, lse = attend_token_by_token(q, keys, values, 1.0)
    assert_close(out.flatten(), [0.5, 0.5, 0.5, 1.0, 1.0, 1.0], "weights 1/2, 1/2 and 3/4, 1/4")
    assert_close(lse.flatten().exp(), [2.0, 2.0, 2.0, 4.0, 4.0, 4.0], "denominators")


@pytest.mark.parametrize("formulation", [attend_token_by_token, attend_dense])
def test_huge_scores_neither_overflow_nor_lose_the_difference(formulation):
    q, keys = torch.tensor([[[1e6]]]), torch.tensor([1.0, 1.0, -1.0]).reshape(3, 1, 1)
    out, lse = formulation(q, keys, torch.tensor([2.0, 4.0, 99.0]).reshape(3, 1, 1), 1.0)
    assert_close(out.flatten(), [3.0], "out")
    assert_close(lse.flatten(), [1e6 + math.log(2)], "log-sum-exp")


def causal_case(seed=5):
    """3 rows over 6 positions, two heads a kv head: row r sees positions 0 ... 3 + r."""
    return randn(3, 4, 5, seed=seed), *randn(2, 6, 2, 5, seed=seed + 1)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["K", "V", "K and V"])
@pytest.mark.parametrize("formulation", [attend_token_by_token, attend_dense])
def test_a_hidden_position_leaks_nothing_and_a_visible_one_is_not_hushed(formulation, where, value, position):
    q, keys, values = causal_case()
    clean_out, clean_lse = formulation(q, keys, values, 0.5)
    for tensor in [keys] * ("K" in where) + [values] * ("V" in where):
        tensor[position, 1] = value
    out, lse = formulation(q, keys, values, 0.5)
    sees_it = torch.arange(3) + 3 >= position
    assert_close(out[~sees_it], clean_out[~sees_it], "rows that do not see it")
    assert_close(lse[~sees_it], clean_lse[~sees_it], "log-sum-exp of rows that do not see it")
    assert_close(out[:, :2], clean_out[:, :2], "heads of the other kv head")
    if math.isnan(value):
        assert torch.isnan(out[sees_it, 2:]).all(), "a row that sees a NaN is NaN"
        assert ("K" in where) == bool(torch.isnan(lse[sees_it, 2:]).all())
    elif where == "V":
        assert torch.all(out[sees_it, 2:] == value), "every weight is above 0"


@pytest.mark.parametrize("key", [[math.inf, 1.0], [-math.inf, 1.0], [math.nan, 1.0], [1.0, -math.inf]], ids=str)
def test_the_formulations_agree_on_what_is_not_finite(key):
    """Scores of +inf, -inf and NaN, and no other score than -inf: the same rows are NaN in both, by the same rule as softmax."""
    q, values = torch.ones(2, 1, 2), torch.tensor([2.0, 4.0]).reshape(2, 1, 1).expand(2, 1, 2)
    keys = torch.tensor([key, [0.0, 0.0]]).reshape(2, 1, 2)
    for q_rows in (q, -q):
        out, _ = attend_token_by_token(q_rows, keys, values, 1.0)
        dense_out, _ = attend_dense(q_rows, keys, values, 1.0)
        assert torch.equal(out.isnan(), dense_out.isnan())
        assert torch.equal(out.nan_to_num(99.0), dense_out.nan_to_num(99.0))
        assert torch.isnan(out[0]).all()


@pytest.mark.parametrize("formulation", [attend_token_by_token, attend_dense])
def test_strides_change_nothing(formulation):
    q, keys, values = causal_case()
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, keys, values)]
    for result, expected in zip(formulation(*strided, 0.5), formulation(q, keys, values, 0.5), strict=True):
        # not bit for bit: the library's float64 product of strided matrices may add in another order
        torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14)


@st.composite
def batches(draw):
    """Ragged sequences, end to end, with their keys and values scattered over the blocks of a poisoned cache as well."""
    kv_heads, group_size = draw(st.integers(1, 3), label="Hk"), draw(st.integers(1, 3), label="G")
    head_dim, block_size = draw(st.integers(1, 5), label="D"), draw(st.integers(1, 5), label="S")
    k_lens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4), label="k_lens")
    q_lens = [draw(st.integers(0, n + 1), label="q_len") for n in k_lens]
    cu_q, cu_k = (torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32) for lens in (q_lens, k_lens))
    seed = draw(st.integers(0, 2**31), label="seed")
    q = randn(sum(q_lens), kv_heads * group_size, head_dim, seed=seed)
    k, v = randn(2, sum(k_lens), kv_heads, head_dim, seed=seed + 1)
    needed = [-(-n // block_size) for n in k_lens]
    num_blocks = sum(needed) + 2
    pool = draw(st.permutations(range(num_blocks)), label="pool")
    block_tables = np.full((len(k_lens), max(needed) + 1), draw(st.sampled_from([-1, 10**6])))
    caches = np.full((2, num_blocks * block_size, kv_heads, head_dim), np.nan)
    for i, n in enumerate(needed):
        block_tables[i, :n] = [pool.pop() for _ in range(n)]
        slots = (block_tables[i, :n, None] * block_size + np.arange(block_size)).reshape(-1)[: k_lens[i]]
        caches[0, slots], caches[1, slots] = k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]]
    k_cache, v_cache = torch.from_numpy(caches).reshape(2, num_blocks, block_size, kv_heads, head_dim)
    lengths = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max(q_lens), max_seqlen_k=max(k_lens), scale=0.5)
    return q, k, v, k_cache, v_cache, torch.from_numpy(block_tables), lengths


@settings(max_examples=40, deadline=None)
@given(batches())
def test_paged_is_contiguous_and_each_sequence_is_alone(case):
    q, k, v, k_cache, v_cache, block_tables, lengths = case
    out, lse = prefill_attention_with_lse(q, k, v, **lengths)
    paged_out, paged_lse = prefill_attention_with_lse(q, k_cache, v_cache, block_tables=block_tables, **lengths)
    assert torch.equal(out, paged_out) and torch.equal(lse, paged_lse)
    cu_q, cu_k = lengths["cu_seqlens_q"].tolist(), lengths["cu_seqlens_k"].tolist()
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone_out, alone_lse = attend_dense(q[rows], k[keys], v[keys], lengths["scale"])
        assert_close(out[rows], alone_out, f"sequence {i}")
        assert_close(lse[rows], alone_lse, f"log-sum-exp of sequence {i}")


@settings(max_examples=40, deadline=None)
@given(batches())
def test_decode_is_the_last_row_of_the_prefill(case):
    """Of every sequence that has a query and a key; of the others, q is 0 rows long in prefill and context 0 here."""
    q, k, v, k_cache, v_cache, block_tables, lengths = case
    prefilled, prefilled_lse = prefill_attention_with_lse(q, k, v, **lengths)
    q_lens, ends = lengths["cu_seqlens_q"].diff(), lengths["cu_seqlens_q"][1:]
    context_lens = torch.where(q_lens > 0, lengths["cu_seqlens_k"].diff(), 0)
    last_rows = torch.stack([q[end - 1] if n > 0 else torch.ones(q.shape[1:], dtype=q.dtype) for n, end in zip(q_lens, ends, strict=True)])
    out, lse = decode_attention_with_lse(last_rows, k_cache, v_cache, context_lens=context_lens, block_tables=block_tables, scale=0.5)
    for i, length in enumerate(context_lens.tolist()):
        if length == 0:
            assert torch.all(out[i] == 0) and torch.all(lse[i] == -math.inf)
        else:
            assert_close(out[i], prefilled[ends[i] - 1], f"sequence {i}")
            assert_close(lse[i], prefilled_lse[ends[i] - 1], f"log-sum-exp of sequence {i}")


@settings(max_examples=30, deadline=None)
@given(sequences(min_len=1), st.sets(st.integers(1, 8)))
def test_chunked_is_one_pass(case, cuts):
    _, keys, values, scale = case
    length, q = len(keys), randn(len(keys), 2 * keys.shape[1], keys.shape[2], seed=3)
    whole, whole_lse = attend_dense(q, keys, values, scale)
    edges = [0, *sorted(c for c in cuts if c < length), length]
    for start, end in itertools.pairwise(edges):
        sums = dict(cu_seqlens_q=torch.tensor([0, end - start]), cu_seqlens_k=torch.tensor([0, end]))
        out, lse = prefill_attention_with_lse(
            q[start:end], keys[:end], values[:end], max_seqlen_q=end - start, max_seqlen_k=end, scale=scale, **sums
        )
        assert_close(out, whole[start:end], f"chunk [{start}, {end})")
        assert_close(lse, whole_lse[start:end], f"log-sum-exp of chunk [{start}, {end})")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_result_is_the_float64_result_rounded_once(dtype):
    q, k, v = (randn(4, heads, 8, seed=heads).to(dtype) for heads in (6, 2, 3))
    v = v[:, :2]
    sums = torch.tensor([0, 4])
    out = prefill_attention(q, k, v, cu_seqlens_q=sums, cu_seqlens_k=sums, max_seqlen_q=4, max_seqlen_k=4, scale=0.3)
    assert out.dtype == dtype and torch.equal(out, torch.from_numpy(numpy_attention(q.double(), k.double(), v.double(), 0.3)[0]).to(dtype))
    decoded = decode_attention(q[3:], k[None], v[None], context_lens=torch.tensor([4]), block_tables=torch.tensor([[0]]), scale=0.3)
    assert decoded.dtype == dtype and torch.equal(decoded, out[3:])


@pytest.mark.parametrize("fault", ["top-left", "scale twice", "head h + 1"])
def test_the_comparison_tells_a_fault(fault):
    """Negative control: a token-by-token walk with one fault is not the dense form."""
    q, keys, values = randn(2, 4, 3, seed=1), *randn(2, 5, 2, 3, seed=2)
    faulty = {
        "top-left": lambda q, k, v, scale: attend_token_by_token(q, k[:2], v[:2], scale),
        "scale twice": lambda q, k, v, scale: attend_token_by_token(q, k, v, scale * scale),
        "head h + 1": lambda q, k, v, scale: attend_token_by_token(q, k, v.roll(1, dims=1), scale),
    }[fault]
    with pytest.raises(AssertionError):
        assert_close(faulty(q, keys, values, 0.5)[0], attend_dense(q, keys, values, 0.5)[0], fault)
