"""Weights on their way to workers: through Ray's object store, or by a broadcast.

    store        packed once, fetched by each node: works anywhere, also while workers come and go
    broadcast    a process group of the learner and all workers, made anew when somebody joins or leaves:
                 NCCL between GPUs, gloo elsewhere; nobody fetches anything from a store, where one
                 copy lies for whoever starts later

Ray shares the memory of NumPy arrays and not of torch's tensors, and NumPy knows no bfloat16: numbers
travel as what they are in memory.
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
    """The tensors again. The memory of what was sent is shared by a whole node and may not be written
    to, so each is copied when it is read: whoever takes them over one by one holds one at a time."""

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
    """Where a broadcast takes place, and who is who."""

    host: str
    port: int
    rank: int
    world: int
    key: str
    """Its own: a meeting must not read what another has left in the store."""
    backend: str
    deadline: float


def join(meeting: WeightBroadcast) -> Any:
    """A process group of its own, beside any that the process has already."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    seconds = timedelta(seconds=meeting.deadline)
    store = PrefixStore(
        meeting.key,
        TCPStore(meeting.host, meeting.port, is_master=False, timeout=seconds),
    )
    if meeting.backend == "nccl":
        return dist.ProcessGroupNCCL(store, meeting.rank, meeting.world, seconds)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, meeting.rank, meeting.world, seconds)  # type: ignore[attr-defined]


_groups: dict[str, Any] = {}
"""Of this process, the latest alone: key of the meeting -> process group."""


def group_of(meeting: WeightBroadcast) -> Any:
    if meeting.key not in _groups:
        _groups.clear()
        _groups[meeting.key] = join(meeting)
    return _groups[meeting.key]


def send(meeting: WeightBroadcast, weights: Mapping[str, Tensor]) -> None:
    """From rank 0, tensor by tensor in their order."""
    group = group_of(meeting)
    for name in weights:
        _broadcast(group, _on_link(weights[name].detach(), meeting.backend))


def receive(
    meeting: WeightBroadcast, names: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Everywhere else; `names` are dtypes and sizes in the order of sending."""
    group = group_of(meeting)
    device = "cuda" if meeting.backend == "nccl" else "cpu"
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
        flat = flat.view(torch.uint8)  # gloo knows bytes
    group.broadcast(flat, 0).wait()
