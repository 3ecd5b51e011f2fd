"""What a device can do, and modules without memory of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities of GPU generations."""


class _NoDraws(TorchFunctionMode):
    """Leaves new weights as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (init.normal_, init.uniform_, init.kaiming_uniform_):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    """Build modules on the meta device; to draw weights there would import torch's compiler, for a second."""
    with torch.device("meta"), _NoDraws():
        yield


def allocate(module: nn.Module, device: torch.device | str) -> None:
    """Give a module of the meta device memory that nothing was written to yet.

    torch's `to_empty` asks the tensors of the meta device, which imports sympy, for seconds.
    """
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program has 227 KB of it, as on Hopper and a server's Blackwell; others have 99 or 163."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def why_no_kernels(device: torch.device) -> str:
    """Why our Triton kernels do not run on a device; empty if they do."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if torch.version.cuda is not None and torch.cuda.get_device_capability(device) < AMPERE:
        return "this GPU is older than the Ampere generation, for which they are written"
    from graft.models.kernels.launch import why_not_started

    return why_not_started()


def has_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run on the device; otherwise plain PyTorch computes the same."""
    return not why_no_kernels(device)
