"""The clause list, the tests that judge it, and the mutants that break it, held against each other."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import test_reference_errors

from conformance.clauses import CLAUSES
from conformance.implementation import CONTRACT
from conformance.mutants import SUBJECTS, all_mutants
from conformance.mutants.sound_attention import SoundAttention
from conformance.mutants.sound_batches import SoundBatches
from conformance.mutants.sound_blocks import SoundBlocks
from conformance.mutants.sound_kernels import SoundKernels
from conformance.mutants.sound_logits import SoundLogits
from conformance.mutants.sound_sampling import SoundSampling
from conformance.mutants.sound_store import SoundStore

TESTS = Path(__file__).resolve().parent
CONFORMANCE = TESTS.parent / "conformance"
JUDGED = [clause for clause in CLAUSES.values() if clause.judged_in == "conformance"]
MUTANTS = all_mutants()
PARTS = (SoundBatches, SoundStore, SoundAttention, SoundLogits, SoundSampling, SoundBlocks)

# clauses that no mutant names yet, and that no mutant breaks alone yet; a clause that is no longer lacking must leave the list
LACKING_MUTANT: set[str] = set()
LACKING_ALONE: set[str] = set()
LACKING_JUDGE: set[str] = set()
NO_SENTENCE: set[str] = set()  # mutants whose docstring is a word


def marks_in(folder):
    """(clause id, functions, test name) of every clause marker in a folder's test files, read from their source."""
    for path in sorted(folder.glob("test_*.py")):
        constants = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node).startswith("pytestmark = pytest.mark.clause("):
                yield ast.literal_eval(node.value.args[0]), (), path.name
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                constants |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.clause":
                    keywords = {k.arg: ast.unparse(k.value) for k in mark.keywords}
                    functions = eval(keywords["function"], dict(constants)) if "function" in keywords else ()
                    yield ast.literal_eval(mark.args[0]), (functions,) if isinstance(functions, str) else functions, f"{path.name}::{node.name}"


JUDGES = list(marks_in(CONFORMANCE))
OWN = list(marks_in(TESTS))


def test_every_clause_of_an_implementation_is_judged():
    assert {clause.id for clause in JUDGED} - {clause for clause, *_ in JUDGES} == LACKING_JUDGE


def test_every_clause_of_the_suite_is_judged_here():
    assert {clause.id for clause in CLAUSES.values() if clause.judged_in == "tests"} == {clause for clause, *_ in OWN}


@pytest.mark.parametrize(("clause", "functions", "test"), JUDGES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_judge_names_a_clause_and_functions_that_it_binds(clause, functions, test):
    assert clause in CLAUSES and CLAUSES[clause].judged_in == "conformance"
    assert functions and set(functions) <= set(CLAUSES[clause].functions), f"{test} judges {functions}"


def test_every_test_of_the_suite_names_a_clause():
    named = {test for *_, test in JUDGES}
    for path in CONFORMANCE.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert f"{path.name}::{node.name}" in named


# STEP-1 is judged for decoding, which is where the order of store and attention shows; STEP-2 takes what is not offered from the reference
NOT_EACH = {"STEP-1", "STEP-2"}


@pytest.mark.parametrize("clause", [c for c in JUDGED if c.id not in NOT_EACH | LACKING_JUDGE], ids=lambda clause: clause.id)
def test_a_clause_is_judged_for_each_function_that_it_binds(clause):
    judged = {function for id, functions, _ in JUDGES if id == clause.id for function in functions}
    if clause.id == "SLOT-2":  # compute_slot_mapping is compared with slot(p) itself under SLOT-1
        judged.add("compute_slot_mapping")
    assert judged == set(clause.functions)


def test_clauses_are_sentences_of_their_own():
    assert all(key == clause.id and set(clause.functions) <= set(CONTRACT) for key, clause in CLAUSES.items())
    assert len({clause.sentence for clause in CLAUSES.values()}) == len(CLAUSES)
    assert all(clause.sentence and not clause.sentence.endswith(".") and "{" not in clause.sentence for clause in CLAUSES.values())


@pytest.mark.clause("ERR-1")
def test_bad_calls_to_the_reference_are_judged_next_door():
    """tests/test_reference_errors.py: one sentence for each of these calls."""
    assert len(test_reference_errors.BAD_CALLS) >= 50
    assert all(sentence.strip() for sentence in test_reference_errors.BAD_CALLS.values())


# --- mutants ----------------------------------------------------------------------------------------------------------------------------


def test_every_clause_has_a_mutant():
    assert {clause.id for clause in JUDGED} - {mutant.clause for mutant in MUTANTS.values()} == LACKING_MUTANT


def test_every_clause_has_a_mutant_that_breaks_it_alone():
    assert {clause.id for clause in JUDGED} - {mutant.clause for mutant in MUTANTS.values() if mutant.alone} == LACKING_ALONE


def test_there_are_mutants_enough():
    """70 or more, at least 15 of them modelled on nobody's report."""
    assert len(MUTANTS) >= 70
    assert sum(mutant.source == "own" for mutant in MUTANTS.values()) >= 15


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_says_what_is_wrong_and_fits_what_it_replaces(mutant):
    assert CLAUSES[mutant.clause].judged_in == "conformance"
    assert mutant.description.endswith(".")
    assert (len(mutant.description.split()) >= 3) == (mutant.name not in NO_SENTENCE)
    assert mutant.source.strip()
    sound = getattr(mutant.sound, mutant.replaces)
    assert callable(sound) and mutant.fault is not sound
    assert shape_of(mutant.fault) == shape_of(sound)


def shape_of(function):
    """Names and kinds of the parameters: a fault is called the way the sound method is."""
    return [(name, p.kind, p.default) for name, p in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_is_its_sound_class_but_for_one_method(mutant):
    made = type(mutant.implementation())
    assert made.__mro__[1] is mutant.sound
    assert {name for name in vars(made) if not name.startswith("__")} == {mutant.replaces}
    offered = [name for name in CLAUSES[mutant.clause].functions if hasattr(made, name)]
    assert offered, f"{mutant.clause} does not bind what {mutant.sound.__name__} offers"


def test_claims_of_mutants_are_claims_that_are_judged():
    for mutant in MUTANTS.values():
        claim = CLAUSES[mutant.clause].claim
        assert claim is None or claim in mutant.implementation().CAPABILITIES["claims"], mutant.name


def test_the_sound_parts_offer_the_whole_contract_and_no_method_twice():
    offered = {part: {name for name in vars(part) if name in CONTRACT} for part in PARTS}
    assert sorted(name for names in offered.values() for name in names) == sorted(CONTRACT)
    assert set(vars(SoundKernels())) == set(CONTRACT)


def test_the_subjects_are_the_files():
    files = {path.stem for path in (CONFORMANCE / "mutants").glob("*.py")} - {"__init__", "__main__", "catalogue", "judging"}
    assert set(SUBJECTS) == {name for name in files if not name.startswith("sound_")}


def test_a_mutant_can_be_named_as_an_implementation():
    package = importlib.import_module("conformance.mutants")
    assert type(package.newest_token_dropped).__name__ == "newest_token_dropped"
    assert isinstance(package.sound, SoundKernels)
    with pytest.raises(AttributeError):
        _ = package.nosuch
