"""The choice of device and dtype."""

from __future__ import annotations

import platform

import torch


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
