"""An implementation: loaded by name, called through the contract, its refusals and its errors told apart."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import reference
from conformance.capabilities import Capabilities, read_capabilities
from conformance.cheaper import look_builtins_up_once, with_room
from conformance.findings import Broken, Refused

CONTRACT = (
    "prepare_prefill",
    "prepare_decode",
    "compute_slot_mapping",
    "store_kvcache",
    "prefill_attention",
    "decode_attention",
    "last_token_logits",
    "parallel_logits",
    "sample",
    "BlockManager",
)
OPTIONAL_KEYWORDS = ("device", "noise", "seed", "group")
REFUSALS = (NotImplementedError, ValueError, AssertionError)


class CannotLoad(Exception):
    """The argument of --impl names nothing that could be judged. The message is one sentence."""


class Implementation:
    """Some functions of the contract, offered by a module or by an object in one."""

    def __init__(self, name: str, target: Any, device: torch.device) -> None:
        self.name = name
        self.target = target
        self.device = device
        self.offered: dict[str, Callable[..., Any]] = {
            function: getattr(target, function) for function in CONTRACT if callable(getattr(target, function, None))
        }
        if not self.offered:
            raise CannotLoad(f"{name} offers none of the contract's functions ({', '.join(CONTRACT)})")
        stated = getattr(target, "CAPABILITIES", {})
        if not isinstance(stated, Mapping):
            raise CannotLoad(f"CAPABILITIES of {name} is a {type(stated).__name__}, it must be a mapping")
        try:
            self.capabilities: Capabilities = read_capabilities(stated)
        except (TypeError, ValueError) as error:
            raise CannotLoad(f"{name}: {error}") from error

    def takes(self, function: str, keyword: str) -> bool:
        """Whether the function has this optional keyword: what is not taken is not asked."""
        try:
            parameters = inspect.signature(self.offered[function]).parameters
        except (TypeError, ValueError):
            return True  # a callable that does not tell its signature, a compiled one say
        return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @with_room
    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Call an offered function. Raises Refused, or Broken when it raises anything else than a clear refusal."""
        called = self.offered[function]
        self._require_signature(function, args, kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key not in OPTIONAL_KEYWORDS or self.takes(function, key)}
        try:
            result = called(*args, **kwargs)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except REFUSALS as error:
            raise Refused(one_line(error)) from error
        except Exception as error:  # whatever an implementation raises is a finding about it, not an error of the judge
            leave_a_poisoned_gpu(error)
            raise Broken(
                ("raised", one_line(error)),
                ("at", innermost_line(error)),
                ("if this is a limit", "state it in CAPABILITIES, or raise NotImplementedError or ValueError: then it is a refusal"),
            ) from error
        return result

    def _require_signature(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature = inspect.signature(self.offered[function])
        except (TypeError, ValueError):
            return
        required = {key: value for key, value in kwargs.items() if key not in OPTIONAL_KEYWORDS}
        try:
            signature.bind(*args, **required)
        except TypeError as error:
            hint = " (this is a class: name an instance)" if inspect.isclass(self.target) else ""
            raise Broken(
                ("signature", f"{function}{signature} cannot be called as the contract says: {error}{hint}"),
                ("contract", f"{function}{inspect.signature(getattr(reference, function))}"),
            ) from error


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if not text and isinstance(error, AssertionError):
        text = innermost_line(error)
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def innermost_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown place"


def leave_a_poisoned_gpu(error: Exception) -> None:
    """After an illegal access every later CUDA call of this process fails; a worker process is given up so that the rest is judged."""
    text = str(error).lower()
    sticky = "cuda error" in text and any(word in text for word in ("illegal", "misaligned", "launch failure", "assert"))
    if sticky and "PYTEST_XDIST_WORKER" in os.environ:
        print(one_line(error), file=sys.stderr, flush=True)
        os._exit(70)


def load_implementation(spec: str, device: torch.device) -> Implementation:
    """`pkg.module`, `pkg.module:object` or `path/to/file.py` (also with `:object`). Raises CannotLoad with one sentence."""
    place, _, attribute = spec.partition(":")
    looks_like_a_path = place.endswith(".py") or os.sep in place
    module = load_file(place) if looks_like_a_path else load_module(place)
    target = module
    for name in attribute.split(".") if attribute else []:
        if not hasattr(target, name):
            raise CannotLoad(f"--impl {spec}: {place} has no attribute {name!r}")
        target = getattr(target, name)
    look_builtins_up_once()
    return Implementation(spec, target, device)


def load_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise CannotLoad(f"--impl {name}: there is no module {error.name!r} on the path") from error
        raise CannotLoad(f"--impl {name}: importing it needs {error.name!r}, which is not installed") from error
    except Exception as error:  # an import runs the user's code: anything can come out of it
        raise CannotLoad(f"--impl {name}: importing it raised {one_line(error)} ({innermost_line(error)})") from error
    finally:
        sys.path.remove(os.getcwd())


def load_file(place: str) -> Any:
    path = Path(place).resolve()
    if not path.is_file():
        raise CannotLoad(f"--impl {place}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CannotLoad(f"--impl {place}: this is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # as in load_module
        raise CannotLoad(f"--impl {place}: running it raised {one_line(error)} ({innermost_line(error)})") from error
    return module
