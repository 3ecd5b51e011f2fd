"""Search caches in ARPO's format: one JSON object, query -> result text.

Lists of other versions (texts, or objects with a title and a text or a snippet) become the same text,
with one line "Page 1: ..." for each item.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft.data.corpus import without_surrogates
from graft.data.errors import DataError
from graft.files import new_file
from graft.tools.search.cache import Answer, SearchCache

_TEXTS = ("text", "snippet", "description", "contents", "content")


def import_json(cache: SearchCache, path: str | Path) -> int:
    """Store every query of a `search_cache.json` in the cache; the number of queries."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds {type(found).__name__}, not an object of query -> result")
    rows = [
        (query, result_text(result, f"{path}, {query[:80]!r}")) for query, result in found.items()
    ]
    cache.put_imported(rows)
    return len(rows)


def export_json(cache: SearchCache, path: str | Path) -> int:
    """Write the cache as a `search_cache.json`; the number of queries.

    The format has one answer per query: of several (other sources, other topk) the latest.
    """
    texts = {entry.query: answer_text(entry.answer) for entry in cache.entries()}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_file(target, is_shared=True) as aside, aside.open("w", encoding="utf-8") as file:
        json.dump(texts, file, ensure_ascii=False, indent=1)
    return len(texts)


def result_text(result: Any, where: str) -> str:
    """
    >>> result_text(["Lima.", {"title": "Peru", "snippet": "A country."}], "here")
    'Page 1: Lima.\\nPage 2: Peru: A country.'
    """
    if isinstance(result, str):
        return without_surrogates(result)
    if not isinstance(result, list):
        raise DataError(f"{where}: a result is a text or a list, not {type(result).__name__}")
    return as_pages([without_surrogates(_snippet(item, where)) for item in result])


def answer_text(answer: Answer) -> str:
    return (
        answer if isinstance(answer, str) else as_pages([_titled(h.title, h.text) for h in answer])
    )


def as_pages(texts: list[str]) -> str:
    return "\n".join(f"Page {number}: {text}" for number, text in enumerate(texts, 1))


def _snippet(item: Any, where: str) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        inner = item.get("document")
        fields = inner if isinstance(inner, dict) else item
        for name in _TEXTS:
            if isinstance(text := fields.get(name), str):
                return _titled(str(fields.get("title") or ""), text)
    raise DataError(f"{where}: no text in {str(item)[:80]!r}; it needs one of {', '.join(_TEXTS)}")


def _titled(title: str, text: str) -> str:
    return f"{title}: {text}" if title and text else title or text
