"""Remove folders that hostile code has filled: any depth, any modes, any number of entries.

Nothing here recurses. A subfolder is first moved up into the root of the tree and is then a folder
like the others, so that neither the stack nor the length of a path grows with the depth.
"""

from __future__ import annotations

import contextlib
import os
from itertools import islice
from typing import NoReturn

READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ENTRIES = 64
"""Entries per `step`, since a folder is listed while it changes."""
SIGKILL = 9
MAX_FILES = 1 << 16


class Trash:
    """Folders of ended calls, all directly below `root`; `step` removes a few entries at a time."""

    def __init__(self, root: str) -> None:
        self.root = os.open(root, READ)
        self.folders: list[str] = []
        """Names below the root that are still to be removed."""
        self.has_failed = False
        """Something could not be removed; it was left behind."""
        self._count = 0

    def add(self, name: str) -> None:
        """Remove the folder `name` of the root in the following steps."""
        self.folders.append(name)

    def step(self) -> bool:
        """Remove up to `ENTRIES` entries of one folder; True while folders are left."""
        if self.folders:
            name = self.folders[-1]
            try:
                self._empty(name)
            except OSError:  # an immutable file, a broken disk
                self.has_failed = True
                with contextlib.suppress(ValueError):
                    self.folders.remove(name)
        return bool(self.folders)

    def close(self) -> None:
        os.close(self.root)

    def _empty(self, name: str) -> None:
        os.chmod(name, 0o700, dir_fd=self.root)
        folder = os.open(name, READ, dir_fd=self.root)
        try:
            with os.scandir(folder) as found:
                entries = list(islice(found, ENTRIES))
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._move_up(folder, entry.name)
                else:
                    os.unlink(entry.name, dir_fd=folder)
        finally:
            os.close(folder)
        if len(entries) < ENTRIES:
            os.rmdir(name, dir_fd=self.root)
            self.folders.remove(name)

    def _move_up(self, folder: int, name: str) -> None:
        os.chmod(name, 0o700, dir_fd=folder)
        self._count += 1
        above = f".graft-{os.getpid()}-{self._count}"
        os.rename(name, above, src_dir_fd=folder, dst_dir_fd=self.root)
        self.folders.append(above)


class Cleaner:
    """A process that removes folders: some disks take long, and the host has to look after its calls.

    It ends when something could not be removed, or with the host.
    """

    def __init__(self, root: str) -> None:
        names, self._names = os.pipe()
        os.set_blocking(self._names, False)
        self.pid = os.fork()
        if self.pid == 0:
            self._serve(root, names)
        os.close(names)
        self.ended = os.pidfd_open(self.pid)
        """Becomes readable when it has ended."""

    def remove(self, name: str) -> None:
        """Remove the folder `name` of the root. OSError if too many wait already, or it has ended."""
        os.write(self._names, f"{name}\n".encode())

    def close(self) -> None:
        os.kill(self.pid, SIGKILL)
        os.waitpid(self.pid, 0)

    def _serve(self, root: str, names: int) -> NoReturn:
        from . import kernel  # not on other systems than Linux

        status = 1
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, SIGKILL)
            os.closerange(3, names)
            os.closerange(names + 1, MAX_FILES)
            trash = Trash(root)
            rest = b""
            while not trash.has_failed and (part := os.read(names, 1 << 16)):
                *whole, rest = (rest + part).split(b"\n")
                trash.folders += [name.decode() for name in whole]
                while trash.step():
                    pass
            status = int(trash.has_failed)
        finally:
            os._exit(status)


def remove(folder: str) -> None:
    """Remove a folder, whose entries are the folders of calls; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        trash = Trash(folder)
        try:
            trash.folders += os.listdir(folder)  # noqa: PTH208
            while trash.step():
                pass
        finally:
            trash.close()
        os.rmdir(folder)  # noqa: PTH106
