"""ARPO's `search_cache.json`, to and from a `SearchCache`.

    {"capital of peru": "Page 1: Lima is the capital.", "cheese": [{"title": "Brie", "text": "Soft."}]}

The file has one result per query: a text, which is used unchanged, or a list of texts or objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.data.corpus import without_surrogates
from graft.data.errors import DataError
from graft.files import new_file
from graft.tools.answer_cache import IMPORTED, SearchCache, query_key

_TEXTS = ("text", "snippet", "description", "contents", "content")


@dataclass(frozen=True, slots=True)
class CacheImport:
    """What an import did; `first_bad` is the reason of the first entry that was left out."""

    stored: int
    repeated: int
    """Entries whose query occurs again later in the file; the last one is stored."""
    replaced: int
    """Stored queries that an earlier import had."""
    bad: int
    first_bad: str = ""

    @property
    def sentence(self) -> str:
        notes = [f"{self.repeated:,} repeated", f"{self.replaced:,} replaced", f"{self.bad:,} bad"]
        why = f"; the first bad one: {self.first_bad}" if self.bad else ""
        return f"{self.stored:,} queries stored ({', '.join(notes)}){why}"


def import_json(cache: SearchCache, path: str | Path) -> CacheImport:
    """Store the queries of a `search_cache.json`; unusable entries are left out and counted."""
    texts: dict[str, str] = {}
    faults: list[str] = []
    entries = read_entries(path)
    for query, result in entries:
        where = f"{path}, {query[:80]!r}"
        try:
            if not query_key(query):
                raise DataError(f"{where}: an empty query")
            texts[query_key(query)] = result_text(result, where)
        except DataError as error:
            faults.append(str(error))
    known = {query for query, _ in cache.answers(IMPORTED)}
    cache.put_imported(texts.items())
    return CacheImport(
        stored=len(texts),
        repeated=len(entries) - len(faults) - len(texts),
        replaced=len(known & texts.keys()),
        bad=len(faults),
        first_bad=faults[0] if faults else "",
    )


def import_file(source: str | Path, target: str | Path) -> CacheImport:
    """Store the queries of a `search_cache.json` in the cache file `target`."""
    with closing(SearchCache(target)) as cache:
        return import_json(cache, source)


def export_file(source: str | Path, target: str | Path) -> int:
    """Write the cache file `source` as a `search_cache.json`; the number of queries."""
    with closing(SearchCache(source, read_only=True)) as cache:
        return export_json(cache, target)


def read_entries(path: str | Path) -> list[tuple[str, Any]]:
    """The (query, result) pairs of a JSON object, repeated queries included."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text, object_pairs_hook=Entries)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, Entries):
        raise DataError(f"{path} holds {type(found).__name__}, not an object of query -> result")
    return found


class Entries(list[tuple[str, Any]]):
    """A JSON object as pairs, which keeps keys that occur twice."""


def export_json(cache: SearchCache, path: str | Path) -> int:
    """Write the cache as a `search_cache.json`; the number of queries.

    The format has one answer per query: of several (other sources, other topk) the latest.
    """
    texts = {
        query: answer
        if isinstance(answer, str)
        else as_pages(titled(hit.title, hit.text) for hit in answer)
        for query, answer in cache.answers()
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_file(target, is_shared=True) as aside:
        aside.write_text(json.dumps(texts, ensure_ascii=False, indent=1), encoding="utf-8")
    return len(texts)


def result_text(result: Any, where: str) -> str:
    """A text unchanged; a list of other versions, of texts or of objects, as one line for each item.

    >>> result_text(["Lima.", {"title": "Peru", "snippet": "A country."}], "here")
    'Page 1: Lima.\\nPage 2: Peru: A country.'
    """
    if not isinstance(result, str | list) or isinstance(result, Entries):
        kind = "object" if isinstance(result, Entries) else type(result).__name__
        raise DataError(f"{where}: a result is a text or a list, not {kind}")
    if isinstance(result, str):
        return without_surrogates(result)
    return as_pages(without_surrogates(_snippet(item, where)) for item in result)


def as_pages(texts: Iterable[str]) -> str:
    return "\n".join(f"Page {number}: {text}" for number, text in enumerate(texts, 1))


def _snippet(item: Any, where: str) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Entries | dict):
        given = dict(item)
        inner = given.get("document")
        fields = dict(inner) if isinstance(inner, Entries | dict) else given
        for name in _TEXTS:
            if isinstance(text := fields.get(name), str):
                return titled(str(fields.get("title") or ""), text)
        item = given
    raise DataError(f"{where}: no text in {str(item)[:80]!r}; it needs one of {', '.join(_TEXTS)}")


def titled(title: str, text: str) -> str:
    return f"{title}: {text}" if title and text else title or text
