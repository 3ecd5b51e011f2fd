"""Many small tensors to a device in one copy that nobody waits for.

A copy from ordinary memory makes the host wait until the device has it, and the device wait for the
host's next order. So the tensors are laid side by side in one pinned buffer, sent in one go, and cut
apart again on the other side, where each is a view of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes. Each tensor starts at such an address, as if it had been allocated alone."""


def transfer(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same tensors on the device. On a GPU the copy may still be under way; its stream knows."""
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
    # torch keeps pinned memory for reuse, and lets nobody have it before the copy is done
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    for name, tensor in tensors.items():
        _cut(buffer, places[name], tensor).copy_(tensor)
    moved = buffer.to(device, non_blocking=True)
    return {name: _cut(moved, places[name], tensor) for name, tensor in tensors.items()}


def _cut(buffer: Tensor, place: slice, like: Tensor) -> Tensor:
    return buffer[place].view(like.dtype).view(like.shape)
