"""From test reports to verdicts: what each clause gets, and how it is told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conformance.clauses import CLAUSES, Clause
from conformance.findings import Finding, Record

# a clause gets the worst verdict of its tests; from worst to best
ORDER = ("crash", "error", "timeout", "fail", "refused", "waived", "pass", "not offered")
BAD = ("crash", "error", "timeout", "fail")
ALL_REFUSED = "every case was refused"


@dataclass
class TestVerdict:
    __test__ = False  # pytest: this is no test class
    nodeid: str
    clause: str
    verdict: str
    text: str = ""  # the finding, or the reason
    record: Record | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """test_prefill_attention_heads, say."""
        return self.nodeid.rpartition("::")[2].partition("[")[0]


@dataclass
class ClauseVerdict:
    clause: Clause
    verdict: str
    tests: list[TestVerdict] = field(default_factory=list)
    text: str = ""

    @property
    def examples(self) -> int:
        return sum(test.record.examples for test in self.tests if test.record)

    @property
    def refused(self) -> int:
        return sum(sum(test.record.refusals.values()) for test in self.tests if test.record)

    @property
    def worst_budget(self) -> dict[str, float]:
        worst: dict[str, float] = {}
        for test in self.tests:
            for dtype, share in (test.record.worst_budget if test.record else {}).items():
                worst[dtype] = max(worst.get(dtype, 0.0), share)
        return worst

    @property
    def holds(self) -> bool:
        return self.verdict in ("pass", "waived", "not offered") or (self.verdict == "refused" and self.clause.may_refuse)


def clause_verdicts(tests: Iterable[TestVerdict], waivers: dict[str, str]) -> list[ClauseVerdict]:
    """One verdict a clause, in the order of the list. A waived clause still ran: its failure is waived, its pass fails the waiver."""
    by_clause: dict[str, list[TestVerdict]] = {}
    beside: dict[str, str] = {}
    for test in tests:
        by_clause.setdefault(test.clause, []).append(test)
        for other, text in (test.record.side_findings if test.record else {}).items():
            beside.setdefault(other, text)
    verdicts = []
    for clause in CLAUSES.values():
        own = by_clause.get(clause.id, [])
        if not own and clause.id not in beside:
            continue
        worst = min((test.verdict for test in own), key=ORDER.index, default="not offered")
        text = next((test.text for test in own if test.verdict == worst), "")
        if text == ALL_REFUSED and (some := [test.name for test in own if test.verdict == worst]) != [test.name for test in own]:
            text = f"every case of {', '.join(some)} was refused"
        if clause.id in beside and worst not in BAD:
            worst, text = "fail", f"{beside[clause.id]} (seen while other clauses were judged)"
        if clause.id in waivers:
            if worst in BAD or worst == "refused":
                worst, text = "waived", waivers[clause.id]
            elif worst == "pass":
                worst, text = "fail", f"the clause holds, so its waiver ({waivers[clause.id]!r}) must go"
        verdicts.append(ClauseVerdict(clause, worst, own, text))
    return verdicts


def write_json(path: Path, verdicts: list[ClauseVerdict], header: dict[str, Any]) -> None:
    """The whole verdict for other programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        **header,
        "clauses": [
            {
                "id": v.clause.id,
                "verdict": v.verdict,
                "holds": v.holds,
                "text": v.text,
                "examples": v.examples,
                "refused": v.refused,
                "worst_budget": v.worst_budget,
                "tests": [
                    {
                        "nodeid": test.nodeid,
                        "verdict": test.verdict,
                        "seconds": test.seconds,
                        "record": asdict(test.record) if test.record else None,
                    }
                    for test in v.tests
                ],
            }
            for v in verdicts
        ],
    }
    path.write_text(json.dumps(content, indent=1))


