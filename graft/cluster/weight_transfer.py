"""Send weights to workers: through Ray's object store, or by broadcast.

    store        packed once, fetched by each node: works anywhere, also while workers come and go
    broadcast    a process group of the learner and all workers, made again when the workers change:
                 NCCL between GPUs, gloo elsewhere; the store keeps one copy for workers that start later

Ray shares the memory of NumPy arrays but not of torch tensors, and NumPy has no bfloat16: tensors are sent
as raw bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}


def packed(weights: Mapping[str, Tensor]) -> dict[str, tuple[str, np.ndarray]]:
    """Name -> (dtype, its bits), in the host's memory."""
    found: dict[str, tuple[str, np.ndarray]] = {}
    for name in weights:
        tensor = weights[name].detach().to("cpu").contiguous()
        bits = tensor.view(BITS[tensor.dtype.itemsize]).numpy()
        found[name] = str(tensor.dtype).removeprefix("torch."), bits
    return found


class UnpackedWeights(Mapping[str, Tensor]):
    """The tensors of sent weights. Their memory is shared by a node and read-only, so each is copied when
    it is read: a reader that takes them one by one holds one at a time."""

    def __init__(self, sent: Mapping[str, tuple[str, np.ndarray]]) -> None:
        self.sent = sent

    def __getitem__(self, name: str) -> Tensor:
        dtype, bits = self.sent[name]
        return torch.from_numpy(bits.copy()).view(getattr(torch, dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self.sent)

    def __len__(self) -> int:
        return len(self.sent)


@dataclass(frozen=True, slots=True)
class WeightBroadcast:
    """Address, ranks and size of a broadcast group."""

    host: str
    port: int
    rank: int
    world: int
    key: str
    """Unique: a group must not read keys that another has left in the store."""
    backend: str
    deadline: float


def join(group_spec: WeightBroadcast) -> Any:
    """A separate process group, beside any that the process has already."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    seconds = timedelta(seconds=group_spec.deadline)
    store = PrefixStore(
        group_spec.key,
        TCPStore(group_spec.host, group_spec.port, is_master=False, timeout=seconds),
    )
    if group_spec.backend == "nccl":
        return dist.ProcessGroupNCCL(store, group_spec.rank, group_spec.world, seconds)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, group_spec.rank, group_spec.world, seconds)  # type: ignore[attr-defined]


_groups: dict[str, Any] = {}
"""The latest group of this process: key -> process group."""


def group_of(group_spec: WeightBroadcast) -> Any:
    if group_spec.key not in _groups:
        _groups.clear()
        _groups[group_spec.key] = join(group_spec)
    return _groups[group_spec.key]


def send(group_spec: WeightBroadcast, weights: Mapping[str, Tensor]) -> None:
    """Send from rank 0, tensor by tensor."""
    group = group_of(group_spec)
    for name in weights:
        _broadcast(group, _on_link(weights[name].detach(), group_spec.backend))


def receive(
    group_spec: WeightBroadcast, names: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Receive on the other ranks; `names` are dtypes and sizes in the order of sending."""
    group = group_of(group_spec)
    device = "cuda" if group_spec.backend == "nccl" else "cpu"
    found: dict[str, Tensor] = {}
    for name, (dtype, size) in names.items():
        found[name] = torch.empty(size, dtype=getattr(torch, dtype), device=device)
        _broadcast(group, found[name])
    return found


def described(weights: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights.items()
    }


def _on_link(tensor: Tensor, backend: str) -> Tensor:
    return tensor.to("cuda" if backend == "nccl" else "cpu").contiguous()


def _broadcast(group: Any, tensor: Tensor) -> None:
    flat = tensor.view(-1)
    if flat.dtype == torch.bfloat16 and flat.device.type == "cpu":
        flat = flat.view(torch.uint8)  # gloo sends bytes
    group.broadcast(flat, 0).wait()
