"""Many small tensors to a device in one asynchronous copy.

A copy from pageable memory makes the host wait for the device, and then the device for the host's
next launch. So the tensors are placed side by side in one pinned buffer, copied at once, and each is
a view of the copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes. Each tensor starts at such an address, as if it had been allocated alone."""


def transfer(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same tensors on the device. On a GPU the copy may still run; its stream orders later work."""
    if all(tensor.device == device for tensor in tensors.values()):
        return dict(tensors)
    return _side_by_side(tensors, device, pinned=device.type == "cuda")


def _side_by_side(
    tensors: Mapping[str, Tensor], device: torch.device, pinned: bool
) -> dict[str, Tensor]:
    places: dict[str, slice] = {}
    end = 0
    for name, tensor in tensors.items():
        places[name] = slice(end, end + tensor.numel() * tensor.element_size())
        end = -(-places[name].stop // ALIGNMENT) * ALIGNMENT
    # torch reuses pinned memory, but not before the copy is done
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    for name, tensor in tensors.items():
        _cut(buffer, places[name], tensor).copy_(tensor)
    moved = buffer.to(device, non_blocking=True)
    return {name: _cut(moved, places[name], tensor) for name, tensor in tensors.items()}


def _cut(buffer: Tensor, place: slice, like: Tensor) -> Tensor:
    return buffer[place].view(like.dtype).view(like.shape)
