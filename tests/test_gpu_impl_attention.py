"""gpu_impl's decode attention: how a batch is shared out must not be seen in what comes of it."""

import pytest
import torch

import reference
from gpu_impl import attention
from gpu_impl.attention_tiles import Tile
from gpu_impl.launch import INTERPRET

DEVICE = torch.device("cpu" if INTERPRET else "cuda")


def decode_batch(lengths, *, block_size=4, kv_heads=2, group_size=2, head_dim=16):
    generator = torch.Generator().manual_seed(len(lengths))
    columns = max(1, -(-max(lengths) // block_size))
    cache = torch.randn(2, columns + 3, block_size, kv_heads, head_dim, generator=generator)
    tables = torch.stack([torch.randperm(columns + 3, generator=generator)[:columns] for _ in lengths]).int()
    q = torch.randn(len(lengths), kv_heads * group_size, head_dim, generator=generator)
    lens = torch.tensor(lengths, dtype=torch.int32)
    arguments = dict(context_lens=lens.to(DEVICE), block_tables=tables.to(DEVICE), scale=0.25)
    expected = reference.decode_attention(q, *cache, context_lens=lens, block_tables=tables, scale=0.25)
    return (q.to(DEVICE), *cache.to(DEVICE)), arguments, expected


LENGTHS = [[1], [3, 0, 70, 5], [64] * 5, [129, 1, 127], [33, 95, 2, 0, 160]]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("num_programs", [3, 50])
def test_any_number_of_programs_gives_the_same(lengths, num_programs, monkeypatch):
    """More of them than there are tiles too: what those left in memory is not joined."""
    monkeypatch.setattr(attention, "decode_programs", lambda num_units, *_: min(num_units, num_programs))
    monkeypatch.setattr(attention, "decode_tile", lambda *_: Tile(16, 32, 4, 1))
    tensors, arguments, expected = decode_batch(lengths)
    torch.testing.assert_close(attention.decode_attention(*tensors, **arguments).cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_number_of_splits_gives_the_same(lengths, num_splits, monkeypatch):
    monkeypatch.setattr(attention, "decode_tile", lambda *_: Tile(16, 32, 4, 1))
    tensors, arguments, expected = decode_batch(lengths)
    out = attention.decode_attention(*tensors, **arguments, num_splits=num_splits)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
    for i in range(len(lengths)):  # bits of a row alone
        alone = {name: value[i : i + 1] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
        assert torch.equal(attention.decode_attention(tensors[0][i : i + 1], *tensors[1:], **alone, num_splits=num_splits), out[i : i + 1])


def test_a_batch_that_is_too_large_to_be_shared_out(monkeypatch):
    monkeypatch.setattr(attention, "MOST_SHARED", 3)
    tensors, arguments, expected = decode_batch([70, 0, 33, 1], kv_heads=1)
    torch.testing.assert_close(attention.decode_attention(*tensors, **arguments).cpu(), expected, atol=1e-5, rtol=1e-5)
