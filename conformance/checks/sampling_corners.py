"""sample: races with given noise, forbidden tokens, rows without a distribution, small T (clauses SAMPLE-4, SAMPLE-7, SAMPLE-9)."""

from __future__ import annotations

import math

import torch

from conformance.cases.equal_rows import FlatRows
from conformance.cases.races import RaceCase
from conformance.cases.sampling_corners import ClearMaximum, CornerRows
from conformance.checks.race import best, may_win
from conformance.checks.sampling import SamplingChecks
from conformance.findings import Broken


class CornerChecks(SamplingChecks):
    def race(self, case: RaceCase) -> None:
        """The winner of a race with given noise is a token that may win it."""
        tokens = self.draw(case.logits, case.row_temperatures, noise=case.noises, layout=case.layout, noise_layout=case.noise_layout)
        self.require_winners(tokens, case.logits, case.row_temperatures, case.noises)

    def require_winners(
        self, tokens: torch.Tensor, logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor,
        rows: torch.Tensor | None = None, clause: str = "",
    ) -> None:  # fmt: skip
        """For every row, or for those of the mask `rows`. A wrong winner is the finding of `clause`, or of the judge's own."""
        if not len(tokens):
            return
        winners = may_win(logits, temperatures, noise)
        good = winners[torch.arange(len(tokens)), tokens]
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
        asked = torch.ones(len(tokens), dtype=torch.bool) if rows is None else rows
        told = asked & (winners.sum(dim=1) == 1)  # a replay can compare where one token alone may win
        call = self.judge.last_call(winners.int().argmax(dim=1), torch.where(told, 0.0, math.inf)) if bool((told & ~good).any()) else None
        off_by_one = all(abs(int(tokens[r]) - best(logits[r], float(temperatures[r]), noise[r])[0]) == 1 for r in wrong)
        raise Broken(*facts, likely=likely_of_race(logits[asked], noise[asked], tokens[asked], ~good[asked], off_by_one), call=call)

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
                likely=f"a row that is {case.dead} throughout spreads to its neighbours"
                if case.dead
                else "-inf is replaced by a finite number, or 0 / 0 and -inf - -inf are not kept out",
            )  # fmt: skip

    def clear_maximum(self, case: ClearMaximum) -> None:
        tokens = self.draw(case.logits, case.temperatures)
        wrong = ((tokens != case.winners) & ~case.flat_rows).nonzero().flatten().tolist()
        if wrong:
            row = wrong[0]
            raise Broken(
                ("drawn", f"row {row} gave token {int(tokens[row])}, the largest logit is token {int(case.winners[row])}"),
                ("rows", f"{len(wrong)} of {len(tokens)} are wrong"),
                likely="a small T is raised, or logits / T overflows",
            )
        flat = tokens[case.flat_rows]
        if case.between and len(flat.unique()) == 1:
            told = f"all gave token {int(flat[0])}, in {len(flat)} rows of {case.vocab_size} equal logits"
            raise Broken(("rows of T = 1", told), likely="one row of a small T makes the batch greedy")

    def unchanged(self, case: FlatRows) -> None:
        """`draw` compares every byte, and `judge.call` the result of the call before."""
        noise = torch.ones((case.num_rows, case.vocab_size)) if self.takes_noise else None
        for given in (None, noise):
            self.draw(case.logits, case.temperature, noise=given, layout=case.layout)
        self.draw(case.logits, case.temperature, layout=case.layout)


def likely_of_race(logits: torch.Tensor, noise: torch.Tensor, tokens: torch.Tensor, wrong: torch.Tensor, off_by_one: bool) -> str:
    """logits, noise: (B, V); tokens: (B,), drawn; wrong: (B,) bool. A cause must fit every wrong row, not only the first."""
    drawn = logits.gather(1, tokens[:, None])[:, 0]
    if bool((drawn[wrong] == -math.inf).any()):
        return "0 / 0 wins: p = 0 with noise 0"
    greedy = drawn == logits.amax(dim=1)
    if bool(greedy.all()) and int(wrong.sum()) * 2 > len(tokens):
        return "the noise is not used"
    if off_by_one:
        return "ids are off by one"
    at_once = ((noise == 0.0) & (logits > -math.inf)).any(dim=1)  # noise 0 wins its row
    if bool(at_once[wrong].all()):
        return "noise 0 is raised to a floor, or gives NaN"
    return ""
