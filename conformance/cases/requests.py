"""Real requests: the first 1,000 of a public conversation trace, at their length or scaled down, their shared prefixes kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TRACE = Path(__file__).resolve().parent.parent / "data" / "conversation_1000.jsonl"
TOKENS_PER_HASH = 512


@dataclass(frozen=True)
class Request:
    """hash_ids[i] names the prompt's tokens up to the end of its i-th block, so that equal ids are equal prefixes."""

    hash_ids: tuple[int, ...]
    num_tokens: int  # of the prompt, scaled
    num_generated: int = 1  # tokens of the answer, scaled


def read_requests(tokens_per_block: int, limit: int = 1000, path: Path = TRACE) -> list[Request]:
    """The trace's requests, each 512-token block of a prompt scaled to `tokens_per_block` tokens; the last block stays partial."""
    requests = []
    with path.open() as lines:
        for line in lines:
            told = json.loads(line)
            num_tokens = max(1, round(told["input_length"] * tokens_per_block / TOKENS_PER_HASH))
            num_blocks = -(-num_tokens // tokens_per_block)
            num_generated = max(1, round(told["output_length"] * tokens_per_block / TOKENS_PER_HASH))
            requests.append(Request(tuple(told["hash_ids"][:num_blocks]), num_tokens, num_generated))
            if len(requests) == limit:
                break
    return requests
