"""Sharded tensors (torch's DTensor), recognised without importing `torch.distributed.tensor`.

That import takes two seconds, which a run in one process should not spend.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes hold the rest of it, or a copy."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """This process's shard of a tensor: the same memory, without autograd."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def local_tensor(parameter: Any) -> Tensor:
    """The tensor this process computes with, after FSDP has gathered a parameter; with autograd."""
    return parameter.to_local() if is_sharded(parameter) else parameter


def num_replicas(tensor: Any) -> int:
    """Number of processes of the mesh that hold the same shard.

    The square of a norm over all parameters is the sum over all processes of |local|^2 / num_replicas.
    """
    if not is_sharded(tensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def as_sharded(shard: Tensor, like: Any) -> Tensor:
    """A DTensor of this process's shard, placed as `like` is; the same memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def shard_range(size: int, count: int, index: int) -> tuple[int, int]:
    """Start and stop of shard `index` of `count`; the last ones may be smaller or empty.

    >>> [shard_range(7, 3, index) for index in range(3)]
    [(0, 3), (3, 6), (6, 7)]
    """
    each = -(-size // count)
    return min(index * each, size), min((index + 1) * each, size)


def local_slices(tensor: Any) -> tuple[slice, ...]:
    """Which rows and columns of the whole tensor are in this process."""
    found = [(0, size) for size in tensor.shape]
    for dim, count, index in _splits(tensor).values():
        first, last = found[dim]
        start, stop = shard_range(last - first, count, index)
        found[dim] = first + start, first + stop
    return tuple(slice(*ends) for ends in found)


@torch.no_grad()
def gather(tensor: Any) -> Tensor:
    """The whole tensor, in every process, on the compute device of the mesh; collective.

    Not `full_tensor`: that is wrong where neither tp nor dp divides the rows evenly.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    mesh, splits = tensor.device_mesh, _splits(tensor)
    whole = local(tensor).to(device_of(mesh))
    for name in ("dp", "tp"):  # the reverse of the order of sharding
        if name in splits:
            dim, count, _ = splits[name]
            size = tensor.shape[dim]
            if name == "dp" and "tp" in splits and splits["tp"][0] == dim:
                start, stop = shard_range(size, *splits["tp"][1:])
                size = stop - start
            whole = join(whole, dim, size, count, mesh.get_group(name))
    return whole


def _splits(tensor: Any) -> dict[str, tuple[int, int, int]]:
    """Mesh axis -> (dimension of the tensor, number of shards, index of the local one).

    tp comes first: dp shards what tp left.
    """
    mesh, found = tensor.device_mesh, dict[str, tuple[int, int, int]]()
    for name in ("tp", "dp"):
        axis = (mesh.mesh_dim_names or ()).index(name)
        placement = tensor.placements[axis]
        if not placement.is_replicate():
            found[name] = placement.dim, mesh.size(axis), mesh.get_local_rank(name)
    return found


def join(own: Tensor, dim: int, size: int, count: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the shards of the group's processes along a dimension of `size`."""
    if count == 1:
        return own
    ends = [shard_range(size, count, index) for index in range(count)]
    padded_size = list(own.shape)
    padded_size[dim] = ends[0][1]
    padded = own.new_zeros(padded_size)
    padded.narrow(dim, 0, own.shape[dim]).copy_(own)
    shards = [torch.empty_like(padded) for _ in ends]
    dist.all_gather(shards, padded, group=group)
    lengths = [stop - start for start, stop in ends]
    return torch.cat([s.narrow(dim, 0, n) for s, n in zip(shards, lengths, strict=True)], dim)


def device_of(mesh: Any) -> torch.device:
    """The device on which this process of the mesh computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
