"""The search tool: a query is answered with the best documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.data.corpus import without_surrogates
from graft.tools.answer_cache import IMPORTED, Answer, CacheBroken, SearchCache
from graft.tools.errors import ToolError
from graft_search.cached_tool import CachedTool, arguments_of
from graft_search.exchange import as_pages, titled
from graft_search.source import MAX_QUERY, MAX_TOPK, SearchSource, pick_source

FORMS = {
    "documents": ("information", "No documents found."),
    "pages": ("", "No search results found."),
}
"""Form of the results -> its tag, and the text without results."""
CUT = " [...]"


class SearchTool(CachedTool):
    """Documents for a query: "capital of Peru" -> "<information>Doc 1(Title: Lima) Lima is ...".

    Where to search: `corpus` (a jsonl or parquet file, or "small") with source "bm25" (the default)
    or "dense", or `url` of a retrieval service (else $SEARCH_URL). `source` may also be a
    "your.module:Class" or an object with `retrieve`. Further keywords go to the source: k1, b, index;
    model, query_prefix, ...; wire, retries. `timeout` applies to a service; local sources have none, and
    the length of a query is bounded.

    With a `cache` file, `cache_mode` is one of:
    live    the source answers every query; the cache is not used
    record  the cache answers the queries that it has; other answers are stored in it (default)
    replay  only the cache answers; corpus, service and network are not needed

    A failure (an empty query, a dead service, a query that was not recorded) is answered with a text
    that begins with "Error: ", so that the policy can continue; `counts` has calls, cached, failures.
    """

    name = "search"
    description = "Search a collection of documents; the best matches are shown."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
    }

    def __init__(
        self,
        source: str | SearchSource | None = None,
        *,
        corpus: str | None = None,
        url: str | None = None,
        topk: int = 3,
        form: str = "documents",
        tag: str | None = None,
        max_chars: int | None = 2000,
        cache: str | None = None,
        cache_mode: str | None = None,
        concurrency: int | None = None,
        timeout: float = 5.0,
        **options: Any,
    ) -> None:
        """
        form: documents are GEM's lines, "Doc 1(Title: t) text", in <information>; pages are ARPO's lines,
        "Page 1: t: text", without a tag.
        tag: the results are between <tag> and </tag>; "" leaves the tags out; None: the form's.
        max_chars: longer texts of documents are cut; None: never.
        concurrency: calls at a time, over all envs of the process; None: no limit.
        `graft.tools.calling` enforces it.
        """
        given = arguments_of(locals())
        if type(topk) is not int or not 1 <= topk <= MAX_TOPK:
            raise ValueError(f"topk={topk!r} is not a whole number between 1 and {MAX_TOPK}")
        if max_chars is not None and max_chars < 1:
            raise ValueError(f"max_chars={max_chars}; give at least 1, or None for whole documents")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency={concurrency}; give at least 1, or None for no limit")
        if form not in FORMS:
            raise ValueError(f"form={form!r}; known: {', '.join(FORMS)}")
        self.topk, self.max_chars = topk, max_chars
        self.form, self.tag = form, FORMS[form][0] if tag is None else tag
        self.concurrency = concurrency
        super().__init__(cache, cache_mode, given)
        self.source: SearchSource | None = None
        if self.cache_mode == "replay" and self.cache is not None:
            is_described = corpus or url or not isinstance(source, str | None)
            is_gone = corpus is not None and corpus != "small" and not Path(corpus).is_file()
            wanted = None
            if is_described and not is_gone:
                wanted = pick_source(source, corpus, url, timeout, options).fingerprint
            self.fingerprint = recorded_source(self.cache, wanted, topk)
        else:
            self.source = pick_source(source, corpus, url, timeout, options)
            self.source.open()
            self.fingerprint = self.source.fingerprint

    def __call__(self, content: str) -> str:
        query = without_surrogates(content).strip()
        if not query:
            return self._failed("empty query; write what to look for")
        if len(query) > MAX_QUERY:
            return self._failed(
                f"query of {len(query)} characters; at most {MAX_QUERY} are allowed"
            )
        try:
            text = self.render_result(query, self._look_up(query))
        except CacheBroken:
            raise  # without the cache the run could not be replayed
        except ToolError as error:
            return self._failed(f"search failed: {error}")
        self._count("calls")
        return text

    def render_result(self, query: str, answer: Answer) -> str:
        """What the policy reads."""
        return self.render(answer)

    def render(self, answer: Answer) -> str:
        """Hits as "Doc 1(Title: t) text", one per line; an imported text unchanged."""
        if not answer:
            body = FORMS[self.form][1]
        elif isinstance(answer, str):
            body = answer
        elif self.form == "pages":
            body = as_pages(titled(hit.title, self._cut(hit.text)) for hit in answer)
        else:
            lines = (
                f"Doc {number}(Title: {hit.title}) {self._cut(hit.text)}\n"
                for number, hit in enumerate(answer, 1)
            )
            body = "".join(lines)
        return self.in_tag(body)

    def in_tag(self, body: str) -> str:
        return f"<{self.tag}>{body}</{self.tag}>" if self.tag else body

    def _cut(self, text: str) -> str:
        is_long = self.max_chars is not None and len(text) > self.max_chars
        return text[: self.max_chars] + CUT if is_long else text

    def _look_up(self, query: str) -> Answer:
        if self.cache is not None:
            answer = self.cache.get(self.fingerprint, query, self.topk)
            if answer is not None:
                self._count("cached")
                return answer
        if self.source is None:
            assert self.cache is not None  # replay
            raise ToolError(f"no recorded answer to {query[:200]!r} in {self.cache.path.name}")
        (answer,) = self.source.retrieve([query], self.topk)
        if self.cache is not None:
            return self.cache.put(self.fingerprint, query, self.topk, answer)
        return answer


def recorded_source(cache: SearchCache, wanted: str | None, topk: int) -> str:
    """The source whose answers a replay reads: the described one, else the only one in the cache."""
    known = cache.sources()
    if wanted in known or (wanted is None and len(known) == 1):
        found = wanted or known[0]
        recorded = cache.topks(found)
        if topk in recorded or cache.topks(IMPORTED):  # imported answers serve every topk
            return found
        # another topk than the recording's would find nothing, call after call
        why = f"was recorded with topk={', '.join(map(str, recorded))}, not {topk}; replay it with the same"
    elif not known and len(cache):
        return IMPORTED
    else:
        why = (
            f"cannot be replayed for {wanted or 'an unnamed source'}: it holds answers of "
            f"{', '.join(known) or 'nothing'}. Give the corpus, url and options it was recorded with, or "
            "none of them if it was recorded from one source"
        )
    cache.close()
    raise ValueError(f"{cache.path} {why}")
