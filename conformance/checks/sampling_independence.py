"""sample: rows of one call, consecutive calls and seeds are independent (clauses SAMPLE-5, SAMPLE-6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from conformance.cases.equal_rows import EqualRows, FlatRows
from conformance.checks.distribution import independence, of_several
from conformance.checks.sampling import SamplingChecks
from conformance.findings import Broken

ROW_LAGS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
CALL_LAGS = (1, 2, 3)
APART = 8  # rows of one call that SAMPLE-6 looks at: so far from each other that what they share is SAMPLE-5's matter
SEEDS = (0, 1, 2, 12345, 2**31 - 1, 2**16)  # a seed of 16 bits takes the last for the first


class IndependenceChecks(SamplingChecks):
    def draw_calls(self, case: EqualRows, calls: int, first_seed: int | None = None) -> np.ndarray:
        """(calls, B)"""
        logits = torch.tensor(case.logits, dtype=case.dtype).expand(case.num_rows, -1)
        seeds = [None if first_seed is None else first_seed + call for call in range(calls)]
        return np.stack([self.draw(logits, 1.0, seed=seed).numpy() for seed in seeds])

    def require_independent(
        self, case: EqualRows, draw: Callable[[int], np.ndarray], pairs: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]],
        lags: tuple[int, ...], what: str,
    ) -> None:  # fmt: skip
        """`pairs(tokens, lag)` picks what is drawn `lag` apart; no lag may show a dependence."""
        tokens = np.zeros((0, 0), dtype=np.int64)
        p_values = np.ones(len(lags))

        def p_value(times: int) -> float:
            nonlocal tokens
            tokens = draw(times)
            p_values[:] = [independence(*pairs(tokens, lag), len(case.logits)) for lag in lags]
            return of_several(p_values)

        if self.rejected(p_value):
            worst = int(p_values.argmin())
            left, right = pairs(tokens, lags[worst])
            weights = np.bincount(left, minlength=len(case.logits)) / len(left)
            equal = f"{100 * (left == right).mean():.1f} % of {len(left)} pairs are equal, {100 * (weights**2).sum():.1f} % would be"
            likely = f"the same noise is used for {what} {lags[worst]} apart" if (left == right).mean() > 0.9 else "their noise overlaps"
            raise Broken((what, f"{lags[worst]} apart depend on each other (p = {p_values[worst]:.1e}): {equal}"), likely=likely)

    def rows_of_a_call(self, case: EqualRows) -> None:
        self.require_independent(
            case, lambda times: self.draw_calls(case, times * case.num_calls),
            lambda tokens, lag: (tokens[:, :-lag].ravel(), tokens[:, lag:].ravel()), ROW_LAGS, "rows",
        )  # fmt: skip

    def consecutive_calls(self, case: EqualRows) -> None:
        self.require_independent(case, lambda times: self.draw_calls(case, times * case.num_calls), pairs_of_calls, CALL_LAGS, "calls")

    def neighbouring_seeds(self, case: EqualRows) -> None:
        self.require_independent(
            case, lambda times: self.draw_calls(case, times * case.num_calls, 100_000 * self.judge.seed + 10_000 * times),
            pairs_of_calls, CALL_LAGS, "seeds",
        )  # fmt: skip

    def fresh_every_call(self, case: FlatRows) -> None:
        first, most = self.draw(case.logits, case.temperature).tolist(), 2 if case.num_rows > 8 else 8
        for _ in range(most - 1):
            if self.draw(case.logits, case.temperature).tolist() != first:
                return
        raise Broken(("calls", f"{most} in succession gave the same tokens: {first[:8]}"), likely="the noise is frozen")

    def seeds(self, case: FlatRows) -> None:
        """The same seed repeats, whatever is drawn in between; another does not; the default generator's draws stay fresh beside it."""
        keyword = self.takes_seed

        def draw(seed: int) -> list[int]:
            if not keyword:
                torch.manual_seed(seed)
            return self.draw(case.logits, case.temperature, seed=seed if keyword else None).tolist()

        how = "seed =" if keyword else "torch.manual_seed of"
        drawn: dict[int, list[int]] = {}
        for seed in SEEDS:
            drawn[seed] = draw(seed)
            other = next((earlier for earlier in drawn if earlier != seed and drawn[earlier] == drawn[seed]), None)
            if other is not None:
                same = f"{how} {seed} and {how} {other} gave the same {case.num_rows} tokens"
                raise Broken(("seeds", same), likely="the seed is not used")
        for seed in SEEDS:
            again = draw(seed)
            row = next((row for row, (a, b) in enumerate(zip(drawn[seed], again, strict=True)) if a != b), None)
            if row is not None:
                raise Broken(
                    ("seeds", f"{how} {seed} gave token {drawn[seed][row]} in row {row}, then {again[row]}"), likely="the seed is not used"
                )
        if keyword:
            beside = []
            for _ in range(2):
                draw(SEEDS[0])
                beside.append(self.draw(case.logits, case.temperature).tolist())
            if beside[0] == beside[1]:
                raise Broken(("calls", "without a seed repeat after a call with one"), likely="the seed is given to the default generator")


def pairs_of_calls(tokens: np.ndarray, lag: int) -> tuple[np.ndarray, np.ndarray]:
    return tokens[:-lag, ::APART].ravel(), tokens[lag:, ::APART].ravel()
