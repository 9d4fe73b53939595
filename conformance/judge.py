"""The judge of one test: draws cases, runs the check on each, counts refusals, shrinks what fails, and keeps the record."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from conformance.buffers import bits
from conformance.capabilities import Capabilities
from conformance.clauses import CLAUSES, Clause
from conformance.findings import OVERWRITTEN, Broken, Call, Record, Refused
from conformance.implementation import Implementation

EFFORTS = {"quick": 0.3, "default": 1.0, "thorough": 8.0}
# processor seconds after which a test draws no more cases, once it has had a quarter of them: what keeps slow kernels, an interpreter's say,
# within minutes. Processor time, so that a busy machine judges as many cases as an idle one
PATIENCE_SECONDS = {"quick": 0.2, "default": 2.0, "thorough": float("inf")}
PATIENCE_ON_A_GPU = 6.0  # times as long: compiling counts, and is done in the process that judges
MOST_EARLIER, MOST_EARLIER_BYTES = 4, 2**26  # results that are looked at again after later calls; the last one whatever its size
SHRINKING_SECONDS = 5.0  # after this long no smaller case is taken up
# the clause that says that a function leaves its inputs and its earlier results alone; no other function is held to that
UNCHANGED = {
    "prefill_attention": "PRE-9", "decode_attention": "DEC-9", "store_kvcache": "KV-2", "sample": "SAMPLE-9", "last_token_logits": "LOGIT-3",
    "parallel_logits": "LOGIT-3",
}  # fmt: skip
Case = TypeVar("Case")


class Judge:
    """Holds an implementation to one clause."""

    def __init__(self, implementation: Implementation, clause: Clause, function: str, *, effort: str = "default", seed: int = 0) -> None:
        self.implementation = implementation
        self.clause = clause
        self.function = function
        self.effort = effort
        self.seed = seed
        self.record = Record(clause.id, function)
        self._started = time.monotonic()
        self._last_call: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None  # for a replay
        self._earlier: deque[tuple[str, torch.Tensor, torch.Tensor]] = deque()  # function, a result of its last calls, the bits it had

    @property
    def device(self) -> torch.device:
        return self.implementation.device

    @property
    def capabilities(self) -> Capabilities:
        return self.implementation.capabilities

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def count(self, default: int) -> int:
        """How many cases to draw, given how many the default effort draws."""
        return max(3, round(default * EFFORTS[self.effort]))

    def for_all(
        self, cases: SearchStrategy[Case], check: Callable[[Case], None], *, examples: int, explicit: Iterable[Case] = (),
        patience: float = 1.0, at_least: int | None = None,
    ) -> None:  # fmt: skip
        """Hold `check` for `explicit` cases and for drawn ones. Raises Broken, with the smallest case that was found.

        patience: how many times as long as others this check may draw cases, for cases that are long themselves; at_least: how many cases a
        slow implementation gets even so (a quarter of them).
        """
        self.for_each(explicit, check)
        failing: dict[str, Broken] = {}
        unable: list[Exception] = []
        deadline = float("inf")
        least = max(2, round((at_least if at_least is not None else examples // 4) * EFFORTS[self.effort]))
        drawn, given_up = 0, time.process_time() + patience * PATIENCE_SECONDS[self.effort] * (PATIENCE_ON_A_GPU if self.is_cuda else 1.0)

        @settings(
            max_examples=self.count(examples),
            database=None,
            deadline=None,
            derandomize=False,
            print_blob=False,
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @seed(self._seed_of(check))
        @given(cases)
        def judged(case: Case) -> None:
            nonlocal deadline, drawn
            drawn += 1
            if drawn > least and not failing and time.process_time() > given_up:
                return
            key = repr(case)
            if key in failing:
                raise failing[key]
            if time.monotonic() > deadline:
                return  # too late for a smaller case: what failed keeps failing, what is new counts as holding
            try:
                self._run(check, case)
            except Broken as broken:
                broken.finding.drawn = True
                if not failing:
                    deadline = time.monotonic() + SHRINKING_SECONDS
                failing[key] = broken
                raise
            except Exception as error:  # the judge could not run, memory was short say: told as it is, however often it happens
                unable.append(error)
                raise

        try:
            judged()
        except Broken as broken:
            broken.finding.explained()
            raise broken from None
        except Flaky:  # it fails after some calls and not after others: what was recorded is what it did
            if not failing:
                raise unable[0] from None
            smallest = min(failing.values(), key=lambda broken: size_of(broken.finding.case))
            smallest.finding.explained()
            raise smallest from None

    def for_each(self, cases: Iterable[Case], check: Callable[[Case], None]) -> None:
        """Hold `check` for each of a fixed list of cases. Raises Broken on the first that breaks."""
        for case in cases:
            try:
                self._run(check, case)
            except Broken as broken:
                broken.finding.explained()
                raise

    def _run(self, check: Callable[[Case], None], case: Case) -> None:
        self.record.examples += 1
        try:
            check(case)
        except Refused as refusal:
            message = str(refusal)
            self.record.refusals[message] = self.record.refusals.get(message, 0) + 1
        except Broken as broken:
            broken.finding.case = case
            if broken.finding.call is None and self._last_call is not None:
                broken.finding.call = Call(*self._last_call)
            if not self.record.examples_to_failure:
                self.record.examples_to_failure = self.record.examples
                self.record.seconds_to_failure = time.monotonic() - self._started
            self.record.case_size = size_of(case)
            raise

    def _seed_of(self, check: Callable[..., Any]) -> int:
        name = getattr(getattr(check, "func", check), "__qualname__", "")
        return self.seed + zlib.crc32(f"{self.clause.id} {self.function} {name}".encode())

    # --- what checks call -------------------------------------------------------------------------------------------------------

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Call the implementation; afterwards its last few results must still be what they were."""
        self._last_call = function, args, kwargs
        result = self.implementation.call(function, *args, **kwargs)
        for earlier in list(self._earlier):
            earlier_function, tensor, earlier_bits = earlier
            if not torch.equal(bits(tensor), earlier_bits):
                self._earlier.clear()
                self.note_beside(unchanged_clause(earlier_function), OVERWRITTEN)
        watched = function in UNCHANGED and isinstance(result, torch.Tensor)  # what prepares a step may keep one buffer for all of them
        if watched and result.numel() > 0 and result.device.type == self.device.type:
            self._earlier.append((function, result, bits(result.contiguous()).clone().view(result.shape)))
            while len(self._earlier) > MOST_EARLIER or (len(self._earlier) > 1 and self._bytes_held() > MOST_EARLIER_BYTES):
                self._earlier.popleft()
        return result

    def last_call(self, want: torch.Tensor, limit: torch.Tensor | float) -> Call:
        """The call that was made last, with what it should have given."""
        assert self._last_call is not None
        return Call(*self._last_call, want, limit)

    def _bytes_held(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor, _ in self._earlier)

    def note_beside(self, clause: str, text: str) -> None:
        """A clause other than the one being judged is broken; judging goes on. Raised at once where it is the clause being judged."""
        if clause == self.clause.id:
            raise Broken(("found", text), likely="an output buffer is kept and handed out twice" if text == OVERWRITTEN else "")
        self.record.side_findings.setdefault(clause, text)

    def note_budget(self, dtype: torch.dtype, share: float) -> None:
        """Remember the largest error / budget of a dtype."""
        name = str(dtype).removeprefix("torch.")
        self.record.worst_budget[name] = max(self.record.worst_budget.get(name, 0.0), share)


def size_of(case: Any) -> int:
    """Tokens of a case: how small shrinking made it."""
    for part in case if isinstance(case, tuple) else (case,):
        if hasattr(part, "size"):
            return int(part.size())
    return 0


def unchanged_clause(function: str) -> str:
    """The clause that says that this function leaves its inputs and its earlier results alone."""
    return UNCHANGED[function]


__all__ = ["CLAUSES", "EFFORTS", "Judge", "unchanged_clause"]
