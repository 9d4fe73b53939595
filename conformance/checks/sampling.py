"""sample: its distribution, its races with given noise, its independence, its corners (clauses SAMPLE-1...7, SAMPLE-9).

Every check draws through `draw`, which also holds what all calls must hold: int64 ids in [0, V) are SAMPLE-7's, unchanged inputs SAMPLE-9's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import torch

from conformance.buffers import Buffers
from conformance.cases.sampling import (
    TEMPERATURES,
    ClearMaximum,
    CornerRows,
    EqualRows,
    FlatRows,
    Law,
    RaceCase,
    RowTemperatures,
)
from conformance.checks.distribution import STAGE_ONE, fitted_temperature, independence, looks_like, of_several, pearson, rejected
from conformance.checks.race import best, may_win
from conformance.findings import Broken
from conformance.judge import Case, Judge

ROW_LAGS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
CALL_LAGS = (1, 2, 3)
APART = 8  # rows of one call that SAMPLE-6 looks at: so far from each other that what they share is SAMPLE-5's matter
SEEDS = (0, 1, 2, 12345, 2**31 - 1)


class SamplingChecks:
    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.takes_noise = judge.implementation.takes("sample", "noise")
        self.takes_seed = judge.implementation.takes("sample", "seed")
        torch.manual_seed(judge.seed + zlib.crc32(judge.clause.id.encode()))  # what is sampled without a seed repeats with the suite's

    def for_each(self, cases: Iterable[Case], check: Callable[[Case], None]) -> None:
        for case in cases:
            self.judge._run(check, case)

    # --- one call -----------------------------------------------------------------------------------------------------------------

    def draw(
        self, logits: torch.Tensor, temperatures: torch.Tensor | float, *, noise: torch.Tensor | None = None, seed: int | None = None,
        layout: str = "plain", temperature_layout: str = "plain",
    ) -> torch.Tensor:  # fmt: skip
        """(B,) int64 on the CPU: what the implementation draws, from guarded copies of the tensors."""
        judge = self.judge
        if not isinstance(temperatures, torch.Tensor):
            temperatures = torch.full((len(logits),), temperatures, dtype=torch.float32)
        buffers = Buffers(judge.device)
        handed = put(buffers, "logits", logits, layout), buffers.put("temperatures", temperatures, temperature_layout)
        keywords = {} if seed is None else {"seed": seed}
        if noise is not None:
            keywords["noise"] = put(buffers, "noise", noise, layout)
        buffers.freeze()
        tokens = judge.call("sample", *handed, **keywords)
        changed = buffers.changed()
        if changed:
            judge.note_beside("SAMPLE-9", f"sample wrote into its inputs: {changed}")
        rows, vocab_size = logits.shape
        if not isinstance(tokens, torch.Tensor) or tuple(tokens.shape) != (rows,):
            told = tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise Broken(("tokens", f"have shape {told}, they must be a tensor of shape ({rows},)"), clause="SAMPLE-7")
        if tokens.dtype != torch.int64:
            judge.note_beside("SAMPLE-7", f"tokens are {dtype_of(tokens)}, they must be int64")
        tokens = tokens.cpu().long()
        outside = ((tokens < 0) | (tokens >= vocab_size)).nonzero().flatten().tolist()
        if outside:
            judge.note_beside("SAMPLE-7", f"row {outside[0]} of {rows} gave token {int(tokens[outside[0]])}, ids lie in [0, {vocab_size})")
            tokens = tokens.clamp(0, vocab_size - 1)
        return tokens

    # --- SAMPLE-1, 2, 3: distributions --------------------------------------------------------------------------------------------

    def law(self, law: Law) -> None:
        counts = np.zeros(law.vocab_size)

        def p_value(times: int) -> float:
            counts[:] = 0
            for rows in law.batches(times):
                tokens = self.draw(law.logits.expand(rows, -1), law.temperature)
                counts[:] += np.bincount(tokens.numpy(), minlength=law.vocab_size)
            return pearson(counts, law.probabilities.numpy())

        if rejected(p_value):
            told = looks_like(counts, law.logits.double().numpy(), law.temperature)
            raise Broken(
                ("tokens", f"are not distributed as softmax(logits / T): {told}"),
                ("chi-squared", f"p = {pearson(counts, law.probabilities.numpy()):.1e} on {counts.sum():.0f} fresh draws, after a rejection"),
                likely=told,
            )

    def row_temperatures(self, case: RowTemperatures) -> None:
        law, kinds = case.law, len(TEMPERATURES)
        counts = np.zeros((kinds, law.vocab_size))
        p_values = np.ones(kinds)

        def p_value(times: int) -> float:
            counts[:] = 0
            for rows in case.batches(times):
                logits, temperatures = case.rows(rows)
                tokens = self.draw(logits, temperatures, temperature_layout=case.layout).numpy()
                for kind in range(kinds):
                    counts[kind] += np.bincount(tokens[kind::kinds], minlength=law.vocab_size)
            p_values[:] = [pearson(row, law.probabilities.numpy()) for row in counts]
            return of_several(p_values)

        if rejected(p_value):
            logits = law.logits.double().numpy()
            fits = [fitted_temperature(row, logits) * t for row, t in zip(counts, TEMPERATURES, strict=True)]
            told = {
                kind: looks_like(counts[kind], logits * TEMPERATURES[kind], TEMPERATURES[kind])
                for kind in range(kinds)
                if of_several(np.repeat(p_values[kind], kinds)) < STAGE_ONE
            }
            if len(set(told.values())) == 1:
                text = next(iter(told.values()))
                asked = ", ".join(f"{TEMPERATURES[kind]:g}" for kind in told)
                raise Broken(("tokens", f"are not distributed as softmax(logits / T) in rows of T = {asked}: {text}"), likely=text)
            facts = [(f"rows of T = {TEMPERATURES[kind]:g}", f"{text} (p = {p_values[kind]:.1e})") for kind, text in told.items()]
            raise Broken(*facts, likely=whose_temperature(fits))

    def race(self, case: RaceCase) -> None:
        """The winner of a race with given noise is a token that may win it."""
        tokens = self.draw(case.logits, case.row_temperatures, noise=case.noises, layout=case.layout)
        self.require_winners(tokens, case.logits, case.row_temperatures, case.noises)

    def require_winners(
        self, tokens: torch.Tensor, logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor,
        rows: torch.Tensor | None = None, clause: str = "",
    ) -> None:  # fmt: skip
        """For every row, or for those of the mask `rows`. A wrong winner is the finding of `clause`, of the judge's own unless one is given."""
        if not len(tokens):
            return
        good = may_win(logits, temperatures, noise)[torch.arange(len(tokens)), tokens]
        wrong = (~good if rows is None else ~good & rows).nonzero().flatten().tolist()
        if not wrong:
            return
        row = wrong[0]
        token, temperature = int(tokens[row]), float(temperatures[row])
        winner, log_ratio = best(logits[row], temperature, noise[row])
        facts = []
        for name, v in (("drawn", token), ("must win", winner)):
            numbers = f"logit {float(logits[row, v]):.9g}, noise {float(noise[row, v]):.9g}, log(p / noise) {float(log_ratio[v]):.9g}"
            facts.append((f"{name} in row {row}", f"token {v}: {numbers}"))
        facts.append(("rows", f"{len(wrong)} of {len(tokens)} have a wrong winner"))
        if clause and clause != self.judge.clause.id:
            self.judge.note_beside(clause, f"{facts[0][1]} was drawn with given noise, {facts[1][1]} must win")
            return
        raise Broken(*facts, likely=likely_of_race(logits[row], noise[row], token, winner))

    # --- SAMPLE-5, 6: independence ------------------------------------------------------------------------------------------------

    def draw_calls(self, case: EqualRows, calls: int, first_seed: int | None = None) -> np.ndarray:
        """(calls, B)"""
        logits = torch.tensor(case.logits).expand(case.num_rows, -1)
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

        if rejected(p_value):
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
        self.require_independent(
            case, lambda times: self.draw_calls(case, times * case.num_calls), pairs_of_calls, CALL_LAGS, "calls"
        )

    def neighbouring_seeds(self, case: EqualRows) -> None:
        self.require_independent(
            case, lambda times: self.draw_calls(case, times * case.num_calls, 100_000 * self.judge.seed + 10_000 * times),
            pairs_of_calls, CALL_LAGS, "seeds",
        )  # fmt: skip

    def fresh_every_call(self, case: FlatRows) -> None:
        calls = [self.draw(flat(case), case.temperature).tolist() for _ in range(2 if case.num_rows > 8 else 8)]
        if all(tokens == calls[0] for tokens in calls):
            raise Broken(("calls", f"{len(calls)} in succession gave the same tokens: {calls[0][:8]}"), likely="the noise is frozen")

    def seeds(self, case: FlatRows) -> None:
        """The same seed repeats, whatever is drawn in between; another does not; the default generator's draws stay fresh beside it."""
        keyword = self.takes_seed

        def draw(seed: int) -> list[int]:
            if not keyword:
                torch.manual_seed(seed)
            return self.draw(flat(case), case.temperature, seed=seed if keyword else None).tolist()

        how = "seed =" if keyword else "torch.manual_seed of"
        drawn: dict[int, list[int]] = {}
        for seed in SEEDS:
            drawn[seed] = draw(seed)
            other = next((earlier for earlier in drawn if earlier != seed and drawn[earlier] == drawn[seed]), None)
            if other is not None:
                raise Broken(("seeds", f"{how} {seed} and {how} {other} gave the same {case.num_rows} tokens"), likely="the seed is not used")
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
                beside.append(self.draw(flat(case), case.temperature).tolist())
            if beside[0] == beside[1]:
                raise Broken(("calls", "without a seed repeat after a call with one"), likely="the seed is given to the default generator")

    # --- SAMPLE-7, 9: corners -----------------------------------------------------------------------------------------------------

    def corner(self, case: CornerRows) -> None:
        """Only allowed tokens are drawn, with fresh noise and with given noise that tempts to the forbidden ones."""
        tokens = self.draw(case.logits, case.temperature)
        self.require_allowed(case, tokens, "with fresh noise")
        if not self.takes_noise:
            return
        noise = torch.empty(case.logits.shape).exponential_(generator=torch.Generator().manual_seed(case.seed)).clamp_min(1e-6)
        tempting = torch.tensor([0.0, -0.0, math.inf, 1e-30])[torch.arange(case.vocab_size) % 4].expand_as(noise)
        noise = torch.where(case.allowed, noise, tempting)
        temperatures = torch.full((case.num_rows,), case.temperature)
        tokens = self.draw(case.logits, temperatures, noise=noise)
        self.require_allowed(case, tokens, "with given noise of 0, -0.0, inf and 1e-30 at the forbidden tokens")
        logits = torch.where(case.good_rows[:, None], case.logits, 0.0)
        self.require_winners(tokens, logits, temperatures, noise, case.good_rows, "SAMPLE-7" if case.dead else "SAMPLE-4")

    def require_allowed(self, case: CornerRows, tokens: torch.Tensor, how: str) -> None:
        drawn = case.allowed[torch.arange(len(tokens)), tokens] | ~case.good_rows
        wrong = (~drawn).nonzero().flatten().tolist()
        if wrong:
            row = wrong[0]
            allowed = case.allowed[row].nonzero().flatten().tolist()
            raise Broken(
                ("drawn", f"row {row} gave token {int(tokens[row])}, whose logit is -inf, {how}"),
                ("allowed", f"{allowed[:8]}{' ...' if len(allowed) > 8 else ''} in row {row}"),
                ("rows", f"{len(wrong)} of {len(tokens)} gave a forbidden token"),
                likely=f"a row that is {case.dead} throughout spreads to its neighbours" if case.dead else "-inf is replaced by a finite number, "
                "or 0 / 0 and -inf - -inf are not kept out",
            )  # fmt: skip

    def clear_maximum(self, case: ClearMaximum) -> None:
        tokens = self.draw(case.logits, case.temperature)
        wrong = (tokens != case.winners).nonzero().flatten().tolist()
        if wrong:
            row = wrong[0]
            raise Broken(
                ("drawn", f"row {row} gave token {int(tokens[row])}, the largest logit is token {int(case.winners[row])}"),
                ("rows", f"{len(wrong)} of {len(tokens)} are wrong"),
                likely="a small T is raised, or logits / T overflows",
            )

    def unchanged(self, case: FlatRows) -> None:
        """`draw` compares every byte, and `judge.call` the result of the call before."""
        noise = torch.ones((case.num_rows, case.vocab_size)) if self.takes_noise else None
        for given in (None, noise):
            self.draw(flat(case), case.temperature, noise=given, layout=case.layout)
        self.draw(flat(case), case.temperature, layout=case.layout)