def render_finding(clause: Clause, finding: Finding, implementation: str, device: str, function: str) -> str:
    """A failure on one screen, for someone who has never opened this repository."""
    lines = [f"FAIL  {clause.id}  {clause.sentence}", ""]
    parts = finding.case if isinstance(finding.case, tuple) else (finding.case,)
    names = getattr(finding.case, "_fields", ("with",) * len(parts))
    shown: list[tuple[str, str]] = []
    for name, part in zip(names, parts, strict=True):
        if hasattr(part, "literals"):
            shown += [(name.replace("_", " "), "")] if shown else []
            shown += part.literals()
        elif part is not None:
            shown.append((name.replace("_", " "), part if isinstance(part, str) else repr(part)))
    headlines = [part.headline(implementation, device) for part in parts if hasattr(part, "headline")]
    lines.append("  " + (headlines[0] if headlines else f"{implementation}.{function}   {device}"))
    if shown:
        found = "shrunk to" if finding.drawn else "fixed case"
        lines += labelled([(found if i == 0 else "", " ".join(pair).rstrip()) for i, pair in enumerate(shown)])
    lines += labelled([(label, text) for label, text in finding.facts])
    if finding.likely:
        lines += labelled([("likely", finding.likely)])
    if finding.replay:
        lines += labelled([("replay", finding.replay)])
    return "\n".join(lines)


def labelled(facts: list[tuple[str, str]]) -> list[str]:
    lines = []
    for label, text in facts:
        if not text:
            lines.append(f"  {label}")
            continue
        first, *rest = text.splitlines()
        lines.append(f"  {label:<22} {first}")
        lines += [f"  {'':<22} {line}" for line in rest]
    return lines


def summary_lines(verdicts: list[ClauseVerdict], title: str) -> list[str]:
    """A line a clause, a line a family, one sentence."""
    lines = []
    families: dict[str, list[ClauseVerdict]] = {}
    for verdict in verdicts:
        families.setdefault(verdict.clause.family, []).append(verdict)
    for verdict in verdicts:
        counted = f"{verdict.examples} cases" + (f", {verdict.refused} refused" if verdict.refused else "")
        budget = ", ".join(f"{dtype} {share:.2f}" for dtype, share in sorted(verdict.worst_budget.items()))
        tail = f"   [{counted}{'; error / budget ' + budget if budget else ''}]" if verdict.examples else ""
        lines.append(f"{verdict.clause.id:<9} {verdict.verdict:<12} {verdict.clause.sentence}{tail}")
        if verdict.verdict not in ("pass", "not offered") and verdict.text:
            lines.append(f"{'':<22} {headline_of(verdict)}")
        for message, count in refusals(verdict).items():
            lines.append(f"{'':<22} refused {count}: {message}")
        for note in [note for test in verdict.tests if test.record for note in test.record.notes]:
            lines.append(f"{'':<22} {note}")
    lines.append("")
    for family, members in families.items():
        judged = [v for v in members if v.verdict != "not offered"]
        held = sum(v.holds for v in judged)
        note = f"{held} of {len(judged)} hold" if judged else "not offered"
        broken = [v.clause.id for v in judged if not v.holds]
        lines.append(f"{family:<9} {note}{'   broken: ' + ', '.join(broken) if broken else ''}")
    lines.append("")
    judged = [v for v in verdicts if v.verdict != "not offered"]
    name, _, circumstances = title.partition(" · ")
    held, refused = sum(v.holds for v in judged), sum(v.refused for v in verdicts)
    lines.append(
        f"{name}: {held} of {len(judged)} clauses hold, {refused} refused cases, {len(verdicts) - len(judged)} not offered · {circumstances}"
    )
    return lines


def broken_in_passing(verdicts: list[ClauseVerdict]) -> list[ClauseVerdict]:
    """Clauses that do not hold although no test of theirs failed: pytest counts tests, and says that all of them passed."""
    return [v for v in verdicts if not v.holds and not any(test.verdict in BAD for test in v.tests)]


def refusals(verdict: ClauseVerdict, most: int = 3) -> dict[str, int]:
    counted: dict[str, int] = {}
    for test in verdict.tests:
        for message, count in (test.record.refusals if test.record else {}).items():
            counted[message] = counted.get(message, 0) + count
    return dict(sorted(counted.items(), key=lambda item: -item[1])[:most])


def headline_of(verdict: ClauseVerdict) -> str:
    """The one line of a finding that says the most: its first fact."""
    lines = [line.strip() for line in verdict.text.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith("FAIL")]
    return (told or lines or [""])[0][:160]
