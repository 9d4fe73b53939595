"""Bit for bit: CLAIM-6, a call that is repeated; CLAIM-7, a row alone, in any batch and at any place in it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from conformance.buffers import bits
from conformance.cases.attention import AttentionCase
from conformance.cases.races import RaceCase
from conformance.checks.attention_call import attend, row_name
from conformance.checks.influence import rows_of_sequences, subset
from conformance.checks.values import random_numbers
from conformance.findings import Broken
from conformance.judge import Judge

REPEATS = {"quick": 3}  # 10 at any other effort
ROWS_OF_LOGITS = (5, 2, 17, 33, 64)
LOGITS_SHAPE = (96, 160)  # E, V


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a copy: a later call may use the memory again."""
    if not isinstance(tensor, torch.Tensor):
        raise Broken(("returned", f"a {type(tensor).__name__}, the contract says a tensor"))
    return bits(tensor.contiguous()).clone()


def require_repeats(judge: Judge, call: Callable[[], torch.Tensor], name: Callable[[int], str]) -> None:
    first = raw(call())
    for turn in range(1, REPEATS.get(judge.effort, 10)):
        again = raw(call())
        if not torch.equal(first, again):
            row = int((first != again).view(len(first), -1).any(1).nonzero()[0])
            count = int((first != again).sum())
            told = f"differs between the first call and repeat {turn} with the same arguments ({count} of {first.numel()} elements)"
            raise Broken((name(row), told), likely="the order of a sum depends on which program comes first, or on earlier calls")


def require_equal_bits(name: str, alone: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """alone, whole: the row's bits."""
    if not torch.equal(alone, whole):
        count = int((alone != whole).sum())
        raise Broken(
            (name, f"has other bits {what} ({count} of {alone.numel()} elements)"),
            likely="splits, tiles or the kernel itself are chosen by what else is in the batch",
        )


# --- attention --------------------------------------------------------------------------------------------------------------------------


def check_attention_repeats(judge: Judge, case: AttentionCase) -> None:
    numbers = random_numbers(case, query_scale=1.0)
    require_repeats(judge, lambda: attend(judge, case, numbers).result, lambda row: row_name(case, row))


def check_attention_alone(judge: Judge, case: AttentionCase) -> None:
    """Each sequence alone, the batch in reverse order, and a batch that is twice as large."""
    base = random_numbers(case, query_scale=1.0)
    whole = raw(attend(judge, case, base).result)
    parts = rows_of_sequences(case)
    count = len(parts)
    for order in ([i] for i in range(count)), [list(range(count))[::-1]], [[*range(count), *range(count)]]:
        for taken in order:
            variant, numbers = subset(case, base, taken)
            out = raw(attend(judge, variant, numbers).result)
            first = 0
            for i in taken:
                size = parts[i].stop - parts[i].start
                what = "alone" if len(taken) == 1 else f"in a batch of {len(taken)} than in one of {count}"
                require_equal_bits(f"sequence {i}", out[first : first + size], whole[parts[i]], what)
                first += size


# --- logits and sampling ----------------------------------------------------------------------------------------------------------------


def hidden_and_weight(judge: Judge, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn((rows, LOGITS_SHAPE[0]), generator=generator)
    weight = torch.randn((LOGITS_SHAPE[1], LOGITS_SHAPE[0]), generator=generator)
    return hidden.to(judge.device, dtype), weight.to(judge.device, dtype)


def check_logits_repeat(judge: Judge, case: tuple[int, torch.dtype]) -> None:
    hidden, weight = hidden_and_weight(judge, *case)
    require_repeats(judge, lambda: judge.call("last_token_logits", hidden, weight), lambda row: f"row {row} of {case[0]}")


def check_logits_alone(judge: Judge, case: tuple[int, torch.dtype]) -> None:
    hidden, weight = hidden_and_weight(judge, *case)
    whole = raw(judge.call("last_token_logits", hidden, weight))
    for rows in ([0], [len(hidden) // 2], [len(hidden) - 1], [*range(len(hidden))][::-1], [*range(len(hidden) // 2 + 1)]):
        out = raw(judge.call("last_token_logits", hidden[rows], weight))
        for place, row in enumerate(rows):
            require_equal_bits(f"row {row} of {len(hidden)}", out[place], whole[row], "alone" if len(rows) == 1 else f"as row {place} of {len(rows)}")


def check_sample_repeats(judge: Judge, case: RaceCase) -> None:
    """With the same noise where noise is taken, and with the same seed where a seed is."""
    logits, temperatures, noise = (t.to(judge.device) for t in (case.logits, case.row_temperatures, case.noises))
    for keyword, value in (("noise", noise), ("seed", case.seed)):
        if len(logits) and judge.implementation.takes("sample", keyword):
            call = functools.partial(judge.call, "sample", logits, temperatures, **{keyword: value})
            require_repeats(judge, call, lambda row: f"row {row}, the same {keyword}")


def check_sample_alone(judge: Judge, case: RaceCase) -> None:
    """A row with its own noise; without the keyword there is nothing to compare."""
    if not case.num_rows or not judge.implementation.takes("sample", "noise"):
        return
    logits, temperatures, noise = (t.to(judge.device) for t in (case.logits, case.row_temperatures, case.noises))
    whole = raw(judge.call("sample", logits, temperatures, noise=noise))
    for rows in ([0], [case.num_rows - 1], [*range(case.num_rows)][::-1]):
        out = raw(judge.call("sample", logits[rows], temperatures[rows], noise=noise[rows]))
        for place, row in enumerate(rows):
            require_equal_bits(f"row {row} of {case.num_rows}", out[place], whole[row], "alone" if len(rows) == 1 else "in reverse order")
