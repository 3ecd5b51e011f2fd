"""Search indexes on disk: built once, shared by all processes, never visible half written.

    ROOT/<hash of the corpus>/documents/       the documents, one JSON list per line, and offsets
    ROOT/<hash of the corpus>/bm25-<hash>/     an index, named by its settings
    ROOT/<hash of the corpus>/dense-<hash>/

Names come from contents, so an old index is never used for a corpus that changed. ROOT is `index=` of a
source, else $GRAFT_CACHE/search, else ~/.cache/graft/search. Unused folders may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import mmap
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from graft.data.corpus import Document, read_documents
from graft.data.errors import DataError
from graft.files import new_folder, user_folder

log = logging.getLogger(__name__)

FORMAT = 1
"""Part of every corpus hash: increase it when the layout of these folders changes."""
SMALL = Path(__file__).parent / "small.jsonl"
"""The bundled corpus: `corpus="small"`."""
MAX_WAIT = 3600.0
"""Seconds to wait for another process that builds the same index, before building it here."""


class Corpus:
    """A corpus file and the folder of everything built from it."""

    def __init__(self, path: str, index: str | None = None) -> None:
        self.path = SMALL if path == "small" else Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"no corpus file {path!r}; give a .jsonl or .parquet file with rows "
                '{id, contents: "Title\\ntext"} or {title, text}, or "small" for the bundled corpus'
            )
        facts = self.path.stat()
        self.hash = _hash_of_file(str(self.path.resolve()), facts.st_size, facts.st_mtime_ns)
        self.folder = (Path(index) if index else default_root()) / self.hash

    def documents(self) -> Documents:
        folder = build_once(self.folder / "documents", self._write)
        return Documents(folder)

    def _write(self, folder: Path) -> None:
        if write_documents(read_documents(str(self.path)), folder) == 0:
            raise DataError(f"{self.path} has no rows, so there is nothing to search in")


class Documents:
    """Random access to a corpus that may be larger than memory."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        with (folder / "documents.jsonl").open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Document:
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        return Document(*json.loads(self._bytes[start:end]))

    def __iter__(self) -> Iterator[Document]:
        return (self[number] for number in range(len(self)))


def write_documents(documents: Iterator[Document], folder: Path) -> int:
    """Write `documents` in the format of `Documents`; their number."""
    offsets = array("q", [0])
    with (folder / "documents.jsonl").open("wb") as file:
        for document in documents:
            line = json.dumps(document, ensure_ascii=False).encode("utf-8") + b"\n"
            file.write(line)
            offsets.append(offsets[-1] + len(line))
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))
    return len(offsets) - 1


def default_root() -> Path:
    if cache := os.environ.get("GRAFT_CACHE"):
        return Path(cache) / "search"
    return user_folder("XDG_CACHE_HOME", "~/.cache") / "graft" / "search"


def short_hash(settings: Any) -> str:
    """A hash of settings that is the same on every machine."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build` if it does not exist yet.

    `build` writes into a temporary folder that is renamed when it is complete, so that a folder with
    its final name is always complete. The lock only saves work: of many processes that start together
    one builds and the others wait.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")) as is_ours:
            if folder.is_dir():
                return folder
            if is_ours:  # no other process builds, so these were left by killed ones
                for left in folder.parent.glob(f".{folder.name}.*.partial"):
                    shutil.rmtree(left, ignore_errors=True)
            with new_folder(folder, is_shared=True) as aside:
                build(aside)
    except OSError as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise ValueError(
            f"cannot write an index to {folder}: {error}; pass index=FOLDER or set GRAFT_CACHE"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yields True if the lock is held; False if it is not available, which only costs work."""
    end = time.monotonic() + MAX_WAIT
    is_held = is_reported = False
    with path.open("w") as file:  # the lock is released when the file is closed or the process ends
        while not is_held and time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            except BlockingIOError:
                if not is_reported:
                    log.info("waiting for the process that builds %s", path.with_suffix(""))
                    is_reported = True
                time.sleep(0.05)
            except OSError:  # some network file systems have no locks
                break
        yield is_held


@functools.lru_cache(maxsize=64)
def _hash_of_file(path: str, size: int, changed: int) -> str:
    """A hash of the contents; size and modification time only decide when to read them again."""
    with Path(path).open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    found.update(json.dumps([FORMAT, Path(path).suffix]).encode())
    return found.hexdigest()
