"""What every replay script holds: conformance.replay copies this file's text into it, so it imports torch and the standard library."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import math
import os
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# dtype, shape, stride, offset, storage: an index, or (elements, what fills its gaps)
Place = tuple[str, tuple[int, ...], tuple[int, ...], int, Any]


def load(spec: str) -> Any:
    """module, module:object, path/to/file.py or path/to/file.py:object."""
    place, _, attribute = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    if place.endswith(".py") or os.sep in place:
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        file_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert file_spec is not None and file_spec.loader is not None, f"{place} is no Python file"
        target = importlib.util.module_from_spec(file_spec)
        sys.modules[path.stem] = target
        file_spec.loader.exec_module(target)
    else:
        target = importlib.import_module(place)
    for name in attribute.split(".") if attribute else []:
        target = getattr(target, name)
    return target


def unpack(text: str) -> torch.Tensor:
    raw = zlib.decompress(base64.b64decode(text))
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone() if raw else torch.empty(0, dtype=torch.uint8)


def rebuild(places: dict[str, Place], values: dict[str, Any], storages: list[str], device: str) -> dict[str, torch.Tensor]:
    """The tensors as they were handed out: same bits, same strides, same offset in a storage of the same size."""
    raw = [unpack(text).to(device) for text in storages]
    tensors = {}
    for name, (dtype_name, shape, stride, offset, storage) in places.items():
        dtype = getattr(torch, dtype_name)
        if isinstance(storage, int):
            tensors[name] = raw[storage].view(dtype).as_strided(shape, stride, offset)
        else:
            elements, gap = storage
            whole = torch.full((elements,), gap, dtype=dtype, device=device)
            tensors[name] = whole.as_strided(shape, stride, offset)
            tensors[name].copy_(torch.tensor(values[name], dtype=dtype).reshape(shape))
    return tensors


def whole_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage that a tensor lies in, as integers."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((elements,), (1,), 0).view(INTEGER[tensor.element_size()])


def store_rows(tensors: dict[str, torch.Tensor], slots: list[int]) -> None:
    """What store_kvcache must do: row t of key and value to slot slots[t], bit for bit; -1 is skipped."""
    for rows_name, cache_name in (("key", "k_cache"), ("value", "v_cache")):
        rows, cache = tensors[rows_name], tensors[cache_name]
        integer = INTEGER[cache.element_size()]
        for t, slot in enumerate(slots):
            if slot >= 0:
                cache.view(integer)[slot // cache.shape[1], slot % cache.shape[1]] = rows.view(integer)[t]


def changed_elements(got: dict[str, torch.Tensor], must: dict[str, torch.Tensor]) -> list[str]:
    """The first wrong element of each storage: what was written wrongly, or written at all."""
    lines, seen = [], set()
    for name, tensor in got.items():
        if tensor.untyped_storage().data_ptr() in seen:
            continue
        seen.add(tensor.untyped_storage().data_ptr())
        now, wanted = whole_bits(tensor).cpu(), whole_bits(must[name]).cpu()
        wrong = (now != wanted).nonzero().flatten()
        if len(wrong):
            element = int(wrong[0])
            digits = 2 * tensor.element_size()
            got_bits, want_bits = (f"0x{int(x[element]) & (16**digits - 1):0{digits}x}" for x in (now, wanted))
            sharing = {n: t for n, t in got.items() if t.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()}
            told = f"bits are {got_bits}, they must be {want_bits}"
            lines.append(f"{element_name(sharing, element)}: {told} ({len(wrong)} elements are wrong)")
    return lines


def element_name(sharing: dict[str, torch.Tensor], element: int) -> str:
    for name, tensor in sharing.items():
        rest, index = element - tensor.storage_offset(), [0] * tensor.dim()
        for axis in sorted(range(tensor.dim()), key=lambda a: -tensor.stride()[a]):
            if tensor.stride(axis) > 0 and tensor.shape[axis] > 1 and rest >= 0:
                index[axis] = min(rest // tensor.stride(axis), tensor.shape[axis] - 1)
                rest -= index[axis] * tensor.stride(axis)
        if rest == 0 and tensor.numel():
            return f"{name}{index}"
    first = next(iter(sharing))
    return f"beside {first}: element {element} of its storage, whose element {sharing[first].storage_offset()} is the tensor's first"


def wrong_elements(got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> list[str]:
    """The first element that is further from `want` than `limit` lets it be; where the limit is infinite nothing is asked."""
    if tuple(got.shape) != tuple(want.shape):
        return [f"result has shape {tuple(got.shape)}, it must be {tuple(want.shape)}"]
    values = got.detach().to("cpu", torch.float64)
    wrong = ~((values - want).abs() <= limit) & (values != want) & (limit < math.inf)
    if not bool(wrong.any()):
        return []
    index = tuple(int(i) for i in wrong.nonzero()[0])
    got_value, want_value, limit_value = (float(t[index]) for t in (values, want, limit))
    told = f"got {got_value:.8g}, want {want_value:.8g}, limit {limit_value:.3g}"
    return [f"result{list(index)}: {told} ({int(wrong.sum())} of {wrong.numel()} elements are wrong)"]


def unmet_claims(result: Any, claims: list[tuple[str, Any, str]]) -> list[str]:
    """claims: (name, an index or "value", "type", "shape" or "dtype", what it must be)."""
    lines = []
    for name, what, wanted in claims:
        value = getattr(result, name, result)
        if isinstance(what, tuple):
            inside = len(what) == value.dim() and all(i < n for i, n in zip(what, value.shape, strict=True))
            told, label = (str(value[what].item()) if inside else "not there"), f"{name}{list(what)}"
        else:
            shape, dtype = tuple(getattr(value, "shape", ())), getattr(value, "dtype", "")
            told, label = str({"value": value, "type": type(value).__name__, "shape": shape, "dtype": dtype}[what]), name
        if told != wanted:
            lines.append(f"{label}: got {told}, want {wanted}")
    return lines


def overwritten(result: torch.Tensor, call_again: Any, inputs: list[torch.Tensor]) -> list[str]:
    """The first element of a result that later calls, with other numbers, change: several, since buffers may be used in turn."""
    before = result.clone()
    for tensor in inputs:
        if tensor.is_floating_point():
            tensor.zero_()
    for _ in range(4):
        call_again()
    changed = (result.contiguous().view(torch.uint8) != before.contiguous().view(torch.uint8)).flatten().nonzero().flatten()
    if not len(changed):
        return []
    place = int(changed[0]) // result.element_size()
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), result.shape)]
    told = f"was {before.flatten()[place].item():.8g}, is {result.flatten()[place].item():.8g} after later calls"
    return [f"result{index}: {told}"]


def replay(case: dict[str, Any], storages: list[str], spec: str) -> int:
    """Make the call and say what is wrong with it. Returns the exit status: 1 wrong, 0 right, 2 where there is nothing to compare with."""
    if case["device"] == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    function, values = case["function"], case["values"]
    called = getattr(load(spec), function)
    handed = rebuild(case["tensors"], values, storages, case["device"])
    must = rebuild(case["tensors"], values, storages, case["device"])
    if function == "store_kvcache":
        store_rows(must, must["slot_mapping"].tolist())
    expected = [unpack(storages[i]).view(torch.float64).view(case["want_shape"]) for i in case["want"]]  # the values and their limits
    if expected and "q" in handed:
        torch.full_like(handed["q"], math.nan)  # freed at once: memory that is never written then shows as NaN
    everything: dict[str, Any] = {**values, **handed}

    def call() -> Any:
        return called(*[everything[name] for name in case["args"]], **{name: everything[name] for name in case["kwargs"]})

    try:
        result = call()
    except Exception:  # whatever the judged function raises is the answer that the replay is asked for
        traceback.print_exc()
        print(f"wrong: {spec}.{function} raised")
        return 1
    problems = changed_elements(handed, must)
    if expected:
        problems += wrong_elements(result, *expected)
    problems += unmet_claims(result, case["claims"])
    if case["twice"]:
        problems += overwritten(result, call, list(handed.values()))
    for line in problems:
        print(line)
    if problems:
        print(f"wrong: {spec}.{function} gives another result than the contract")
        return 1
    if not expected and not case["claims"] and not case["twice"] and function != "store_kvcache":
        print(f"result: {result}")
        if function == "sample":
            print("a call of sample is one draw a row: this script shows it, whether draws are distributed as they must be only the suite can tell")
        else:
            print("this script holds no expected value: it shows the result, which the report at its top says is wrong, and cannot judge another")
        return 2
    print(f"right: {spec}.{function} gives what the contract says; if the report differs, the fault needs the calls before this one")
    return 0
