"""How much memory of a device this process can use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from graft.models.device import has_kernels

MARGIN = 0.05
"""Share of the memory that is kept free: allocators waste some, and other processes come and go."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device, and how much of its memory this process may use."""

    device: torch.device
    available: int
    fused: bool = False
    """Whether Triton kernels run there, which keep less than plain PyTorch."""
    name: str = ""
    total: int = 0
    """Of the whole device, memory of other processes included; 0: as much as is available."""
    ways: int = 1
    """Processes, each on its own device, over which the trained weights are split."""

    @property
    def usable(self) -> int:
        return int(self.available * (1 - MARGIN))


def device_memory_of(device: torch.device, ways: int = 1) -> DeviceMemory:
    """The memory of this device now. What this process already holds there counts as available."""
    if device.type != "cuda":
        # processes share it
        return DeviceMemory(device, available_ram() // ways, False, "CPU", ways=ways)
    free, total = torch.cuda.mem_get_info(device)
    ours, name = torch.cuda.memory_reserved(device), torch.cuda.get_device_name(device)
    return DeviceMemory(device, free + ours, has_kernels(device), name, total, ways)


def available_ram() -> int:
    """Bytes this process can still allocate: on the machine, or in its cgroup where that is less."""
    return min([_meminfo(), *_cgroups()])


def _meminfo() -> int:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in text.splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: the whole memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroups() -> Iterator[int]:
    """What the control group leaves, version 2 and version 1; the file cache is reclaimable."""
    for folder, most, now in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used, stat = (
                (Path(folder) / name).read_text(encoding="ascii").split()
                for name in (most, now, "memory.stat")
            )
        except OSError:
            continue
        counters = dict(zip(stat[::2], stat[1::2], strict=False))
        cache = int(counters.get("inactive_file", counters.get("total_inactive_file", 0)))
        if limit[0] != "max":
            yield int(limit[0]) - int(used[0]) + cache
