"""Files and folders that appear whole or not at all, and append-only logs of JSON objects.

with new_file(Path("table.md")) as staging:    writes .table.md.partial, syncs it, renames it
    staging.write_text("| set | score |")

log = JsonlLog(Path("samples.jsonl"))        one process owns the file until it closes it
log.append({"task": "t", "reward": 1.0})     one line; kill -9 loses at most the line being written

Every change of the disk that a run makes is a `Change`. `watch` is called before and after each of them:
trust/deaths.py sets it, to end the process at every such moment and to compare the run that resumes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from pydantic_core import from_json

from graft.trust.bounds import OutOfBounds, read_bytes
from graft.trust.masking import mask_values

POLL = 0.01
"""Seconds between two attempts to lock a log."""
PATIENCE = 10.0
"""Seconds that `append_row` waits for another process that appends to the same file."""
PARTIAL = ".partial"
"""How the names of files and folders end that are not whole yet, or no more."""


class Change(NamedTuple):
    """One change of the disk.

    write    `path` gets bytes, from byte `start` on; a dying process may leave a part of them
    sync     the bytes of the file `path`, or the names in the folder `path`, survive a power cut
    rename   `path` is called `target` now
    remove   the file or folder `path` is gone; a dying process may leave a part of a folder
    """

    kind: Literal["write", "sync", "rename", "remove"]
    path: Path
    target: Path | None = None
    start: int = 0


def user_folder(variable: str, default: str) -> Path:
    """A folder of this user: where an environment variable says, else `default`, below the home folder."""
    try:
        return Path(os.environ.get(variable) or default).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(
            f"this user has no home folder, and {variable} is not set: set {variable} or HOME"
        ) from error


def unwatched(when: Literal["before", "after"], change: Change) -> None:
    """What `watch` does in every run: nothing."""


watch: Callable[[Literal["before", "after"], Change], None] = unwatched


@contextmanager
def _changing(change: Change) -> Iterator[None]:
    watch("before", change)
    yield
    watch("after", change)


def staging_path(path: Path, *, is_shared: bool = False) -> Path:
    """The path under which a new `path` is written before it is renamed: out/a.txt -> out/.a.txt.partial.

    is_shared   other processes may write the same path now: the name is unique, .a.txt.3f9c.partial
    """
    unique = f".{secrets.token_hex(4)}" if is_shared else ""
    return path.with_name(f".{path.name}{unique}{PARTIAL}")


@contextmanager
def new_file(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Yield a path to write to; when the block ends the file is synced and renamed to `path`.

    If the block fails nothing is left of it, and an older `path` is untouched.
    """
    staging = staging_path(path, is_shared=is_shared)
    try:
        with _changing(Change("write", staging)):
            yield staging
        sync(staging)
        rename(staging, path)
    finally:
        with suppress(OSError):
            staging.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with new_file(path) as staging:
        staging.write_text(mask_values(text), encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def new_folder(path: Path, *, is_shared: bool = False, is_durable: bool = True) -> Iterator[Path]:
    """Yield a new empty folder; when the block ends it is renamed to `path`, in place of an older one.

    If the block fails nothing is left of it, and an older `path` is untouched.

    is_shared   other processes may write the same path now: the first wins, the others get OSError
    is_durable  sync everything to the disk: the folder is also whole after a power cut
    """
    staging = make_staging(path, is_shared=is_shared)
    try:
        yield staging
        if is_durable:
            for file in staging.rglob("*"):
                if file.is_file():
                    sync(file)
        if not is_shared:
            put_in_place(staging, path, is_durable=is_durable)
        else:
            if is_durable:
                _sync_folders(staging)
            rename(staging, path)
            if is_durable:
                sync(path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def make_staging(path: Path, *, is_shared: bool = False) -> Path:
    """Make the empty staging directory of `path`; what a killed process left there is removed."""
    staging = staging_path(path, is_shared=is_shared)
    remove(staging)
    staging.mkdir(parents=True)
    return staging


def put_in_place(staging: Path, path: Path, *, is_durable: bool = True) -> None:
    """Rename a folder to `path`; an older `path` is removed afterwards, or restored on failure.

    is_durable   the names of the files in it are on the disk before it has its own, then that one
    """
    if is_durable:
        _sync_folders(staging)
    old = path.with_name(f".{path.name}.replaced{PARTIAL}")
    try:
        if path.exists():
            remove(old)
            rename(path, old)
        rename(staging, path)
        if is_durable:
            sync(path.parent)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        remove(old)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if there is one.

    A folder loses its name first: a process that dies meanwhile leaves no half of it under that name.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir() or path.is_symlink():
        with _changing(Change("remove", path)):
            path.unlink(missing_ok=True)
        return
    gone = path
    if not path.name.endswith(PARTIAL):
        gone = path.with_name(f".{path.name}.removed{PARTIAL}")
        remove(gone)
        rename(path, gone)
    with _changing(Change("remove", gone)):
        shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Clean a folder after a process that was killed: no other process may write in it now.

    .a.partial                       removed
    .a.replaced.partial, and no a    named a again: the process died before the new one had its name
    """
    for left in folder.glob(f".*{PARTIAL}"):
        name = left.name.removesuffix(PARTIAL).removeprefix(".")
        older = folder / name.removesuffix(".replaced")
        if older.name != name and not older.exists():
            rename(left, older)
        else:
            remove(left)


def rename(path: Path, target: Path) -> None:
    """Give `path` another name; a file in the way is replaced."""
    with _changing(Change("rename", path, target)):
        path.replace(target)


def sync(path: Path) -> None:
    """Make the contents of a file, or the names in a folder, survive a power cut."""
    with _changing(Change("sync", path)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sync_folders(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync(path)
    sync(folder)


def free_megabytes(path: Path) -> float:
    """Free space on the disk of `path`, which need not exist yet."""
    place = path.absolute()
    found = next(folder for folder in (place, *place.parents) if folder.is_dir())
    return shutil.disk_usage(found).free / 1e6


class FileInUse(RuntimeError):
    """Another process has the file open for writing."""


class JsonlLog:
    """An append-only file of JSON objects, one per line, written by one process at a time.

    A line is with the operating system when `append` returns: a killed process loses nothing but the
    line that it was writing. Opening the file again drops such a torn line.

        {"a": 1}⏎{"b"         becomes   {"a": 1}⏎
        {"a": 1}⏎{"b": 2}     becomes   {"a": 1}⏎{"b": 2}⏎
    """

    def __init__(self, path: Path, *, patience: float = 0.0) -> None:
        """`patience` is how many seconds to wait for a process that writes the file now."""
        self.path = path
        self._file = self._open(patience)

    def append(self, row: Mapping[str, Any]) -> int:
        """Write one line; the byte where it starts."""
        start = self._file.seek(0, os.SEEK_END)
        try:
            with _changing(Change("write", self.path, start=start)):
                self._file.write(json_line(row))
                self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return start

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Every line with the byte where it starts."""
        self._file.seek(0)
        start = 0
        for line in self._file:
            yield start, line
            start += len(line)

    def line_at(self, start: int) -> bytes:
        self._file.seek(start)
        return self._file.readline()

    def rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the whole file by these rows."""
        with new_file(self.path) as staging, staging.open("wb") as file:
            file.writelines(map(json_line, rows))
        self.close()
        self._file = self._open(0.0)

    def sync(self) -> None:
        """Sync the file; it is on the disk when this returns."""
        with _changing(Change("sync", self.path)):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _open(self, patience: float) -> IO[bytes]:
        file = self.path.open("a+b")
        try:
            self._lock(file, time.monotonic() + patience)
            _repair_end(file, self.path)
        except BaseException:
            file.close()
            raise
        return file

    def _lock(self, file: IO[bytes], end: float) -> None:
        import fcntl  # a flock ends with its process: no stale lock after kill -9

        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise FileInUse(f"another process is writing {self.path}") from error
            time.sleep(POLL)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line to a log that this process does not keep open; it is on the disk afterwards."""
    log = JsonlLog(path, patience=PATIENCE)
    try:
        log.append(row)
        log.sync()
    finally:
        log.close()


def append_text(path: Path, text: str) -> None:
    """Append to a text that people read; a killed process may leave a part of it."""
    with path.open("ab") as file, _changing(Change("write", path, start=file.tell())):
        file.write(text.encode("utf-8", "replace"))
        file.flush()


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line of a log; NaN and infinities are refused, since JSON has neither."""
    text = mask_values(json.dumps(row, ensure_ascii=False, allow_nan=False))
    return text.encode("utf-8", "replace") + b"\n"


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None where there is none."""
    try:
        row = from_json(line)  # four times as fast as json, and a long run has many lines
    except ValueError:
        try:
            row = json.loads(line)  # takes half a surrogate pair, which the other does not
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        return parse_object(read_bytes(path)) or {}
    except (OSError, OutOfBounds):
        return {}


def _repair_end(file: IO[bytes], path: Path) -> None:
    """Drop a last line without an end, or end it if its object is complete."""
    size = whole = file.seek(0, os.SEEK_END)
    tail = b""
    while whole:
        start = max(0, whole - (1 << 16))
        file.seek(start)
        piece = file.read(whole - start)
        tail = piece[piece.rfind(b"\n") + 1 :] + tail
        if b"\n" in piece:
            whole = start + piece.rfind(b"\n") + 1
            break
        whole = start
    if whole == size:
        return
    is_object = parse_object(tail) is not None
    with _changing(Change("write", path, start=size if is_object else whole)):
        if is_object:
            file.write(b"\n")
            file.flush()
        else:
            file.truncate(whole)
    file.seek(0, os.SEEK_END)
