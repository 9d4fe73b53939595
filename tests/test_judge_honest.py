"""Honest implementations pass, whatever the seed: the sound one of the mutants, and one of another making (tests/honest/plain.py)."""

from forked import ROOT, run_suites

from conformance.clauses import CLAUSES
from conformance.verdicts import ALL_REFUSED, TestVerdict, clause_verdicts

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


LIMITS = {  # of tests/honest/strict.py, block sizes and tokens of a sequence: what is judged
    "(16,), 100": "BATCH or SLOT or STEP-1 or STEP-2 or LIFE-3 or LIFE-8",
    "(1,), 16": "SLOT or KV-6 or STEP-1",
    "(256,), 128": "BATCH-1 or BATCH-6 or STEP-2 or LIFE-4",
    "(3, 4), 1": "BATCH or SLOT or STEP or LIFE-8 or decode_attention_at_the_top_of_a_huge_pool",
    "(4096,), 32768": "BATCH-2 or BATCH-6",
}


def test_nothing_past_stated_limits_is_asked(tmp_path):
    source, jobs = (ROOT / "tests/honest/strict.py").read_text(), []
    for i, (limits, clauses) in enumerate(LIMITS.items()):
        path = tmp_path / f"strict_{i}.py"
        path.write_text(source.replace("(16,), 100", limits))
        jobs.append(["--impl", str(path), "--effort", "quick", "-k", clauses])
    for limits, (status, output, verdict) in zip(LIMITS, run_suites(jobs, quick=FEW), strict=True):
        told = [c["verdict"] for c in verdict["clauses"]]
        assert status == 0 and set(told) <= {"pass", "not offered"}, (limits, output)
        assert told.count("pass") >= 2, limits


def test_blocks_that_a_manager_keeps_for_itself_are_stated(tmp_path):
    """As stated they are no leak; one more than stated is."""
    source, jobs = (ROOT / "tests/honest/null_block.py").read_text(), []
    for reserved in (1, 2, 3):
        path = tmp_path / f"null_{reserved}.py"
        stated = source.replace('"reserved_blocks": 1', f'"reserved_blocks": {min(reserved, 2)}')
        path.write_text(stated.replace("RESERVED = 1", f"RESERVED = {reserved}"))
        jobs.append(["--impl", str(path), "--effort", "quick", "-k", "LIFE or STEP-2"])
    for reserved, (status, output, verdict) in zip((1, 2, 3), run_suites(jobs), strict=True):
        broken = [c["id"] for c in verdict["clauses"] if c["verdict"] not in ("pass", "not offered")]
        assert (status, broken) == ((0, []) if reserved < 3 else (1, ["LIFE-8"])), output
        assert sum(c["verdict"] == "pass" for c in verdict["clauses"]) >= 7, output
    assert "and 2 more are reserved" in output


def test_a_clause_says_which_of_its_tests_refused_everything():
    tests = [TestVerdict(f"conformance/test_x.py::test_{name}[PRE-6-x]", "PRE-6", verdict, text)
             for name, verdict, text in (("heads", "pass", ""), ("groups", "refused", ALL_REFUSED))]  # fmt: skip
    assert [v.text for v in clause_verdicts(tests, {})] == ["every case of test_groups was refused"]
    assert [v.text for v in clause_verdicts(tests[1:], {})] == [ALL_REFUSED]


def test_large_pages_cost_no_more_than_small_ones():
    (status, output, verdict), *_ = run_suites([["--impl", "tests/honest/large_pages.py", "--effort", "quick"]])
    judged = {c["id"]: c for c in verdict["clauses"] if c["verdict"] != "not offered"}
    assert status == 0 and len(judged) == 20, output
    assert max(test["seconds"] for c in judged.values() for test in c["tests"]) < 20, "STEP-2 took five minutes once, with a page for each 512 tokens"
