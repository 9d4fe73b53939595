"""What every kernel wrapper of this package needs: preconditions, tile sizes, the device to launch on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton

# kernels are compiled or interpreted from their decoration on, so this is fixed at import
INTERPRET: bool = bool(triton.knobs.runtime.interpret)


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)


def require_one_device(**tensors: torch.Tensor) -> None:
    """All tensors lie on one device, on which Triton can run."""
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError("tensors lie on several devices: " + ", ".join(f"{name} on {device}" for name, device in devices.items()))
    if not INTERPRET and (kind := next(iter(devices.values())).type) == "cpu":
        raise ValueError(f"compiled Triton kernels take no tensors on {kind}; set TRITON_INTERPRET=1 before gpu_impl is imported")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels may be launched before the one ahead of them has ended, and wait for it themselves (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
