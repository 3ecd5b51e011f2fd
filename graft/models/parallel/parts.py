"""Tensors of which this process holds a part: torch's DTensor, told apart without importing it.

Whoever trains in one process should not wait two seconds for a library of many.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_split(tensor: Tensor) -> bool:
    """Whether other processes hold the rest of it, or a copy."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """The part of a tensor that is in this process: its own memory, without autograd."""
    with torch.no_grad():
        return tensor.to_local() if is_split(tensor) else tensor.detach()


def copies(tensor: Any) -> int:
    """How many processes of the grid hold the same numbers of it.

    The square of a norm over all parameters is the sum over all processes of |local|^2 / copies.
    """
    if not is_split(tensor):
        return dist.get_world_size() if dist.is_initialized() else 1
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


def part(size: int, parts: int, index: int) -> tuple[int, int]:
    """From where to where the index-th of so many parts goes; the last ones may be smaller or empty.

    >>> [part(7, 3, index) for index in range(3)]
    [(0, 3), (3, 6), (6, 7)]
    """
    each = -(-size // parts)
    return min(index * each, size), min((index + 1) * each, size)


def bounds(tensor: Any) -> tuple[slice, ...]:
    """Which rows and columns of the whole tensor are in this process."""
    found = [(0, size) for size in tensor.shape]
    for dim, count, index in _splits(tensor).values():
        first, last = found[dim]
        start, stop = part(last - first, count, index)
        found[dim] = first + start, first + stop
    return tuple(slice(*ends) for ends in found)


@torch.no_grad()
def gather(tensor: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The whole tensor, in every process, on the device that the grid computes on; collective.

    By hand: DTensor's own way back is wrong where neither tp nor dp divides the rows evenly.
    """
    dtype = dtype or tensor.dtype
    if not is_split(tensor):
        return tensor.detach().to(dtype)
    mesh, splits = tensor.device_mesh, _splits(tensor)
    whole = local(tensor).to(device_of(mesh), dtype)
    for name in ("dp", "tp"):  # the other way round than they were split
        if name in splits:
            dim, count, _ = splits[name]
            size = tensor.shape[dim]
            if name == "dp" and "tp" in splits and splits["tp"][0] == dim:
                start, stop = part(size, *splits["tp"][1:])
                size = stop - start
            whole = _join(whole, dim, size, count, mesh.get_group(name))
    return whole


def _splits(tensor: Any) -> dict[str, tuple[int, int, int]]:
    """Axis of the grid -> the tensor's dimension, in how many parts, which of them is here.

    tp comes first: dp divides what it left.
    """
    mesh, found = tensor.device_mesh, dict[str, tuple[int, int, int]]()
    for name in ("tp", "dp"):
        axis = (mesh.mesh_dim_names or ()).index(name)
        placement = tensor.placements[axis]
        if not placement.is_replicate():
            found[name] = placement.dim, mesh.size(axis), mesh.get_local_rank(name)
    return found


def _join(own: Tensor, dim: int, size: int, count: int, group: dist.ProcessGroup) -> Tensor:
    """Parts of a dimension of `size`, one in each process of the group, side by side."""
    if count == 1:
        return own
    ends = [part(size, count, index) for index in range(count)]
    padded_size = list(own.shape)
    padded_size[dim] = ends[0][1]
    padded = own.new_zeros(padded_size)
    padded.narrow(dim, 0, own.shape[dim]).copy_(own)
    parts = [torch.empty_like(padded) for _ in ends]
    dist.all_gather(parts, padded, group=group)
    lengths = [stop - start for start, stop in ends]
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, lengths, strict=True)], dim)


def device_of(mesh: Any) -> torch.device:
    """Where this process of the grid computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
