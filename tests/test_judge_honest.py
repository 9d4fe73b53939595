"""Honest implementations pass, whatever the seed: the sound one of the mutants, and one of another making (tests/honest/plain.py)."""

from forked import ROOT, run_suites

from conformance.clauses import CLAUSES

SEEDS = 20
FEW = 0.08  # of the default effort: many seeds, few cases each
IMPLEMENTATIONS = ("conformance.mutants:sound", "tests/honest/plain.py")
# claims that are not made of it, and the block manager
ABSENT = {IMPLEMENTATIONS[0]: {"CLAIM-5"}, IMPLEMENTATIONS[1]: {"CLAIM-5", "CLAIM-7", "LIFE-5", "LIFE-6", "LIFE-7", "LIFE-8"}}
# seeds are judged for one of the two in turn; what costs the same whatever the effort is judged under one seed in five
SLOW = "not LOGIT-4 and not LOGIT-5 and not KV-6 and not large_pool and not real_requests"


def selected(seed):
    return [] if seed % 10 < 2 else ["-k", SLOW]


def test_no_clause_fails_under_any_seed():
    jobs = {(IMPLEMENTATIONS[seed % 2], seed): selected(seed) for seed in range(SEEDS)}
    runs = run_suites([["--impl", name, "--effort", "quick", "--seed", str(seed), *more] for (name, seed), more in jobs.items()], quick=FEW)
    judged = {name: set() for name in IMPLEMENTATIONS}
    budgets = set()
    for (name, seed), (status, output, verdict) in zip(jobs, runs, strict=True):
        assert verdict is not None, output
        absent = {c["id"] for c in verdict["clauses"] if c["verdict"] == "not offered"}
        assert absent == ABSENT[name], seed
        held = ("pass", "not offered")
        assert [(c["id"], c["verdict"], c["text"]) for c in verdict["clauses"] if c["verdict"] not in held] == [], (name, seed)
        assert status == 0, output
        judged[name] |= {c["id"] for c in verdict["clauses"]}
        budgets |= {str(c["worst_budget"]) for c in verdict["clauses"] if c["id"] == "DEC-2"}
    everything = {clause.id for clause in CLAUSES.values() if clause.judged_in == "conformance"}
    assert judged == dict.fromkeys(IMPLEMENTATIONS, everything)
    assert len(budgets) == SEEDS  # the seed of the command line reaches the cases: nothing is measured twice


def test_the_second_one_shares_nothing_with_the_first():
    source = (ROOT / "tests/honest/plain.py").read_text()
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert not any("conformance" in line for line in imports)
    assert [line for line in imports if "reference" in line] == ["from reference.records import DecodeBatch, PrefillBatch"]


def test_large_pages_cost_no_more_than_small_ones():
    (status, output, verdict), *_ = run_suites([["--impl", "tests/honest/large_pages.py", "--effort", "quick"]])
    judged = {c["id"]: c for c in verdict["clauses"] if c["verdict"] != "not offered"}
    assert status == 0 and len(judged) == 20, output
    assert max(test["seconds"] for c in judged.values() for test in c["tests"]) < 20, "STEP-2 took five minutes once, with a page for each 512 tokens"
