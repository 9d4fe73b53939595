"""The dispatch table: who was the fastest at attention, for each shape that `python -m benchmarks.dispatch --write` has timed on one GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).with_name("dispatch_table.json")
OWN = "own"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Heads(NamedTuple):
    """What has to be the same for a figure to say anything."""

    function: str  # "prefill_attention" or "decode_attention"
    dtype: str
    head_dim: int
    group_size: int
    pages: int  # least block size of its class; 0: no cache


class Shape(NamedTuple):
    """Of a batch: what is known without reading a length from the device."""

    num_sequences: int
    kv_heads: int
    num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int  # of a decode step: what the table's columns hold

    def distance(self, other: Shape, function: str) -> float:
        """In powers of two. The number of heads does not count in a prefill: some heads alone must go where all of them go."""
        apart = [abs(math.log2(max(a, 1)) - math.log2(max(b, 1))) for a, b in zip(self, other, strict=True)]
        return sum(apart) - (apart[1] if function == "prefill_attention" else 0.0)


class Entry(NamedTuple):
    """One line of the table."""

    heads: Heads
    shape: Shape
    us: Mapping[str, float]  # of everyone who was timed and keeps the claims

    @property
    def fastest(self) -> str:
        return min(self.us, key=lambda name: self.us[name])


class Table(NamedTuple):
    gpu: str  # empty: nothing has been timed
    written: str
    about: Mapping[str, str]  # driver, torch, triton
    libraries: Mapping[str, str]  # the FlashAttentions that were judged and timed, and their versions
    judged: Mapping[str, Mapping[str, str]]  # function -> path -> "keeps the claims", or what it breaks
    entries: tuple[Entry, ...]

    def fastest(self, heads: Heads, shape: Shape) -> str:
        """The name of whoever was the fastest at the nearest shape; the own kernel where nothing like it was timed."""
        alike = [entry for entry in self.entries if entry.heads == heads]
        return min(alike, key=lambda entry: entry.shape.distance(shape, heads.function)).fastest if alike else OWN


def read_table(path: Path = TABLE) -> Table:
    told = json.loads(path.read_text(encoding="utf-8"))
    entries = (Entry(Heads(**entry["heads"]), Shape(**entry["shape"]), entry["us"]) for entry in told["entries"])
    return Table(told["gpu"], told["written"], told["about"], told["libraries"], told["judged"], tuple(entries))


def write_table(table: Table, path: Path = TABLE) -> None:
    """An entry a line, so that a change of the table can be read."""
    entries = sorted(table.entries, key=lambda entry: entry[:2])
    lines = [json.dumps({"heads": heads._asdict(), "shape": shape._asdict(), "us": dict(us)}) for heads, shape, us in entries]
    head = json.dumps({**table._asdict(), "entries": None}, indent=1).removesuffix("null\n}")
    path.write_text(head + ("[\n  " + ",\n  ".join(lines) + "\n ]\n}\n" if lines else "[]\n}\n"), encoding="utf-8")


def page_class(block_size: int | None) -> int:
    """Small pages, middling ones and large ones behave alike among themselves."""
    return 0 if block_size is None else 1 if block_size < 64 else 64 if block_size < 256 else 256


def heads_of(function: str, q: torch.Tensor, k: torch.Tensor, block_size: int | None) -> Heads:
    return Heads(function, DTYPES.get(q.dtype, ""), q.shape[-1], q.shape[-2] // max(k.shape[-2], 1), page_class(block_size))


def prefill_shape(q: torch.Tensor, k: torch.Tensor, num_sequences: int, max_seqlen_q: int, max_seqlen_k: int) -> Shape:
    """Rounded to powers of two and the middles between them, so that steps of nearly the same size share a look-up."""
    return Shape(num_sequences, k.shape[-2], _rounded(len(q)), _rounded(max_seqlen_q), _rounded(max_seqlen_k))


def decode_shape(q: torch.Tensor, k_cache: torch.Tensor, block_tables: torch.Tensor) -> Shape:
    return Shape(len(q), k_cache.shape[2], len(q), 1, _rounded(block_tables.shape[1] * k_cache.shape[1]))


def _rounded(n: int) -> int:
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power
