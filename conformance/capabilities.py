"""What an implementation says of itself: the limits within which cases are drawn, and the claims that are judged when made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.clauses import CLAUSES

CLAIMS = ("deterministic", "batch_invariant", "cuda_graph", "nan_tail", "empty_zero", "spare_blocks", "checked")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
KEYS = (
    "dtypes", "head_dims", "group_sizes", "block_sizes", "max_context", "float32_products", "half_sums", "tail_nats", "reserved_blocks", "claims",
)  # fmt: skip
MOST_RESERVED = 64  # blocks: pools of lives hold a dozen more than are reserved


@dataclass(frozen=True)
class Capabilities:
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES.values())
    head_dims: tuple[int, ...] | None = None  # None: any
    group_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    max_context: int | None = None  # tokens
    float32_products: str = "ieee"  # or "tf32"
    half_sums: str = "float32"  # or "half": logits of half precision may be added up from parts that are rounded to half precision
    tail_nats: float = math.inf  # so deep under the top token, in nats, sample keeps 99 % of a tail's mass
    reserved_blocks: int = 0  # of a pool, that BlockManager keeps for itself and never hands out, vLLM's null block say
    claims: tuple[str, ...] = ()
    claimed_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the functions of a claim that is not made for all of them

    def claims_for(self, claim: str, function: str) -> bool:
        return claim in self.claims and function in self.claimed_for.get(claim, (function,))

    def allowed(self, kind: str, candidates: Iterable[int]) -> list[int]:
        """The candidates that the implementation states it takes; its own smallest values if it takes none of them."""
        stated = getattr(self, kind)
        candidates = list(candidates)
        if stated is None:
            return candidates
        return [value for value in candidates if value in stated] or sorted(stated)[:3]


def read_capabilities(stated: Mapping[str, Any]) -> Capabilities:
    """Raises ValueError with one sentence for a key, a claim or a dtype that is not known."""
    for key in stated:
        if key not in KEYS:
            raise ValueError(f"CAPABILITIES has the key {key!r}, known are {', '.join(KEYS)}")
    fields: dict[str, Any] = read_claims(stated.get("claims", ()))
    if "dtypes" in stated:
        fields["dtypes"] = tuple(read_dtype(dtype) for dtype in stated["dtypes"])
        if not fields["dtypes"]:
            raise ValueError("CAPABILITIES names no dtype that it takes")
    for key in ("head_dims", "group_sizes", "block_sizes"):
        if stated.get(key) is not None:
            fields[key] = tuple(int(value) for value in stated[key])
    if "head_dims" in fields:
        stated_dims = fields["head_dims"]
        fields["head_dims"] = tuple(dim for dim in stated_dims if dim >= 4)  # smaller ones cannot hold what the checks put into them
        if not fields["head_dims"]:
            raise ValueError(f"CAPABILITIES names the head dimensions {stated_dims}, the suite needs one of at least 4")
    if stated.get("max_context") is not None:
        fields["max_context"] = int(stated["max_context"])
    if "float32_products" in stated:
        if stated["float32_products"] not in ("ieee", "tf32"):
            raise ValueError(f"CAPABILITIES says float32_products {stated['float32_products']!r}, known are 'ieee' and 'tf32'")
        fields["float32_products"] = stated["float32_products"]
    if "half_sums" in stated:
        if stated["half_sums"] not in ("float32", "half"):
            raise ValueError(f"CAPABILITIES says half_sums {stated['half_sums']!r}, known are 'float32' and 'half'")
        fields["half_sums"] = stated["half_sums"]
    if stated.get("tail_nats") is not None:
        fields["tail_nats"] = float(stated["tail_nats"])
        if not fields["tail_nats"] >= 0:
            raise ValueError(f"CAPABILITIES says tail_nats {stated['tail_nats']!r}, it must be a number of nats, at least 0")
    if stated.get("reserved_blocks") is not None:
        reserved = stated["reserved_blocks"]
        if type(reserved) is not int or not 0 <= reserved <= MOST_RESERVED:
            raise ValueError(f"CAPABILITIES says reserved_blocks {reserved!r}, it must be a whole number of blocks from 0 to {MOST_RESERVED}")
        fields["reserved_blocks"] = reserved
    return Capabilities(**fields)


def read_claims(stated: Iterable[str] | Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """Names of claims, which are then made for every function; or a mapping that gives each claim the functions that it is made for."""
    claimed_for: dict[str, tuple[str, ...]] = {}
    for claim in stated:
        if claim not in CLAIMS:
            raise ValueError(f"CAPABILITIES claims {claim!r}, known are {', '.join(CLAIMS)}")
        if isinstance(stated, Mapping):
            judged = [name for clause in CLAUSES.values() if clause.claim == claim for name in clause.functions]
            claimed_for[claim] = tuple(stated[claim])
            for function in claimed_for[claim]:
                if function not in judged:
                    raise ValueError(f"CAPABILITIES claims {claim!r} of {function!r}, it is judged of {', '.join(judged)}")
    return {"claims": tuple(stated), "claimed_for": claimed_for}


def read_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]  # it is one of the values, all of them torch.dtype
    if dtype in DTYPES:
        return DTYPES[dtype]
    raise ValueError(f"CAPABILITIES names the dtype {dtype!r}, known are {', '.join(DTYPES)}")
