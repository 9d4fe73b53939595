"""pytest, taught to judge: options, the judge fixture, the verdicts in the summary.

The judging runs in worker processes (pytest-xdist), so that a kernel that kills its process costs one verdict and not the run.
"""

from __future__ import annotations

import os

# numpy's threaded matmul is many times slower than one thread on the small tiles of the Triton interpreter; read when numpy is loaded
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gc
import re
import signal
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from conformance.clauses import CLAUSES
from conformance.findings import Broken, Finding, Record
from conformance.implementation import CannotLoad, Implementation, load_implementation
from conformance.judge import EFFORTS, Judge
from conformance.replay import write_replay
from conformance.verdicts import ALL_REFUSED, TestVerdict, broken_in_passing, clause_verdicts, render_finding, summary_lines, write_json

SUBJECTS = ("slot_mapping", "store_kvcache", "prefill_attention", "decode_attention", "batches", "steps", "logits", "sampling")
implementation_key = pytest.StashKey[Implementation]()
tests_key = pytest.StashKey[list[TestVerdict]]()
waivers_key = pytest.StashKey[dict[str, str]]()
started_key = pytest.StashKey[float]()


class JudgementTimeout(BaseException):
    """Not an Exception: nothing between the kernel and pytest may catch it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("whichslot", "judging kernels of paged-KV inference")
    group.addoption("--impl", default="gpu_impl", help="what is judged: pkg.module, pkg.module:object or path/to/file.py (default gpu_impl)")
    group.addoption("--device", default="auto", help="cpu, cuda, or auto: cuda if there is one (default auto)")
    group.addoption("--effort", default="default", help="how many cases: quick, default or thorough (fewer of a slow implementation)")
    group.addoption("--seed", default="0", help="the seed that the cases are drawn with (default 0)")
    group.addoption("--timeout-seconds", default="300", help="how long one test may judge before it is given the verdict timeout (default 300)")
    group.addoption("--waivers", default=None, help="a TOML file whose table [waivers] gives a reason for each clause that may fail")
    group.addoption("--verdict-json", default=".whichslot/verdict.json", help="where the verdict is written for other programs")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Two worker processes unless the user says otherwise."""
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not in_worker and getattr(config.option, "numprocesses", 0) is None and not config.option.usepdb and not config.option.collectonly:
        config.option.numprocesses = min(os.cpu_count() or 1, 12) if torch.cuda.is_available() else 2
        config.option.dist = "worksteal"
        config.option.maxworkerrestart = "100"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "clause(id, function): the clause that a test judges, and the function that it needs")
    config.addinivalue_line("filterwarnings", "ignore:All-NaN slice encountered:RuntimeWarning")  # a row of NaN in the interpreter
    config.stash[started_key] = time.monotonic()
    config.stash[tests_key] = []
    if config.option.collectonly or config.option.help:
        return
    try:
        config.stash[implementation_key] = load(config)
        config.stash[waivers_key] = read_waivers(config.getoption("--waivers"))
    except CannotLoad as error:
        raise pytest.UsageError(str(error)) from error


