"""Streams tensors from files to a device: threads read ahead in chunks of neighbouring tensors.

    shard 1   |q0|k0|v0|o0|gate0 ... |     a chunk: one read, and on a GPU one copy in pinned pieces
    shard 2   |q9|k9| ...                  tensors are views of the chunk's bytes

Neither a second copy of the model nor a whole shard is in host memory: only the chunks under way.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.models.io.progress import LoadProgress

CHUNK = 1 << 26
"""Bytes of neighbouring tensors that are read at once; a larger tensor is a chunk of its own."""
PINNED = 1 << 24
"""Bytes that a thread copies to a GPU at a time, from memory that it keeps."""
MAX_THREADS = 8


class StoredTensor(NamedTuple):
    """A tensor in a file, from byte `start` to `stop`: its dtype and its sizes."""

    file: Path
    start: int
    stop: int
    kind: str
    sizes: tuple[int, ...]


class IncompleteFile(OSError):
    """A file that ends before a tensor that its head lists."""


def stream(
    places: Mapping[str, StoredTensor], device: torch.device, origin: str
) -> Iterator[tuple[str, Tensor]]:
    """The bytes of each tensor on `device`, in the order of the files; valid until the next chunk."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    chunks, reader = deque(split_chunks(places)), _ChunkReader(device)
    under_way: deque[tuple[list[str], Future[Tensor]]] = deque()
    pool = ThreadPoolExecutor(threads, "graft-load")
    progress = LoadProgress(origin, sum(place.stop - place.start for place in places.values()))
    try:
        while chunks or under_way:
            while chunks and len(under_way) <= threads:
                names = chunks.popleft()
                first, stop = places[names[0]], max(places[name].stop for name in names)
                future = pool.submit(reader.read, first.file, first.start, stop)
                under_way.append((names, future))
            names, future = under_way.popleft()
            chunk, start = future.result(), places[names[0]].start
            for name in names:
                yield name, chunk[places[name].start - start : places[name].stop - start]
            progress.advance(len(chunk))
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()


def split_chunks(places: Mapping[str, StoredTensor]) -> Iterator[list[str]]:
    """Names of tensors of one file that lie next to each other, up to `CHUNK` bytes together."""
    names: list[str] = []
    for name in sorted(places, key=lambda name: places[name][:3]):
        first, place = places[names[0] if names else name], places[name]
        if first.file != place.file or place.stop - first.start > CHUNK:
            if names:
                yield names
            names = []
        names.append(name)
    if names:
        yield names


class _ChunkReader:
    """Reads parts of files into new memory of a device; each thread has its own pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.thread = device, threading.local()

    def read(self, file: Path, start: int, stop: int) -> Tensor:
        chunk = torch.empty(stop - start, dtype=torch.uint8, device=self.device)
        with file.open("rb", buffering=0) as opened:
            opened.seek(start)
            if self.device.type == "cpu":
                _fill(opened, chunk)
                return chunk
            for part in chunk.split(PINNED):
                pinned = self._pinned()[: len(part)]
                _fill(opened, pinned)
                part.copy_(pinned)  # returns when the bytes are there
        return chunk

    def _pinned(self) -> Tensor:
        if not hasattr(self.thread, "pinned"):
            is_cuda = self.device.type == "cuda"
            self.thread.pinned = torch.empty(PINNED, dtype=torch.uint8, pin_memory=is_cuda)
        return self.thread.pinned


def _fill(opened: Any, target: Tensor) -> None:
    """Read until `target` is full."""
    memory: Any = target.numpy()
    rest = memoryview(memory)
    while rest:
        count = opened.readinto(rest)
        if not count:
            raise IncompleteFile(f"'{opened.name}' ends {len(rest):,} bytes too early")
        rest = rest[count:]
