"""The search tool: documents for a policy's query, from a local corpus or a service.

    SearchTool(corpus="wiki-18.jsonl")                      BM25 over a file, built once
    SearchTool("dense", corpus="wiki-18.jsonl", model=...)  by vectors
    SearchTool(url="http://host:8000/retrieve")             Search-R1's service; wire="msgpack": GEM's
    SearchTool(corpus="small", cache="run.db")              every answer recorded, for a replay

`small.jsonl` is bundled for tests and demonstrations, with questions that need two searches each in
`small-questions.jsonl`.
"""

from __future__ import annotations

from graft.tools.answer_cache import SearchCache
from graft_search.exchange import export_json, import_json
from graft_search.source import SOURCES, Hit, SearchSource, make_source
from graft_search.tool import SearchTool

__all__ = [
    "SOURCES",
    "Hit",
    "SearchCache",
    "SearchSource",
    "SearchTool",
    "export_json",
    "import_json",
    "make_source",
]
