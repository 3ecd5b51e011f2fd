"""Every moment at which a process may die while it changes the disk, and what the disk is then.

    before write metrics.jsonl #2      the file has the lines of step 1
    torn write metrics.jsonl #2        it also has the first half of the next one
    before sync checkpoints #1         the new checkpoint has its name
    after rename summary.json #1       the run is over

A process that dies leaves what it has written. A power cut also takes what was not synced: bytes of files,
or names in folders. `arm` is called before a run starts, in its process: it copies each of these disks into
a folder, different ones once, or ends the process with SIGKILL at one moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import graft.files
from graft.files import Change

When = Literal["before", "after"]
Loss = Literal["", "data", "names"]
"""What a power cut takes: nothing (only the process dies), bytes of files that were not synced, or names
in folders that were not synced."""
LOSSES: tuple[Loss, ...] = ("", "data", "names")
LIST = "disks.jsonl"


class Disk(NamedTuple):
    """A folder as one death leaves it; `moments` are those that leave it like this."""

    folder: Path
    moments: list[tuple[str, Loss]]

    @property
    def is_power_cut(self) -> bool:
        """Whether only a power cut leaves it like this."""
        return all(loss for _, loss in self.moments)

    def __str__(self) -> str:
        name, loss = min(self.moments, key=lambda moment: moment[1])
        return f"{name}, power cut ({loss} lost)" if loss else name


def arm(root: Path, *, keep: Path | None = None, fatal: str = "") -> None:
    """Copy the disk `root` of every moment to `keep`, or end this process with SIGKILL at `fatal`."""
    graft.files.watch = Moments(root.resolve(), keep, fatal)


def disks_in(keep: Path) -> list[Disk]:
    """What `arm` kept, in the order of their first moments."""
    found: dict[int, Disk] = {}
    for line in (keep / LIST).read_text(encoding="utf-8").splitlines():
        name, loss, number = json.loads(line)
        disk = found.setdefault(number, Disk(keep / str(number), []))
        disk.moments.append((name, loss))
    return list(found.values())


class Moments:
    """What `graft.files.watch` becomes."""

    def __init__(self, root: Path, keep: Path | None, fatal: str) -> None:
        self.root, self.keep, self.fatal = root, keep, fatal
        self._cache = WriteCache()
        self._count: Counter[str] = Counter()
        self._known: dict[str, int] = {}
        # held while a change is made: checkpoints are written on a thread, and a copy must not meet them
        self._lock = threading.RLock()
        if keep is not None:
            keep.mkdir()

    def __call__(self, when: When, change: Change) -> None:
        if when == "before":
            self._lock.acquire()
        self._note(when, change)
        if when == "after":
            self._lock.release()

    def _note(self, when: When, change: Change) -> None:
        self._cache.note(when, change)
        for label in self._labels(when, change):
            self._count[label] += 1
            name = f"{label} #{self._count[label]}"
            if name == self.fatal:
                tear(name, change, lambda path: path)
                os.kill(os.getpid(), signal.SIGKILL)
            for loss in LOSSES if self.keep is not None else ():
                self._copy(name, change, loss)

    def _labels(self, when: When, change: Change) -> Iterator[str]:
        path = (change.target or change.path).resolve()
        where = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        if when == "after" and change.kind == "write":
            yield f"torn write {where}"
        yield f"{when} {change.kind} {where}"
        if when == "before" and change.kind == "remove" and change.path.is_dir():
            yield f"torn remove {where}"

    def _copy(self, name: str, change: Change, loss: Loss) -> None:
        assert self.keep is not None
        if not self._cache.holds(loss):
            return  # the disk of the process that only dies
        copy = self.keep / str(len(self._known))
        shutil.copytree(self.root, copy, ignore=shutil.ignore_patterns(".lock"))

        def where(path: Path) -> Path:
            return copy / path.resolve().relative_to(self.root)

        tear(name, change, where)
        self._cache.lose(loss, where)
        seen = fingerprint(copy)
        number = self._known.setdefault(seen, len(self._known))
        if number != int(copy.name):
            shutil.rmtree(copy)
        with (self.keep / LIST).open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, loss, number]) + "\n")


def tear(name: str, change: Change, where: Callable[[Path], Path]) -> None:
    """Leave half of what a torn change does."""
    path = where(change.path)
    if name.startswith("torn write"):
        size = path.stat().st_size
        os.truncate(path, min(size, change.start) + max(0, size - change.start) // 2)
    elif name.startswith("torn remove"):
        for file in sorted(one for one in path.rglob("*") if one.is_file())[::2]:
            file.unlink()


def fingerprint(folder: Path) -> str:
    """Of all names and contents."""
    sums = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        sums.update(json.dumps([str(path.relative_to(folder)), len(content)]).encode() + content)
    return sums.hexdigest()


class _Renamed(NamedTuple):
    path: Path
    target: Path
    older: bytes | None
    """The file that had the name before."""


class WriteCache:
    """What the disk has not been asked to keep.

    A file that was written and not synced is cut back; a name that was given in a folder that was not
    synced is the old one again. Removed names are taken as gone, and new folders as kept.
    """

    def __init__(self) -> None:
        self._lengths: dict[Path, int] = {}  # bytes of a file that are on the disk
        self._names: list[
            tuple[Path, Path | _Renamed]
        ] = []  # folder; the new file, or the renamed one

    def note(self, when: When, change: Change) -> None:
        path, target = change.path, change.target
        if when == "before" and change.kind == "write":
            self._lengths[path] = min(self._lengths.get(path, change.start), change.start)
            if not path.exists() or not path.stat().st_size:
                self._names.append((path.parent, path))
        elif when == "before" and target is not None and ".removed" not in target.name:
            older = target.read_bytes() if target.is_file() else None
            self._names.append((target.parent, _Renamed(path, target, older)))
        elif when == "after" and change.kind == "sync":
            self._lengths.pop(path, None)
            self._names = [(folder, name) for folder, name in self._names if folder != path]
        elif when == "after" and target is not None:
            self._lengths = {_moved(p, path, target): n for p, n in self._lengths.items()}
            self._names = [(_moved(folder, path, target), name) for folder, name in self._names]

    def at_risk(self) -> set[Path]:
        """Files whose bytes or names a power cut would take."""
        names = {name if isinstance(name, Path) else name.target for _, name in self._names}
        return names | set(self._lengths)

    def holds(self, loss: Loss) -> bool:
        """Whether a power cut would take anything."""
        return {"": True, "data": bool(self._lengths), "names": bool(self._names)}[loss]

    def lose(self, loss: Loss, where: Callable[[Path], Path]) -> None:
        """Take it from the disk; `where` is the copy of a path."""
        for path, length in self._lengths.items() if loss == "data" else ():
            if where(path).is_file():
                os.truncate(where(path), min(length, where(path).stat().st_size))
        for _, name in reversed(self._names) if loss == "names" else ():
            if isinstance(name, Path):
                where(name).unlink(missing_ok=True)
                continue
            if where(name.target).exists():
                where(name.target).replace(where(name.path))
            if name.older is not None:
                where(name.target).write_bytes(name.older)


def _moved(path: Path, old: Path, new: Path) -> Path:
    return new / path.relative_to(old) if path.is_relative_to(old) else path