def load(config: pytest.Config) -> Implementation:
    """The implementation that the options name. Raises CannotLoad with one sentence for an option that cannot be used."""
    torch.set_num_threads(1)
    if config.getoption("--effort") not in EFFORTS:
        raise CannotLoad(f"--effort {config.getoption('--effort')} is none of {', '.join(EFFORTS)}")
    if not re.fullmatch(r"\d{1,9}", config.getoption("--seed")):
        raise CannotLoad(f"--seed {config.getoption('--seed')} is no whole number of up to 9 digits")
    if not re.fullmatch(r"[1-9]\d{0,5}", config.getoption("--timeout-seconds")):
        raise CannotLoad(f"--timeout-seconds {config.getoption('--timeout-seconds')} is no whole number of seconds from 1 on")
    name = config.getoption("--device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise CannotLoad(f"--device {name} is neither cpu nor cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise CannotLoad(f"--device {name}: torch {torch.__version__} sees no GPU here")
    if name == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return load_implementation(config.getoption("--impl"), torch.device(name))


def read_waivers(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        waivers = tomllib.loads(Path(path).read_text()).get("waivers", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CannotLoad(f"--waivers {path}: {error}") from error
    for clause, reason in waivers.items():
        if clause not in CLAUSES:
            raise CannotLoad(f"--waivers {path} waives {clause!r}, which is no clause")
        if not isinstance(reason, str) or not reason.strip():
            raise CannotLoad(f"--waivers {path} gives no reason for {clause}")
    return waivers


def pytest_collection_finish() -> None:
    gc.freeze()  # torch, triton and the tests stay: no collection need walk through them again


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    implementation = config.stash.get(implementation_key, None)
    if implementation is None:
        return []
    return [f"judging {implementation.name} on {device_name(implementation.device)}: {', '.join(implementation.offered)}"]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return "cpu (Triton interpreter)" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test's id carries its clause: `-k DEC-1` selects by clause, and a crashed worker's test is told by its id."""
    mark = metafunc.definition.get_closest_marker("clause")
    if mark is not None and "judge" in metafunc.fixturenames:
        functions = mark.kwargs["function"]
        needed = ((functions,) if isinstance(functions, str) else functions, mark.kwargs.get("any_of", False))
        metafunc.parametrize("judge", [(mark.args[0], *needed)], ids=[mark.args[0]], indirect=True)


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    clause_id, functions, any_of = request.param
    clause = CLAUSES[clause_id]
    implementation = request.config.stash[implementation_key]
    missing = [name for name in functions if name not in implementation.offered]
    if missing and not (any_of and len(missing) < len(functions)):
        pytest.skip(f"not offered: {', '.join(missing)}")
    claims = implementation.capabilities.claims_for
    if clause.claim is not None and not any(claims(clause.claim, name) for name in functions if name in implementation.offered):
        pytest.skip(f"not claimed: {clause.claim}")
    config = request.config
    offered = next(name for name in functions if name in implementation.offered)
    made = Judge(implementation, clause, offered, effort=config.getoption("--effort"), seed=int(config.getoption("--seed")))
    request.node.judge = made
    earlier = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(int(config.getoption("--timeout-seconds")))
    yield made
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


def raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise JudgementTimeout


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    judge = getattr(item, "judge", None)
    if judge is None or report.when != "call":
        return
    told: dict[str, Any] = {"record": asdict(judge.record), "verdict": "pass", "text": ""}
    if report.skipped:
        return  # a part of the function, an optional keyword say, is not offered
    error = call.excinfo.value if call.excinfo is not None else None
    device = device_name(judge.device)
    if isinstance(error, Broken):
        told["verdict"] = "fail"
        told["text"] = told_with_replay(judge, error.finding, device, Path(item.config.getoption("--verdict-json")).parent)
        report.longrepr = told["text"]
    elif isinstance(error, JudgementTimeout):
        told["verdict"] = "timeout"
        told["text"] = f"{judge.implementation.name}.{judge.function} had not come back after {item.config.getoption('--timeout-seconds')} s"
        report.outcome, report.longrepr = "failed", told["text"]
    elif error is not None and report.failed:
        told["verdict"], told["text"] = "error", f"the judge could not run: {type(error).__name__}: {error}"
    elif judge.record.examples and sum(judge.record.refusals.values()) == judge.record.examples:
        told["verdict"], told["text"] = "refused", ALL_REFUSED
    report.user_properties.append(("whichslot", told))


def told_with_replay(judge: Judge, finding: Finding, device: str, folder: Path) -> str:
    """The report of a finding, and a script beside the verdict that replays it."""
    name = judge.implementation.name
    report = render_finding(judge.clause, finding, name, device, judge.function)
    try:
        finding.replay = write_replay(judge.clause, finding, report, judge.implementation, folder)
    except Exception as error:  # a finding must be told whatever becomes of its script
        finding.replay = f"no script: {type(error).__name__}: {error}"
    return render_finding(judge.clause, finding, name, device, judge.function)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    tests = _tests
    told: Any = dict(report.user_properties).get("whichslot")
    clause = clause_of(report.nodeid)
    if clause is None:
        return
    if told is not None and report.when == "call":
        record = Record(**told["record"])
        tests.append(TestVerdict(report.nodeid, clause, told["verdict"], told["text"], record, report.duration))
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        tests.append(TestVerdict(report.nodeid, clause, "not offered", reason.removeprefix("Skipped: ")))
    elif report.failed and told is None:
        crashed = "crashed while running" in str(report.longrepr)
        text = "the implementation killed the process it ran in" if crashed else f"the judge could not run: {report.longrepr}"
        tests.append(TestVerdict(report.nodeid, clause, "crash" if crashed else "error", text))


_tests: list[TestVerdict] = []  # of this process's session; logreport is not handed the config


def clause_of(nodeid: str) -> str | None:
    match = re.search(r"\[([A-Z]+-\d+)", nodeid)
    return match.group(1) if match and match.group(1) in CLAUSES else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What no test's own outcome tells: a clause found broken beside another, everything refused, waivers."""
    config = session.config
    if hasattr(config, "workerinput") or waivers_key not in config.stash:
        return
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.option.keyword:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
        return
    verdicts = clause_verdicts(_tests, config.stash[waivers_key])
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and verdicts:
        session.exitstatus = pytest.ExitCode.OK if all(v.holds for v in verdicts) else pytest.ExitCode.TESTS_FAILED
    header = {
        "implementation": config.getoption("--impl"),
        "device": device_name(config.stash[implementation_key].device),
        "effort": config.getoption("--effort"),
        "seed": int(config.getoption("--seed")),
        "seconds": round(time.monotonic() - config.stash[started_key], 2),
    }
    write_json(Path(config.getoption("--verdict-json")), verdicts, header)


def nothing_selected(keyword: str) -> str:
    """One sentence with what -k could have selected."""
    return f"-k {keyword} selects no test: subjects are {', '.join(SUBJECTS)}, clauses are {' '.join(families())}"


def families() -> list[str]:
    """BATCH-1...7 and so on."""
    numbers: dict[str, list[int]] = {}
    for clause in CLAUSES.values():
        if clause.judged_in == "conformance":
            numbers.setdefault(clause.family, []).append(int(clause.id.split("-")[1]))
    return [f"{family}-{min(known)}...{max(known)}" for family, known in numbers.items()]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if waivers_key in config.stash and not _tests and config.option.keyword:
        terminalreporter.write_line(f"ERROR: {nothing_selected(config.option.keyword)}", red=True)
    if waivers_key not in config.stash or not _tests:
        return
    verdicts = clause_verdicts(_tests, config.stash[waivers_key])
    implementation = config.stash[implementation_key]
    seconds = time.monotonic() - config.stash[started_key]
    title = (
        f"{implementation.name} · {config.getoption('--effort')} effort, seed {config.getoption('--seed')}, "
        f"{seconds:.0f} s, {device_name(implementation.device)}"
    )
    terminalreporter.section("verdict")
    for line in summary_lines(verdicts, title):
        terminalreporter.write_line(line)
    if beside := broken_in_passing(verdicts):
        told = ", ".join(verdict.clause.id for verdict in beside)
        terminalreporter.write_line(f"exit status 1, although no test of theirs failed: {told} (above is why)", red=True)
        terminalreporter.stats["clauses broken beside"] = beside  # pytest's own last line then counts them, and is not green
