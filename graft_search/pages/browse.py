"""A search whose pages are read: a second model answers the query from what the pages say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from graft.registry import check_options
from graft.tools.answer_cache import Answer
from graft.tools.errors import ToolError
from graft_search import Hit, SearchTool
from graft_search.cached_tool import arguments_of
from graft_search.pages.download import PageError
from graft_search.pages.fetch import FetchTool
from graft_search.pages.summary import Summariser

INSTRUCTION = (
    "Below are pages that a search has found. Write down the facts in them that answer the goal, with "
    "names, numbers and dates as they are written there. Use nothing but the pages; if none of them "
    "helps, say so in one sentence."
)
CONCURRENT = 8  # pages at a time of one call
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
FEWEST_SHARED = 0.2
"""The part of a snippet's words that a sentence must have for the passage around it to be taken."""


class BrowseTool(SearchTool):
    """The tool `search`, with the pages of its results read by a `summariser` ({url, model, ...}).

    "capital of Peru" -> the facts that the model behind an OpenAI-compatible endpoint finds in the pages.
    Of each page the `page_chars` characters around the passage that the search has shown are read; of a
    result without an address, such as a document of a corpus, its own text. A page that cannot be read
    counts with its snippet. `cache` records results, pages and summaries.
    """

    description = "Search the web; what the pages say about the query is shown."

    def __init__(
        self,
        source: Any = None,
        *,
        summariser: Mapping[str, Any],
        page_chars: int = 6000,
        page_timeout: float = 20.0,
        allow_private: bool = False,
        cache: str | None = None,
        cache_mode: str | None = None,
        **options: Any,
    ) -> None:
        """
        page_chars: of each page; `summariser` has a limit of its own for all of them (max_chars).
        page_timeout: seconds for a page with all its redirects.
        allow_private: read pages of this machine and its network too.
        """
        given = arguments_of(locals())
        if page_chars < 1:
            raise ValueError(f"{page_chars=}: must be 1 or more")
        check_options(Summariser, summariser, "the summariser of tool 'browse'")
        self.summariser = Summariser(
            **{"instruction": INSTRUCTION, "max_tokens": 4096, **summariser}
        )
        self.page_chars = page_chars
        self.fetch = FetchTool(
            timeout=page_timeout, allow_private=allow_private, cache=cache, cache_mode=cache_mode
        )
        super().__init__(source, cache=cache, cache_mode=cache_mode, **options)
        self._given = given

    def render_result(self, query: str, answer: Answer) -> str:
        if not answer or isinstance(answer, str):  # nothing was found, or a text was imported
            return self.render(answer)
        key = f"{self.fingerprint} {self.topk} {self.page_chars} {query}"
        make = self.summariser.fingerprint, key, lambda: self._facts(query, answer)
        try:
            return self.in_tag(self.fetch.recorded(*make))
        except PageError as error:  # a replay without this summary
            raise ToolError(f"the pages found for {query[:200]!r}: {error}") from error

    def _facts(self, query: str, hits: Sequence[Hit]) -> str:
        with ThreadPoolExecutor(min(len(hits), CONCURRENT)) as pool:
            texts = list(pool.map(self._read, hits))
        pages = (
            f"Page {number}: {hit.title} {hit.id}\n{text}"
            for number, (hit, text) in enumerate(zip(hits, texts, strict=True), 1)
        )
        return self.summariser("\n\n".join(pages), query)

    def _read(self, hit: Hit) -> str:
        if not hit.id.startswith(("http://", "https://")):
            return hit.text[: self.page_chars]
        try:
            return excerpt(self.fetch.page(hit.id), hit.text, self.page_chars)
        except (PageError, ToolError):
            return hit.text

    def close(self) -> None:
        super().close()
        self.fetch.close()


def excerpt(page: str, snippet: str, length: int) -> str:
    """The part of a page around the sentence that is most like the snippet; without one, its beginning.

    >>> excerpt("Old towns. Lima is the capital of Peru. It lies on the coast.", "capital of Peru", 40)
    'owns. Lima is the capital of Peru. It li'
    """
    wanted = set(snippet.casefold().split())
    best, at, start = FEWEST_SHARED, 0, 0
    for sentence in _SENTENCE.split(page):
        start = page.index(sentence, start)
        words = set(sentence.casefold().split())
        shared = 2 * len(wanted & words) / max(1, len(wanted) + len(words))
        if shared > best:
            best, at = shared, start + len(sentence) // 2
        start += len(sentence)
    begin = max(0, min(at - length // 2, len(page) - length))
    return page[begin : begin + length]
