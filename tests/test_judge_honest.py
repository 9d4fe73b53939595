"""Honest implementations pass, whatever the seed: the sound one of the mutants, and one of another making (tests/honest/plain.py)."""

import pytest
from forked import ROOT, run_suites

SEEDS = 20
IMPLEMENTATIONS = ("conformance.mutants:sound", "tests/honest/plain.py")
# every seed runs every subject for one of the two, and parallel_logits, whose processes are slow to start, for every tenth seed
SLOW = "not LOGIT-4 and not LOGIT-5"


@pytest.fixture(scope="module")
def runs():
    jobs = {(IMPLEMENTATIONS[seed % 2], seed): selected(seed) for seed in range(SEEDS)}
    jobs |= {(IMPLEMENTATIONS[1 - seed % 2], seed): ["-k", "DEC or PRE or KV or SLOT-1"] for seed in range(0, SEEDS, 4)}
    lists = [["--impl", name, "--effort", "quick", "--seed", str(seed), *more] for (name, seed), more in jobs.items()]
    return dict(zip(jobs, run_suites(lists), strict=True))


def selected(seed):
    return [] if seed % 10 < 2 else ["-k", SLOW]


def test_no_clause_fails_under_any_seed(runs):
    for (name, seed), (status, output, verdict) in runs.items():
        assert verdict is not None, output
        assert [(c["id"], c["verdict"], c["text"]) for c in verdict["clauses"] if c["verdict"] != "pass"] == [], (name, seed)
        assert status == 0, output


def test_every_clause_was_judged_for_both(runs):
    for implementation in IMPLEMENTATIONS:
        judged = {c["id"] for (name, _), run in runs.items() if name == implementation for c in run[2]["clauses"]}
        assert len(judged) >= 49, judged


def test_seeds_differ(runs):
    """The seed of the command line reaches the cases: what was measured is not the same twice."""
    budgets = [
        next(c["worst_budget"] for c in run[2]["clauses"] if c["id"] == "DEC-2")
        for (name, _), run in runs.items()
        if name == IMPLEMENTATIONS[0]
    ]
    assert len({str(budget) for budget in budgets}) == len(budgets)


def test_the_second_one_shares_nothing_with_the_first():
    source = (ROOT / "tests/honest/plain.py").read_text()
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert not any("conformance" in line for line in imports)
    assert [line for line in imports if "reference" in line] == ["from reference.records import DecodeBatch, PrefillBatch"]
