"""Every moment at which a process may die while it changes the disk, by name; and a power cut.

    before write metrics.jsonl #2      the file has the lines of step 1
    torn write metrics.jsonl #2        it also has the first half of the next one
    before sync checkpoints #1         the new checkpoint has its name
    after rename summary.json #1       only where no other moment follows with the same disk

`arm` is called in the process that is to die, before the run starts.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import graft.files
from graft.files import Change

Loss = Literal["", "data", "names"]
"""What a power cut takes: nothing (only the process dies), bytes of files that were not synced, or names
in folders that were not synced."""


def arm(root: Path, record: Path | None = None, fatal: str = "", loss: Loss = "") -> None:
    """Write the name of every moment to `record`; end this process with SIGKILL at `fatal`."""
    graft.files.watch = Moments(root.resolve(), record, fatal, loss)


def distinct(moments: list[str]) -> list[str]:
    """Without those that find the disk as the next one does.

    ["before write a", "torn write a", "after write a", "before sync a", "after sync a"]
    -> ["before write a", "torn write a", "before sync a", "after sync a"]
    """
    following = [*moments[1:], ""]
    return [
        one
        for one, other in zip(moments, following, strict=True)
        if not (one.startswith("after") and other.startswith("before"))
    ]


class Moments:
    """What `graft.files.watch` becomes."""

    def __init__(self, root: Path, record: Path | None, fatal: str, loss: Loss) -> None:
        self.root, self.record, self.fatal = root, record, fatal
        self.cache = WriteCache(loss) if loss else None
        self._count: Counter[str] = Counter()
        self._lock = threading.Lock()  # checkpoints are written on a thread

    def __call__(self, when: Literal["before", "after"], change: Change) -> None:
        with self._lock:
            if self.cache is not None and when == "before":
                self.cache.before(change)
            for label in self._labels(when, change):
                self._count[label] += 1
                name = f"{label} #{self._count[label]}"
                if self.record is not None:
                    with self.record.open("a", encoding="utf-8") as file:
                        file.write(name + "\n")
                if name == self.fatal:
                    self._die(name, change)
            if self.cache is not None and when == "after":
                self.cache.after(change)

    def _labels(self, when: str, change: Change) -> Iterator[str]:
        path = (change.target or change.path).resolve()
        where = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        if when == "after" and change.kind == "write":
            yield f"torn write {where}"
        yield f"{when} {change.kind} {where}"
        if when == "before" and change.kind == "remove" and change.path.is_dir():
            yield f"torn remove {where}"

    def _die(self, name: str, change: Change) -> None:
        if name.startswith("torn write"):
            size = change.path.stat().st_size
            os.truncate(change.path, change.start + (size - change.start) // 2)
        elif name.startswith("torn remove"):
            files = sorted(path for path in change.path.rglob("*") if path.is_file())
            for path in files[::2]:
                path.unlink()
        if self.cache is not None:
            if "write" in name and not name.startswith("before"):
                self.cache.after(change)
            self.cache.lose()
        os.kill(os.getpid(), signal.SIGKILL)


class WriteCache:
    """What a disk has not been asked to keep: a power cut takes it.

    A file that was written and not synced is cut back; a name that was given in a folder that was not
    synced is the old one again. Removed names are taken as gone, and new folders as kept.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self._lengths: dict[Path, int] = {}  # bytes of a file that are on the disk
        self._names: list[tuple[Path, Callable[[], object]]] = []  # folder, and the way back
        self._older = Path(tempfile.mkdtemp(prefix="graft-power-cut-"))

    def before(self, change: Change) -> None:
        path, target = change.path, change.target
        if change.kind == "write":
            self._lengths[path] = min(self._lengths.get(path, change.start), change.start)
            if not path.exists() or not path.stat().st_size:
                self._names.append((path.parent, lambda: path.unlink(missing_ok=True)))
        elif change.kind == "rename" and target is not None and ".removed" not in target.name:
            kept = None
            if target.is_file():
                kept = self._older / str(len(self._names))
                shutil.copy(target, kept)
            self._names.append((target.parent, lambda: _rename_back(path, target, kept)))

    def after(self, change: Change) -> None:
        path, target = change.path, change.target
        if change.kind == "sync":
            self._lengths.pop(path, None)
            self._names = [(folder, undo) for folder, undo in self._names if folder != path]
        elif change.kind == "rename" and target is not None:
            self._lengths = {_moved(p, path, target): n for p, n in self._lengths.items()}
            self._names = [(_moved(folder, path, target), undo) for folder, undo in self._names]

    def lose(self) -> None:
        if self.loss == "data":
            for path, length in self._lengths.items():
                if path.exists():
                    os.truncate(path, min(length, path.stat().st_size))
        else:
            for _, undo in reversed(self._names):
                undo()
        shutil.rmtree(self._older)


def _rename_back(path: Path, target: Path, kept: Path | None) -> None:
    if target.exists():
        target.replace(path)
    if kept is not None:
        shutil.copy(kept, target)


def _moved(path: Path, old: Path, new: Path) -> Path:
    return new / path.relative_to(old) if path.is_relative_to(old) else path
