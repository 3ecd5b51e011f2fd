"""Send weights to workers: through Ray's object store, or by broadcast.

    store        packed once, fetched by each node: works anywhere, also while workers come and go
    broadcast    a process group of the learner and all workers, made again when the workers change:
                 NCCL between GPUs, gloo elsewhere; the store keeps one copy for workers that start later

Ray shares the memory of NumPy arrays but not of torch tensors, and NumPy has no bfloat16: tensors are sent
as raw bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from graft.train.distributed.stores import open_store

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
class BroadcastGroup:
    """Address, rank and size of a process group that is used for weights only."""

    host: str
    port: int
    rank: int
    world: int
    key: str
    """Unique: a group must not read keys that another has left in the store."""
    backend: str
    deadline: float

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Send from rank 0, tensor by tensor."""
        for name in weights:
            self._broadcast(weights[name].detach().to(self.device).contiguous())

    def receive(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
        """Receive on the other ranks; `shapes` has dtypes and sizes in the order of sending."""
        found: dict[str, Tensor] = {}
        for name, (dtype, size) in shapes.items():
            found[name] = torch.empty(size, dtype=getattr(torch, dtype), device=self.device)
            self._broadcast(found[name])
        return found

    def _broadcast(self, tensor: Tensor) -> None:
        connected(self).broadcast(tensor.view(-1).view(torch.uint8), 0).wait()


_connected: dict[str, Any] = {}
"""The latest group of this process: key -> process group."""


def connected(group: BroadcastGroup) -> Any:
    """The torch process group, beside any other that the process has."""
    if group.key not in _connected:
        timeout = timedelta(seconds=group.deadline)
        store = TCPStore(group.host, group.port, is_master=False, timeout=timeout)
        is_nccl = group.backend == "nccl"
        kind: Any = dist.ProcessGroupNCCL if is_nccl else dist.ProcessGroupGloo
        prefixed = PrefixStore(group.key, store)
        _connected.clear()
        _connected[group.key] = kind(prefixed, group.rank, group.world, timeout)
    return _connected[group.key]


def described(weights: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, size)."""
    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights.items()
    }


class BroadcastHost:
    """The learner's side of broadcasts: a group with the present workers, made again when they change."""

    def __init__(self, backend: str, deadline: float) -> None:
        self.backend, self.deadline = backend, deadline
        self._store: Any = None
        self._group: BroadcastGroup | None = None
        self._members: Sequence[object] = ()
        self._num_groups = 0

    def group(self, host: str, members: Sequence[object]) -> BroadcastGroup:
        """The group of the learner, rank 0, and these workers."""
        if self._group is not None and self._members == members:
            return self._group
        if self._store is None:
            self._store = open_store(host, 0, timedelta(seconds=300))
        self._num_groups += 1
        self._members = members
        size, key = len(members) + 1, f"{self._num_groups}"
        self._group = BroadcastGroup(
            host, self._store.port, 0, size, key, self.backend, self.deadline
        )
        return self._group

    def end(self) -> None:
        """Make another group next time: a member is lost."""
        self._group = None
