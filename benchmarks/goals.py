"""How fast is fast enough: the goals as code, judged from the figures of one run.

A goal holds for each measured case that its patterns name. Ratios are rounded to two decimals before they are judged, which is what two runs
of the same kernel differ by; a peer of a paged case is the fastest at any page size.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple

from benchmarks.results import Results, Row

OURS, OWN_KERNEL = "gpu_impl", "gpu_impl, own kernel"
SEEDED = "gpu_impl, seed on device"  # as an engine that replays graphs calls it; torch's generator costs a graph one more launch
INDEX_PUT, TOKEN_LOOP = "torch", "python, a token at a time"
FLASH = "gpu_impl.flash:*"
BF16_8B, FP32_V = "-32/8x128-bf16", "-V151936-fp32"
SMALL = "*_attention *-4/2x64-*"  # those that a CPU runs too


class Goal(NamedTuple):
    text: str
    groups: tuple[str, ...]  # patterns of a function and its cases
    measure: str  # "us", "percent_of_roof", "tflop_per_s", "ratio" (our time over the peer's), "times_as_fast" (the peer's over ours)
    bound: float
    ours: str = OURS
    peers: str = ""  # a pattern of contenders: the fastest of them
    but: tuple[str, ...] = ()  # patterns of groups that are left out
    on_cpu: bool = False  # the work is the host's: a goal on every machine

    @property
    def at_most(self) -> bool:
        return self.measure in ("us", "ratio")


class Verdict(NamedTuple):
    goal: Goal
    group: str  # empty: no case of the goal was measured
    value: float | None  # None: not measured
    peer: str = ""

    @property
    def reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.goal.bound if self.goal.at_most else self.value >= self.goal.bound

    @property
    def told(self) -> str:
        """`reached, by 12 %`, `missed, by 3 %` or `not measured`."""
        if self.value is None:
            return "not measured"
        return f"{'reached' if self.reached else 'missed'}, by {abs(self.value / self.goal.bound - 1):.0%}"


STORE = "store_kvcache {}-S*-8x128-bf16*"  # in pages of 16 and 256, and scattered
GOALS = (
    Goal("store of 256 tokens takes at most 5 µs", (STORE.format(256),), "us", 5.0),
    Goal("store of 8,192 tokens reaches 90 % of a copy's bandwidth", (STORE.format(8192),), "percent_of_roof", 90.0),
    Goal("store of 65,536 tokens reaches 95 % of a copy's bandwidth", (STORE.format(65536),), "percent_of_roof", 95.0),
    Goal("store of 65,536 tokens is 4 times as fast as index_put", (STORE.format(65536),), "times_as_fast", 4.0, peers=INDEX_PUT),
    Goal("decode of (1, 8192) takes at most 20 µs", (f"decode_attention 1x8192-*{BF16_8B}",), "us", 20.0),
    Goal("decode of (1, 8192) is as fast as FlashAttention 2, 3 and 4", (f"decode_attention 1x8192-*{BF16_8B}",), "ratio", 1.0, peers=FLASH),
    Goal("decode is as fast as the fastest peer", ("decode_attention *",), "ratio", 1.0, peers=FLASH, but=("* 1x8192-*", "* trace-*")),
    Goal("decode, own kernel, is within 5 % of the fastest peer", ("decode_attention *",), "ratio", 1.05, OWN_KERNEL, FLASH, ("* trace-*",)),
    Goal("prefill is as fast as the fastest peer", ("prefill_attention *",), "ratio", 1.0, peers=FLASH, but=("* trace-*",)),
    Goal("prefill of 4 x 8,192, own kernel, does 450 TFLOP/s", (f"prefill_attention 4x8192-*{BF16_8B}",), "tflop_per_s", 450.0, OWN_KERNEL),
    Goal("batches of the real trace are as fast as the fastest peer's", ("*_attention trace-*",), "ratio", 1.0, peers=FLASH),
    Goal(
        "preparation is 50 times as fast as a loop over tokens",
        ("prepare_prefill 64x4096+*",), "times_as_fast", 50.0, peers=TOKEN_LOOP, on_cpu=True,
    ),
    Goal("sample, float32, of 256 rows, seed on the device, takes at most 45 µs", (f"sample 256{FP32_V}",), "us", 45.0, SEEDED),
    Goal("sample, bfloat16, of 256 rows, seed on the device, takes at most 25 µs", ("sample 256-V151936-bf16",), "us", 25.0, SEEDED),
    Goal("sample, float32, of 64 rows, seed on the device, takes at most 15 µs", (f"sample 64{FP32_V}",), "us", 15.0, SEEDED),
    Goal("sample, float32, of 1 row, seed on the device, takes at most 6 µs", (f"sample 1{FP32_V}",), "us", 6.0, SEEDED),
)  # fmt: skip


def verdicts(results: Results) -> list[Verdict]:
    """Of every goal that this machine can be asked for: one for each measured case, or one that says that there is none."""
    told = []
    for goal in GOALS:
        if not (results.on_gpu or goal.on_cpu):
            continue
        cases = [verdict_of(goal, group, results) for group in results.groups() if concerns(goal, group)]
        told += cases or [Verdict(goal, "", None)]
    return told


def concerns(goal: Goal, group: str) -> bool:
    return any(fnmatchcase(group, pattern) for pattern in goal.groups) and not any(fnmatchcase(group, pattern) for pattern in (SMALL, *goal.but))


def verdict_of(goal: Goal, group: str, results: Results) -> Verdict:
    ours = next((row for row in results.rows if row.group == group and row.contender == goal.ours), None)
    if ours is None:
        return Verdict(goal, group, None)
    if not goal.peers:
        return Verdict(goal, group, getattr(ours, goal.measure))
    peer = fastest_peer(goal, group, results)
    if peer is None:
        return Verdict(goal, group, None)
    ratio = ours.us / peer.us if goal.measure == "ratio" else peer.us / ours.us
    return Verdict(goal, group, round(ratio, 2), peer.contender + (f" in {peer.case}" if peer.group != group else ""))


def fastest_peer(goal: Goal, group: str, results: Results) -> Row | None:
    same = [row for row in results.rows if at_any_page_size(row.group) == at_any_page_size(group) and fnmatchcase(row.contender, goal.peers)]
    return min(same, key=lambda row: row.us, default=None)


def at_any_page_size(group: str) -> str:
    """An attention case without its page size; a store's slots are scattered alike at any."""
    return re.sub(r"-S\d+-", "-S*-", group) if "_attention " in group else group
