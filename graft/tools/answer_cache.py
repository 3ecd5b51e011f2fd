"""A cache of answers to queries in one SQLite file, so that a run can be repeated without its source.

The file is in WAL mode: any number of threads and processes of one machine read and write it at
once, and an answer is on disk when `put` returns, also after a kill or a power cut. (WAL needs a
local disk. On network file systems give each machine its own file.)

    cache.put("bm25:4f:9c", "capital of peru", 3, [Hit("7", "Lima", "Lima is ...", 5.1)])
    cache.get("bm25:4f:9c", "capital of peru", 3)    the same hits
    cache.get("bm25:4f:9c", "capital of peru", 5)    None: another topk is another query
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from graft.data.corpus import without_surrogates
from graft.tools.errors import ToolError


class Hit(NamedTuple):
    """One document that was found. `score` orders hits of one query; services may leave it out."""

    id: str
    title: str
    text: str
    score: float | None = None


Answer = list[Hit] | str
"""The hits of a source, or an imported text."""

IMPORTED = "*"
"""The source name of imported answers, which are used for every source and every topk."""

MODES = ("live", "record", "replay")

BUSY = 30.0  # seconds to wait for other writers

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    source TEXT NOT NULL, query TEXT NOT NULL, topk INTEGER NOT NULL,
    answer TEXT NOT NULL, stored REAL NOT NULL,
    PRIMARY KEY (source, query, topk)
)"""


class CacheBroken(ToolError):
    """A file that cannot be read or written: no cache, no space, no permission."""


class SearchCache:
    """One cache file. `read_only` never creates or changes it and works on read-only media."""

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        if read_only and not self.path.is_file():
            raise ValueError(f"no search cache {str(path)!r}; record one with cache_mode=record")
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inherited: list[sqlite3.Connection] = []
        _caches.add(self)
        try:
            self._do("SELECT 1 FROM answers LIMIT 1")
        except CacheBroken as error:
            self.close()
            is_json = self.path.suffix == ".json"
            hint = f"; `graft data cache import {self.path}` converts it" if is_json else ""
            raise ValueError(f"cannot use the search cache {error}{hint}") from error

    def get(self, source: str, query: str, topk: int) -> Answer | None:
        """The stored answer, or None. Only blanks around the query are ignored."""
        key = query_key(query)
        # the tool that filled imported caches removed double quotes from its queries
        keys = [
            (source, key, topk),
            (IMPORTED, key, 0),
            (IMPORTED, query_key(key.replace('"', "")), 0),
        ]
        return next((found for one in keys if (found := self._stored(one)) is not None), None)

    def _stored(self, key: tuple[str, str, int]) -> Answer | None:
        where = "source = ? AND query = ? AND topk = ?"
        found = self._do(f"SELECT answer FROM answers WHERE {where}", key)
        return _decode(found[0][0]) if found else None

    def put(self, source: str, query: str, topk: int, answer: Answer) -> Answer:
        """Store an answer and return the stored one.

        If two rollouts send the same query at once, the first answer is stored and both get it, so that
        a replay gives both the same answer again.
        """
        key = (source, query_key(query), topk)
        self._write([(*key, json.dumps(answer), time.time())], "DO NOTHING")
        stored = self._stored(key)
        return answer if stored is None else stored

    def put_imported(self, answers: Iterable[tuple[str, str]]) -> None:
        """Store (query, text) pairs; they replace earlier imports."""
        now = time.time()
        self._write(
            [(IMPORTED, query_key(query), 0, json.dumps(text), now) for query, text in answers],
            "DO UPDATE SET answer = excluded.answer, stored = excluded.stored",
        )

    def sources(self) -> list[str]:
        """Fingerprints of the sources that answers were recorded from; pages (topk 0) have none."""
        found = self._do("SELECT DISTINCT source FROM answers WHERE topk > 0 ORDER BY source")
        return [source for (source,) in found]

    def topks(self, source: str) -> list[int]:
        """The values of topk that answers of `source` were recorded with."""
        found = self._do("SELECT DISTINCT topk FROM answers WHERE source = ?", (source,))
        return sorted(topk for (topk,) in found)

    def answers(self, source: str = "") -> Iterator[tuple[str, Answer]]:
        """Every query with its answer, in the order they were stored; those of one source only if given.

        Pages, which are stored with topk 0, are not answers to queries.
        """
        where, values = "WHERE (topk > 0 OR source = ?) ", (IMPORTED,)
        if source:
            where, values = "WHERE source = ? ", (source,)
        order = "ORDER BY stored, source, query, topk"
        for query, answer in self._do(f"SELECT query, answer FROM answers {where}{order}", values):
            yield query, _decode(answer)

    def __len__(self) -> int:
        return self._do("SELECT COUNT(*) FROM answers")[0][0]

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _write(self, rows: list[tuple[Any, ...]], on_conflict: str) -> None:
        with self._ready() as connection:
            # one transaction: all or nothing; IMMEDIATE takes the write lock at its start
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(
                    "INSERT INTO answers VALUES (?, ?, ?, ?, ?) "
                    f"ON CONFLICT (source, query, topk) {on_conflict}",
                    rows,
                )
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _do(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._ready() as connection:
            return connection.execute(statement, values).fetchall()

    @contextmanager
    def _ready(self) -> Iterator[sqlite3.Connection]:
        """The connection of this process, for one thread at a time."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _open(self.path, self.read_only)
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                raise CacheBroken(f"{self.path}: {error}") from error

    def _after_fork(self) -> None:
        """SQLite forbids a child even to close its parent's connection: keep it unused."""
        self._lock = threading.Lock()
        if self._connection is not None:
            self._inherited.append(self._connection)
            self._connection = None


def open_cache(path: str | None, mode: str | None) -> tuple[SearchCache | None, str]:
    """The cache of a tool's arguments `cache` and `cache_mode`, and the mode; live has no cache."""
    chosen = mode or ("record" if path else "live")
    if chosen not in MODES:
        raise ValueError(f"cache_mode={mode!r}; known: {', '.join(MODES)}")
    if chosen == "live":
        return None, chosen
    if not path:
        raise ValueError(f"cache_mode={chosen} needs cache=, the path of its file")
    return SearchCache(path, read_only=chosen == "replay"), chosen


def _open(path: Path, read_only: bool) -> sqlite3.Connection:
    mode = "ro" if read_only else "rwc"
    if read_only and not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
        mode = "ro&immutable=1"  # WAL would need a file beside it even for reading
    if not read_only:
        path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY,
        isolation_level=None,
        check_same_thread=False,  # guarded by the lock
    )
    try:
        if not read_only:
            _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    end = time.monotonic() + BUSY
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            # unlike other statements the switch to WAL does not wait for a lock
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise OSError(f"its file system does not allow WAL mode (it stays in {mode!r})")
    connection.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
    connection.execute(_SCHEMA)


def query_key(query: str) -> str:
    """The text that a query is stored under."""
    return without_surrogates(query).strip()


def _decode(text: str) -> Answer:
    found = json.loads(text)
    return found if isinstance(found, str) else [Hit(*hit) for hit in found]


_caches: weakref.WeakSet[SearchCache] = weakref.WeakSet()


def _after_fork_all() -> None:
    for cache in list(_caches):
        cache._after_fork()


os.register_at_fork(after_in_child=_after_fork_all)
