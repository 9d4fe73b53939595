"""sample: how much of a tail's mass is kept (clause SAMPLE-8)."""

from __future__ import annotations

import math

from scipy.special import betaincinv

from conformance.cases.laws import Tail
from conformance.checks.distribution import at_least, at_most
from conformance.checks.sampling import SamplingChecks
from conformance.findings import Broken

KEPT = 0.99  # of a tail's mass, down to where an implementation states that it keeps it
SURE = 0.95  # of the interval that is told
ALONE = 512  # draws of the tail's tokens alone, which tell a cut tail from noise with a floor
FEW = 0.75  # of the ids that so many draws should give; a sound sampler's number is within a few in a hundred


class TailChecks(SamplingChecks):
    def tail(self, tail: Tail) -> None:
        """Where the implementation states a loss, and only there, a loss is told and not held against it."""
        drawn, draws = 0, 0
        row = tail.logits.to(self.judge.device)

        def p_value(times: int) -> float:
            nonlocal drawn, draws
            drawn, draws = 0, tail.draws * times
            for rows in tail.batches(times):
                drawn += int((self.draw(row.expand(rows, -1), 1.0) != tail.top).sum())
            return of_tail(drawn, draws, tail.probability)

        stated = tail.nats > self.judge.capabilities.tail_nats
        broken = p_value(1) < 0.0 if stated else self.rejected(p_value)
        told = share_kept(drawn, draws, tail.probability)
        where = f"tail of {tail.tail_tokens} tokens {tail.nats:g} nats under the top: keeps {told}"
        self.judge.record.notes.append(where + (f" (loss stated: tail_nats {self.judge.capabilities.tail_nats:g})" if stated else ""))
        if broken:
            expected = draws * tail.probability
            p = of_tail(drawn, draws, tail.probability)
            raise Broken(
                ("tail", f"keeps {told} of its mass, it must keep {100 * KEPT:g} %, or CAPABILITIES state tail_nats under {tail.nats:g}"),
                ("drawn", f"{drawn} times of {draws} draws, {expected:.1f} were expected (p = {p:.1e} on fresh draws, after a rejection)"),
                likely=self.likely_of_too_few(tail) if drawn < expected else "the top token arrives too late",
            )

    def likely_of_too_few(self, tail: Tail) -> str:
        """Drawn without the top, where each draw is of the tail: a floor of the noise leaves all of its ids there, a cut does not."""
        row = tail.logits.to(self.judge.device).clone()
        row[tail.top] = -math.inf
        draws = max(1, min(ALONE, tail.largest_call // tail.vocab_size))
        ids = len(self.draw(row.expand(draws, -1), 1.0).unique())
        others = tail.tail_tokens - 1 if tail.top < tail.tail_tokens else tail.tail_tokens
        if ids < FEW * others * -math.expm1(draws * math.log1p(-1 / others)):
            return f"only {ids} of the tail's ids are drawn, {draws} times, where there is no top: a top-k, or a buffer of candidates"
        return "the noise has a floor: a float32 uniform has 24 random bits, and no Exp(1) draw of it is under 2^-24"


def of_tail(drawn: int, draws: int, probability: float) -> float:
    """Two-sided p-value of `drawn` tail tokens: fewer than KEPT of the tail's mass gives, or more than all of it."""
    few = at_most(drawn, draws, KEPT * probability)
    many = at_least(drawn, draws, probability)
    return min(1.0, 2 * min(few, many))


def share_kept(drawn: int, draws: int, probability: float) -> str:
    """In words, with its interval (Clopper-Pearson)."""
    low = betaincinv(drawn, draws - drawn + 1, (1 - SURE) / 2) if drawn else 0.0
    high = betaincinv(drawn + 1, draws - drawn, (1 + SURE) / 2)
    share, low, high = (100 * value / probability for value in (drawn / draws, low, high))
    return f"{share:.3g} % ({low:.3g} to {high:.3g} %)"
