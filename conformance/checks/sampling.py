"""sample, called with guarded tensors, and its distribution (clauses SAMPLE-1...3).

Every check draws through `draw`, which also holds what all calls must hold: int64 ids in [0, V) are SAMPLE-7's, unchanged inputs are
SAMPLE-9's.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from conformance.buffers import Buffers
from conformance.cases.laws import TEMPERATURES, Law, RowTemperatures, dtype_name
from conformance.checks.distribution import FALSE_ALARM, STAGE_ONE, fitted_temperature, looks_like, of_several, pearson, rejected
from conformance.findings import Broken
from conformance.judge import Case, Judge

FEW_ROWS_SECONDS, FEW_ROWS_DRAWS = 0.5, 50  # processor seconds that a law of few rows a call may take, once so many tokens are drawn


class SamplingChecks:
    """What the checks of all clauses share, and those of the distribution."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.takes_noise = judge.implementation.takes("sample", "noise")
        self.takes_seed = judge.implementation.takes("sample", "seed")
        self.num_tests = 0
        torch.manual_seed(judge.seed + zlib.crc32(judge.clause.id.encode()))  # what is sampled without a seed repeats with the suite's

    def for_each(self, cases: Iterable[Case], check: Callable[[Case], None]) -> None:
        self.judge.for_each(cases, check)

    def rejected(self, p_value: Callable[[int], float]) -> bool:
        """Both stages of a test; how many there were, and what false alarm they add up to, is noted for the verdict."""
        noted = f"{self.num_tests} two-stage tests"
        self.num_tests += 1
        notes = self.judge.record.notes
        notes[:] = [note for note in notes if not note.startswith(noted)]
        notes.append(f"{self.num_tests} two-stage tests: a sound sampler fails one with probability {self.num_tests * FALSE_ALARM:.0e}")
        return rejected(p_value)

    # --- one call -----------------------------------------------------------------------------------------------------------------

    def draw(
        self, logits: torch.Tensor, temperatures: torch.Tensor | float, *, noise: torch.Tensor | None = None, seed: int | None = None,
        layout: str = "plain", temperature_layout: str = "plain", noise_layout: str = "",
    ) -> torch.Tensor:  # fmt: skip
        """(B,) int64 on the CPU: what the implementation draws, from guarded copies of the tensors."""
        judge = self.judge
        if not isinstance(temperatures, torch.Tensor):
            temperatures = torch.full((len(logits),), temperatures, dtype=torch.float32)
        buffers = Buffers(judge.device)
        handed = put(buffers, "logits", logits, layout), buffers.put("temperatures", temperatures, temperature_layout)
        keywords: dict[str, Any] = {} if seed is None else {"seed": seed}
        if noise is not None:
            keywords["noise"] = put(buffers, "noise", noise, noise_layout or layout)
        buffers.freeze()
        tokens = judge.call("sample", *handed, **keywords)
        changed = buffers.changed()
        if changed:
            judge.note_beside("SAMPLE-9", f"sample wrote into its inputs: {changed}")
        rows, vocab_size = logits.shape
        if not isinstance(tokens, torch.Tensor) or tuple(tokens.shape) != (rows,):
            told = tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise Broken(("tokens", f"have shape {told}, they must be a tensor of shape ({rows},)"), clause="SAMPLE-7")
        if tokens.device.type != judge.device.type:
            raise Broken(("tokens", f"lie on {tokens.device}, the logits on {judge.device}"), clause="SAMPLE-7")
        if tokens.dtype != torch.int64:
            judge.note_beside("SAMPLE-7", f"tokens are {dtype_name(tokens.dtype)}, they must be int64")
        tokens = tokens.cpu().long()
        outside = ((tokens < 0) | (tokens >= vocab_size)).nonzero().flatten().tolist()
        if outside:
            judge.note_beside("SAMPLE-7", f"row {outside[0]} of {rows} gave token {int(tokens[outside[0]])}, ids lie in [0, {vocab_size})")
            tokens = tokens.clamp(0, vocab_size - 1)
        return tokens

    # --- SAMPLE-1, 2, 3: distributions --------------------------------------------------------------------------------------------

    def law(self, law: Law) -> None:
        counts = np.zeros(law.vocab_size)
        row = law.logits.to(self.judge.device)  # spread to its rows there: the largest laws are gigabytes

        def p_value(times: int) -> float:
            counts[:] = 0
            enough = time.process_time() + FEW_ROWS_SECONDS * times
            for call, rows in enumerate(law.batches(times)):
                if law.rows_per_call and counts.sum() >= FEW_ROWS_DRAWS * times and time.process_time() > enough:
                    break
                seed = 100_000 * self.judge.seed + 10_000 * times + call if law.seeded else None
                tokens = self.draw(row.expand(rows, -1), law.temperature, seed=seed)
                counts[:] += np.bincount(tokens.numpy(), minlength=law.vocab_size)
            return pearson(counts, law.probabilities.numpy(), law.by_rank)

        if self.rejected(p_value):
            told = looks_like(counts, law.logits.double().numpy(), law.temperature)
            p = pearson(counts, law.probabilities.numpy(), law.by_rank)
            raise Broken(
                ("tokens", f"are not distributed as softmax(logits / T): {told}"),
                ("chi-squared", f"p = {p:.1e} on {counts.sum():.0f} fresh draws, after a rejection"),
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

        if self.rejected(p_value):
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


def put(buffers: Buffers, name: str, values: torch.Tensor, layout: str) -> torch.Tensor:
    return buffers.put(name, values.t()).t() if layout == "transposed" else buffers.put(name, values, layout)


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
