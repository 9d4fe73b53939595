"""A failure as a stand-alone script: the call of the shrunk case, rebuilt bit for bit, with what it should have given.

A script needs torch and the user's module, nothing of this project. Its text is the report, the case's literals, replay_script.py as it
stands, and the tensors' storages.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import re
import zlib
from pathlib import Path
from typing import Any

import torch

import reference
from conformance import replay_script
from conformance.clauses import Clause
from conformance.findings import OVERWRITTEN, Finding
from conformance.implementation import OPTIONAL_KEYWORDS, Implementation

MOST_CHARACTERS = 200_000  # of a script
MOST_BYTES = 512 * 2**20  # of storages that are packed at all
MOST_LITERALS = 4000  # elements of an integer tensor that is written out
TEMPLATE = Path(__file__).with_name("replay_script.py")
SIMPLE = (int, float, bool, str, type(None))


class CannotReplay(Exception):
    """Why there is no script, in a few words."""


class Packed:
    """The values of a script: literals, tensors as views of storages, storages as text."""

    def __init__(self, before: dict[int, torch.Tensor]) -> None:
        self.before = before  # data_ptr of a storage -> its bits when the implementation was called
        self.literals: dict[str, str] = {}
        self.tensors: dict[str, Any] = {}
        self.storages: list[str] = []
        self.uses_sequences = False
        self._known: dict[int, int] = {}  # data_ptr of a storage -> its index
        self._bytes = 0

    def put(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._put_tensor(name, value)
        else:
            self.literals[name] = self._literal(name, value)

    def _literal(self, name: str, value: Any) -> str:
        if isinstance(value, torch.device):
            return repr(str(value))
        if isinstance(value, SIMPLE):
            return f"float({str(value)!r})" if isinstance(value, float) and value - value != 0 else repr(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            self.uses_sequences = True
            parts = [f"{field}={self._literal(name, part)}" for field, part in zip(value._fields, value, strict=True)]
            return f"SequenceState({', '.join(parts)})"
        if isinstance(value, (list, tuple)):
            whole = list(value)
            if len(whole) > 8 and all(type(x) is int for x in whole) and whole == list(range(whole[0], whole[0] + len(whole))):
                return f"list(range({whole[0]}, {whole[0] + len(whole)}))"
            between = ",\n    " if any(isinstance(part, tuple) for part in whole) else ", "
            return f"[{between.join(self._literal(name, part) for part in whole)}]"
        raise CannotReplay(f"{name} is a {type(value).__name__}, which no script can hold")

    def _put_tensor(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        whole = self._contents(tensor)
        place: Any = self._gap(tensor, whole)
        if place is None:
            place = self._pack(tensor.untyped_storage().data_ptr(), whole)
        else:
            view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            self.literals[name] = str(view.tolist())
        self.tensors[name] = (dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), place)

    def _contents(self, tensor: torch.Tensor) -> torch.Tensor:
        """The storage of a tensor, one-dimensional, with the bits that it had when the implementation was called."""
        storage = tensor.untyped_storage()
        self._bytes += storage.nbytes()
        if self._bytes > MOST_BYTES:
            raise CannotReplay(f"its tensors take more than {MOST_BYTES >> 20} MiB")
        kept = self.before.get(storage.data_ptr())
        if kept is not None:
            return kept.cpu().view(tensor.dtype)
        return tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).cpu()

    def _gap(self, tensor: torch.Tensor, whole: torch.Tensor) -> tuple[int, int] | None:
        """(elements of the storage, the one value around the tensor's elements) of an integer tensor that can be written out."""
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.numel() > MOST_LITERALS:
            return None
        around = torch.ones(len(whole), dtype=torch.bool)
        around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
        gaps = whole[around].unique().tolist()
        return (len(whole), gaps[0] if gaps else 0) if len(gaps) <= 1 else None

    def _pack(self, pointer: int, whole: torch.Tensor) -> int:
        if pointer not in self._known:
            self._known[pointer] = self.pack_values(whole)
        return self._known[pointer]

    def pack_values(self, values: torch.Tensor) -> int:
        raw = values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
        self.storages.append(base64.b64encode(zlib.compress(raw, 9)).decode())
        return len(self.storages) - 1


def write_replay(clause: Clause, finding: Finding, report: str, implementation: Implementation, folder: Path) -> str:
    """Write the script of a finding into `folder`. Returns the line of the report that says how to run it, or why there is none."""
    try:
        script = script_of(finding, report, implementation)
    except CannotReplay as reason:
        return f"no script: {reason}"
    path = folder / f"{clause.id}-{hashlib.sha256(script.encode()).hexdigest()[:4]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    return f"python {path}        (needs torch and {implementation.name.split(':')[0]}, nothing else)"


def script_of(finding: Finding, report: str, implementation: Implementation) -> str:
    call = finding.call
    if finding.script:
        return script_of_body(finding.script, report, implementation)
    if call is None:
        raise CannotReplay("the failure is no single call of the implementation")
    packed = Packed(call.before)
    parameters = list(inspect.signature(getattr(reference, call.function)).parameters)
    names = parameters[: len(call.args)]
    kwargs = {key: value for key, value in call.kwargs.items() if key not in OPTIONAL_KEYWORDS or implementation.takes(call.function, key)}
    for name, value in [*zip(names, call.args, strict=True), *kwargs.items()]:
        packed.put(name, value)
    want: tuple[int, ...] = ()
    if call.want is not None:
        expected = call.want.detach().cpu().double()
        limit = torch.as_tensor(call.limit, dtype=torch.float64).cpu().expand(expected.shape)
        want = packed.pack_values(expected), packed.pack_values(limit)
    case = {
        "function": call.function,
        "device": str(implementation.device),
        "args": names,
        "kwargs": list(kwargs),
        "tensors": packed.tensors,
        "want": want,
        "want_shape": tuple(call.want.shape) if call.want is not None else (),
        "twice": any(text == OVERWRITTEN for _, text in finding.facts),  # the call is made again, and the first result must stay
        "claims": [] if call.want is not None else claims_of(finding.facts),
    }
    script = text_of(case, packed, report, implementation.name)
    if len(script) > MOST_CHARACTERS:
        raise CannotReplay(f"it would take {len(script) // 1000} kB, {MOST_CHARACTERS // 1000} are the most")
    return script


def script_of_body(body: str, report: str, implementation: Implementation) -> str:
    """A script whose check brings its own code."""
    head = ["import importlib.util", "import os", "import sys", "from pathlib import Path", "from typing import Any", ""]
    setting = ["os.environ.setdefault('TRITON_INTERPRET', '1')"] if implementation.device.type == "cpu" else []
    spec = f"SPEC = sys.argv[1] if len(sys.argv) > 1 else {implementation.name!r}"
    return "\n".join([*opening(report), *head, *setting, spec, "", "", inspect.getsource(replay_script.load), "", body])


def opening(report: str) -> list[str]:
    """The script's docstring: the report, and how to read the exit status."""
    quoted = report.replace("\\", "\\\\").replace('"""', "'''")
    return [
        '"""' + quoted, "", "Exit status: 1 if this call is wrong (or killed), 0 if it is right, 2 where this script cannot tell.",
        "An argument names another implementation to call in place of the one that failed.", '"""', "",
    ]  # fmt: skip


def text_of(case: dict[str, Any], packed: Packed, report: str, name: str) -> str:
    lines = opening(report)
    if packed.uses_sequences:
        fields = ", ".join(repr(field) for field in reference.SequenceState._fields)
        lines += ["from collections import namedtuple", "", f"SequenceState = namedtuple('SequenceState', [{fields}])", ""]
    lines += [f"{literal} = {text}" for literal, text in packed.literals.items()]
    body = TEMPLATE.read_text(encoding="utf-8")
    lines += ["", "# --- how the call is made and compared: the same in every such script ---", "", body[body.index("import base64") :], ""]
    lines += ["# --- the call: tensors are (dtype, shape, stride, offset, storage), storages zlib in base64 ---", "", "CASE = {"]
    lines += [f"    {key!r}: {value!r}," for key, value in case.items() if key != "tensors"]
    lines += ["    'tensors': {", *(f"        {key!r}: {value!r}," for key, value in case["tensors"].items()), "    },"]
    lines += ["    'values': {" + ", ".join(f"{literal!r}: {literal}" for literal in packed.literals) + "},", "}"]
    lines += ["STORAGES = [", *(f"    {storage!r}," for storage in packed.storages), "]", ""]
    lines += [f"sys.exit(replay(CASE, STORAGES, sys.argv[1] if len(sys.argv) > 1 else {name!r}))", ""]
    return "\n".join(lines)


def claims_of(facts: list[tuple[str, str]]) -> list[tuple[str, Any, str]]:
    """What a report says of the result's elements, fields, shapes and dtypes: the facts `NAME[i]  is X, it must be Y` and their like."""
    claims: list[tuple[str, Any, str]] = []
    for label, text in facts:
        if label == "returned":
            claims += claims_of_result(text)
            continue
        name, _, index = label.partition("[")
        if not name.isidentifier():
            continue
        if told := re.match(r"is (\S+), it must be (-?[\d.e+]+)", text):
            claims.append((name, tuple(int(i) for i in index.rstrip("]").split(",")) if index else "value", told.group(2)))
        elif told := re.match(r"has shape \(.*?\), it must be (\(.*?\))", text):
            claims.append((name, "shape", told.group(1)))
        elif told := re.match(r"has dtype \S+, the contract says (torch\.\w+)", text):
            claims.append((name, "dtype", told.group(1)))
        elif text.startswith("is None although"):
            claims.append((name, "type", "Tensor"))
        elif re.match(r"is (a tensor although|not None)", text):
            claims.append((name, "type", "NoneType"))
    return claims


def claims_of_result(text: str) -> list[tuple[str, Any, str]]:
    """The same of the fact `returned`: a wrong type, shape or dtype of the whole result."""
    if told := re.match(r"an? \w+, the contract says (a tensor|None)", text):
        return [("result", "type", {"a tensor": "Tensor", "None": "NoneType"}[told.group(1)])]
    if told := re.match(r"shape \(.*?\).*?, the contract says (?:a tensor of shape )?(\(.*?\))", text):
        return [("result", "shape", told.group(1))]
    if told := re.match(r"dtype \S+, q has (torch\.\w+)", text):
        return [("result", "dtype", told.group(1))]
    return []
