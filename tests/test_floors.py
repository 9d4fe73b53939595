"""The floors of the house, read from the imports of every file: who may import whom."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["reference", "gpu_impl", "conformance", "benchmarks", "tests"]
MAY_NOT_IMPORT = {  # folder -> folders of the house whose modules it leaves alone
    "reference": ["gpu_impl", "conformance", "benchmarks", "tests"],
    "gpu_impl": ["conformance", "benchmarks", "tests"],
    "conformance": ["gpu_impl", "benchmarks", "tests"],
}


def imported_modules(source, package):
    """(line, full module name) of every import, at any depth of the file; `from a import b` gives a.b, relative names are made whole."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def broken_floors(folder, source, package=None):
    """One sentence for each import that breaks a floor."""
    sentences = []
    for line, module in imported_modules(source, package or folder):
        top = module.split(".")[0]
        if top in MAY_NOT_IMPORT.get(folder, []):
            sentences.append(f"line {line} imports {module}, {folder} may not import {top}")
        elif folder == "reference" and top not in {"torch", "reference", *sys.stdlib_module_names}:
            sentences.append(f"line {line} imports {module}, reference imports torch, the standard library and itself")
        elif folder == "gpu_impl" and top == "reference" and not f"{module}.".startswith("reference.records."):
            sentences.append(f"line {line} imports {module}, gpu_impl takes from reference only reference.records")
    return sentences


def source_files():
    for folder in PACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield pytest.param(folder, path, id=str(path.relative_to(ROOT)))


@pytest.mark.parametrize(("folder", "path"), list(source_files()))
def test_a_file_keeps_the_floors(folder, path):
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert broken_floors(folder, path.read_text(encoding="utf-8"), package) == []


def test_every_file_of_the_reference_is_looked_at():
    assert {path.name for folder, path in (param.values for param in source_files()) if folder == "reference"} >= {
        "__init__.py", "attention.py", "batches.py", "cache.py", "logits.py", "records.py", "sampling.py", "slots.py",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "source", "package", "broken"),
    [
        ("reference", "import torch.distributed as dist\nimport math\nfrom reference.slots import slot_of_position", None, False),
        ("reference", "from . import slots\nfrom .records import PrefillBatch", None, False),
        ("reference", "import numpy as np", None, True),
        ("reference", "def f():\n    from gpu_impl import attention", None, True),
        ("reference", "import triton", None, True),
        ("gpu_impl", "import triton\nfrom reference.records import DecodeBatch", None, False),
        ("gpu_impl", "import reference.records as records", None, False),
        ("gpu_impl", "from reference import records", None, False),
        ("gpu_impl", "from .attention import decode_attention", None, False),
        ("gpu_impl", "from reference import prepare_prefill", None, True),
        ("gpu_impl", "import reference", None, True),
        ("gpu_impl", "from reference.recordsx import y", None, True),
        ("gpu_impl", "try:\n    import conformance.cases\nexcept ImportError:\n    pass", None, True),
        ("gpu_impl", "from ..reference.slots import slot_of_position", "gpu_impl.triton", False),
        ("conformance", "from reference import sample\nimport hypothesis\nfrom ..cases import lengths", "conformance.checks", False),
        ("conformance", "import gpu_impl", None, True),
        ("conformance", "from gpu_impl.flash import decode_attention", None, True),
        ("tests", "import conformance, gpu_impl, reference", None, False),
    ],
)
def test_the_check_tells_a_broken_floor(folder, source, package, broken):
    """Negative control, on imports of every form."""
    assert bool(broken_floors(folder, source, package)) == broken
