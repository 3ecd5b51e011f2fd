"""Where to compute, and in what precision."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def choose_device(asked: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(asked)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {asked!r} was asked for, but torch sees no GPU; use device=auto")
    return device


def has_native_bf16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products run in hardware; emulated ones are hundreds of times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(probe is not None and probe())


def choose_dtype(asked: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype to use, and a sentence for the user where it is not the one asked for."""
    if asked == "auto":
        native = device.type != "cpu" and has_native_bf16(device)
        return (torch.bfloat16 if native else torch.float32), ""
    if asked == "bfloat16" and not has_native_bf16(device):
        return torch.float32, (
            f"bfloat16 was asked for, but this {device.type} computes it in software, hundreds of "
            "times slower; float32 is used instead"
        )
    return getattr(torch, asked), ""


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run there; without them the same is computed by plain PyTorch."""
    return device.type == "cuda" and find_spec("triton") is not None
