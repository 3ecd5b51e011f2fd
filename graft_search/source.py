"""The interface of search sources, and the table of the bundled ones."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from graft.registry import check_options, resolve
from graft.tools.answer_cache import Hit

MAX_QUERY = 4000  # characters; a longer text is not a query
MAX_TOPK = 1000
TOOL_OPTIONS = ("topk", "tag", "max_chars", "cache", "cache_mode", "concurrency")
"""The tool's own options, for suggestions about a misspelled option of a source."""


@runtime_checkable
class SearchSource(Protocol):
    """Finds documents. Called from many threads at once.

    `fingerprint` identifies everything that the answers depend on (corpus, settings, address), so that a
    recorded answer is never used for another source. `open` does the slow work (build or load an
    index); it may be called often. A service that does not answer raises ToolError.
    """

    fingerprint: str

    def open(self) -> None: ...
    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]: ...


SOURCES: dict[str, Any] = {
    "bm25": "graft_search.bm25:Bm25Source",
    "dense": "graft_search.dense:DenseSource",
    "http": "graft_search.http:HttpSource",
    "serpapi": "graft_search.web:SerpApi",
    "google_cse": "graft_search.web:GoogleSearch",
    "bing": "graft_search.web:BingSearch",
    "brightdata": "graft_search.web:BrightData",
    "tavily": "graft_search.web:Tavily",
}
"""Name -> "module:attribute" of the source's class."""
WEB_SOURCES = ("serpapi", "google_cse", "bing", "brightdata", "tavily")

_alive: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_alive_lock = threading.Lock()


def make_source(name: str, **options: Any) -> SearchSource:
    """The source called `name` (or "your.module:Class"), not opened yet.

    Equal arguments over an unchanged corpus give the same object while it is in use: 64 envs that
    search one corpus load its index once.
    """
    kind = resolve(name, SOURCES, "search source")
    check_options(kind, options, f"search source {name!r}", meant=TOOL_OPTIONS)
    made = kind(**options)
    key = (kind, made.fingerprint, repr(sorted(options.items())))
    with _alive_lock:
        return _alive.setdefault(key, made)


def pick_source(
    source: str | SearchSource | None,
    corpus: str | None,
    url: str | None,
    timeout: float,
    options: dict[str, Any],
) -> SearchSource:
    """The source that a tool's arguments describe."""
    if source is not None and not isinstance(source, str):
        if not isinstance(source, SearchSource):
            raise ValueError(
                f"source={source!r}: must be a name, or an object with fingerprint, open and retrieve"
            )
        extra = [*options, *(["corpus"] if corpus else []), *(["url"] if url else [])]
        if extra:
            raise ValueError(f"a source object is complete; remove {', '.join(extra)}")
        return source
    if corpus and url:
        raise ValueError("both corpus= and url= are given; search in one of them")
    if source in WEB_SOURCES:
        if corpus:
            raise ValueError(f"source={source!r} searches the web; corpus= is for bm25 and dense")
        return make_source(source, url=url, timeout=timeout, **options)
    url = url or (None if corpus else os.environ.get("SEARCH_URL"))
    name = source or ("bm25" if corpus else "http")
    if name == "http":
        if corpus:
            raise ValueError("source='http' searches behind a url; corpus= is for bm25 and dense")
        if not url:
            raise ValueError(
                'nothing to search in: give corpus=FILE (or corpus="small"), or url=, or set SEARCH_URL'
            )
        return make_source(name, url=url, timeout=timeout, **options)
    if corpus:
        options = {**options, "corpus": corpus}
    return make_source(name, **options)
