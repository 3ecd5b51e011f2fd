"""Tensors of which this process holds a part: torch's DTensor, told apart without importing it.

Whoever trains in one process should not wait two seconds for a library of many.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def is_split(tensor: Tensor) -> bool:
    """Whether other processes hold the rest of it, or a copy."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """The part of a tensor that is in this process: its own memory, without autograd."""
    with torch.no_grad():
        return tensor.to_local() if is_split(tensor) else tensor.detach()


def copies(tensor: Any) -> int:
    """How many processes hold the same numbers of it.

    The square of a norm over all parameters is the sum over all processes of |local|^2 / copies.
    """
    if not is_split(tensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def as_split(part: Tensor, like: Any) -> Tensor:
    """This process's part of a tensor that is split as another is; the same memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