def put(buffers: Buffers, name: str, values: torch.Tensor, layout: str) -> torch.Tensor:
    return buffers.put(name, values.t()).t() if layout == "transposed" else buffers.put(name, values, layout)


def flat(case: FlatRows) -> torch.Tensor:
    return torch.full((case.num_rows, case.vocab_size), 1.0, dtype=case.dtype)


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def pairs_of_calls(tokens: np.ndarray, lag: int) -> tuple[np.ndarray, np.ndarray]:
    return tokens[:-lag, ::APART].ravel(), tokens[lag:, ::APART].ravel()


def whose_temperature(fits: list[float]) -> str:
    """What the temperatures that fit best have to do with those that were asked for."""
    kinds = len(TEMPERATURES)
    asked = np.array(TEMPERATURES)
    for shift, whose in ((1, "the next row"), (-1, "the row before")):
        if np.allclose(fits, np.roll(asked, -shift), rtol=0.15):
            return f"each row uses the temperature of {whose}"
    if np.allclose(fits, fits[0], rtol=0.15):
        return f"all rows use one temperature, {np.median(fits):.3g}"
    factors = np.array(fits) / asked
    if np.allclose(factors, np.median(factors), rtol=0.1):
        return f"every temperature is {np.median(factors):.3g} times what was asked for"
    off = [f"{t:g}: {f:.3g}" for t, f in zip(TEMPERATURES, fits, strict=True) if not np.isclose(t, f, rtol=0.15)]
    return f"of {kinds} temperatures, asked for and fitted: {', '.join(off)}"


def likely_of_race(logits: torch.Tensor, noise: torch.Tensor, token: int, winner: int) -> str:
    if logits[token] == -math.inf:
        return "0 / 0 wins: p = 0 with noise 0"
    if noise[winner] == 0.0 and noise[token] != 0.0:
        return "noise 0 is raised to a floor, or gives NaN"
    if token == int(logits.argmax()):
        return "the noise is not used"
    if token in (winner - 1, winner + 1):
        return "ids are off by one, or this is chance"
    return ""
