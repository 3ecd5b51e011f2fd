"""Launches of kernels: whether they are possible here, and how they overlap.

A kernel's programs start while the last ones of the kernel before it end. A decode step is some 250 kernels,
each of a few microseconds, of which the start and the end are a good part. A launch marked as dependent
(CUDA's programmatic dependent launch, from Hopper on) may begin before the previous kernel of its stream is
complete. It must wait before it touches memory, which `after_previous` does; then it lets the next kernel
begin. Any other launch waits for all that is before it, as ever.
"""

from __future__ import annotations

from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

HOPPER = (9, 0)
"""The compute capability from which a launch may depend on the one before it."""


@triton.jit
def after_previous():
    """First in a kernel that is launched with `chained`."""
    gdc_wait()
    gdc_launch_dependents()


@cache
def chained(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch: the constant CHAINED, and how."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {"CHAINED": False}
    if torch.cuda.get_device_capability(device) < HOPPER:
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


def why_not_started() -> str:
    """Why Triton does not start; empty if it does. Some versions compile a part of themselves here, which
    needs a C compiler."""
    try:
        driver.active.get_current_target()
    except (RuntimeError, OSError, SubprocessError) as error:
        return f"Triton does not start: {error}"
    return ""
