"""The fetch tool: an address is answered with the text of its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.data.corpus import without_surrogates
from graft.registry import check_options
from graft.tools.answer_cache import CacheBroken
from graft.tools.errors import ToolError
from graft_search.cached_tool import CachedTool, arguments_of
from graft_search.pages.download import PageError, download
from graft_search.pages.html_text import decoded, html_text
from graft_search.pages.summary import Summariser

PAGES = "pages"
"""The source name of page texts in a cache."""
MAX_KEPT = 200_000
"""Characters of a page that are kept: in the cache, and for the summariser."""
HTML = ("text/html", "application/xhtml+xml")
TEXTS = ("application/json", "application/xml", "application/ld+json", "application/rss+xml")
CUT = " [...]"


class FetchTool(CachedTool):
    """The text of a page: "https://example.org/lima" -> "Lima\\n\\nLima is the capital of Peru. ...".

    The content of a call is an address, and after a blank optionally what to look for in the page; with
    a `summariser` ({url, model, ...} of an OpenAI-compatible endpoint) a second model answers with the
    facts that help, else the page's beginning is shown.

    Addresses of this machine and its network are refused unless `allow_private`. A page that cannot be
    read is answered with a text that begins with "Error: ". `cache` and `cache_mode` are those of the
    search tool, and the two may share a file.
    """

    name = "fetch"
    description = "Read a web page; its text is shown."
    parameters = {
        "type": "object",
        "properties": {
            "url": {"type": "string", "description": "The address, https://..."},
            "goal": {"type": "string", "description": "What to look for in the page."},
        },
        "required": ["url"],
    }

    def __init__(
        self,
        *,
        max_chars: int = 8000,
        max_bytes: int = 2**21,
        timeout: float = 10.0,
        tag: str = "information",
        allow_private: bool = False,
        cache: str | None = None,
        cache_mode: str | None = None,
        concurrency: int | None = None,
        summariser: Mapping[str, Any] | None = None,
    ) -> None:
        """
        max_chars: a longer answer is cut.
        max_bytes: the rest of a longer page is not read.
        timeout: seconds for a page with all its redirects.
        tag: the answer is between <tag> and </tag>; "" leaves the tags out.
        concurrency: calls at a time, over all envs of the process; None: no limit.
        """
        given = arguments_of(locals())
        for name in ("max_chars", "max_bytes", "timeout", "concurrency"):
            if given[name] is not None and given[name] <= 0:
                raise ValueError(f"{name}={given[name]}; must be above 0")
        self.max_chars, self.max_bytes, self.timeout = max_chars, max_bytes, timeout
        self.tag, self.allow_private, self.concurrency = tag, allow_private, concurrency
        self.summariser: Summariser | None = None
        if summariser is not None:
            check_options(Summariser, summariser, "the summariser of tool 'fetch'")
            self.summariser = Summariser(**summariser)
        super().__init__(cache, cache_mode, given)

    def __call__(self, content: str) -> str:
        url, _, goal = without_surrogates(content).strip().partition(" ")
        return self.call({"url": url, "goal": goal})

    def call(self, arguments: Mapping[str, Any]) -> str:
        url, goal = arguments.get("url"), arguments.get("goal") or ""
        if not isinstance(url, str) or not url.strip():
            return self._failed("no address; write https://...")
        if not isinstance(goal, str):
            return self._failed("`goal` must be a text")
        url = without_surrogates(url).strip()
        try:
            text = self.page(url)
            if self.summariser is not None:
                text = self._summary(self.summariser, url, text, goal.strip())
        except CacheBroken:
            raise  # without the cache the run could not be replayed
        except (PageError, ToolError) as error:
            return self._failed(f"cannot read {url[:200]}: {error}")
        self._count("calls")
        shown = text if len(text) <= self.max_chars else text[: self.max_chars] + CUT
        return f"<{self.tag}>{shown}</{self.tag}>" if self.tag else shown

    def page(self, url: str) -> str:
        """The text of a page; PageError if it cannot be read."""
        return self.recorded(PAGES, url, lambda: self._read(url))

    def _summary(self, summariser: Summariser, url: str, page: str, goal: str) -> str:
        source = summariser.fingerprint
        return self.recorded(source, f"{url} {goal}", lambda: summariser(page, goal))

    def recorded(self, source: str, key: str, make: Any) -> str:
        """The cached text for `key`; made and stored where there is none."""
        if self.cache is None:
            return make()
        found = self.cache.get(source, key, 0)
        if isinstance(found, str):
            self._count("cached")
            return found
        if self.cache_mode == "replay":
            raise PageError(f"it is not recorded in {self.cache.path.name}")
        return str(self.cache.put(source, key, 0, make()))

    def _read(self, url: str) -> str:
        page = download(
            url,
            timeout=self.timeout,
            max_bytes=self.max_bytes,
            allow_private=self.allow_private,
        )
        is_html = page.content_type in HTML
        if not (is_html or page.content_type.startswith("text/") or page.content_type in TEXTS):
            raise PageError(f"it is {page.content_type}, not text")
        text = decoded(page.body, page.charset)
        text = html_text(text) if is_html else text.strip()
        if not text:
            raise PageError("the page has no text (it may be made by scripts)")
        return text[:MAX_KEPT]
