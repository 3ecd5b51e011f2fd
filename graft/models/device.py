"""The choice of device and dtype."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities of GPU generations."""


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: give auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch finds no GPU; use device=auto")
    return device


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


def has_native_bf16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products run in hardware; emulated ones are hundreds of times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(probe is not None and probe())


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype to use, and a note for the user if it is not the requested one."""
    if name == "auto":
        native = device.type != "cpu" and has_native_bf16(device)
        return (torch.bfloat16 if native else torch.float32), ""
    if name == "bfloat16" and not has_native_bf16(device):
        return torch.float32, (
            f"dtype=bfloat16, but this {device.type} emulates it, hundreds of times slower; "
            "float32 is used instead"
        )
    return getattr(torch, name), ""


def prefer_blas(device: torch.device, dtype: torch.dtype) -> None:
    """Leave the products of float32 to BLAS on ARM, in this process; elsewhere nothing changes.

    oneDNN takes a quarter to two fifths more time for the few rows of a decode step, and no less for
    many (Neoverse-N1). bfloat16 needs it.
    """
    if device.type == "cpu" and platform.machine() == "aarch64":
        torch.backends.mkldnn.enabled = dtype != torch.float32


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
