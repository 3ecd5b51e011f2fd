"""Web search services as sources of the search tool; a result is its title and snippet, its id the link.

    name         key in the environment                    service
    serpapi      SERPAPI_API_KEY                           serpapi.com, of Google and other engines
    google_cse   GOOGLE_API_KEY and GOOGLE_CSE_ID          Google's Custom Search JSON API
    bing         BING_API_KEY                              Bing's Web Search v7, or a service of its form
    brightdata   BRIGHTDATA_API_KEY and BRIGHTDATA_ZONE    Bright Data's SERP API
    tavily       TAVILY_API_KEY                            tavily.com

A key is read when the source is made and is never part of a message, a fingerprint or a cache.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

from graft.data.corpus import without_surrogates
from graft.http import HttpClient, HttpFault, json_of, key_for
from graft.tools.errors import ToolError
from graft.trust.masking import mask
from graft_search.source import Hit

MAX_REPLY = 16 * 2**20  # bytes
CONCURRENT = 8  # requests for the queries of one call
FIRST_PAUSE = 0.5  # seconds before the second attempt, doubled from then on
PAGE_RESULTS = 10
"""Results of one of Bing's pages; for more a parameter asks."""
_CHINESE = re.compile(
    "^[^\u3040-\u30ff\uac00-\ud7af]*[\u4e00-\u9fff][^\u3040-\u30ff\uac00-\ud7af]*$"
)
"""Chinese characters, and none of Japanese or Korean writing."""


class WebRequest(NamedTuple):
    """A GET of `url`, or a POST of `content`."""

    url: str
    content: bytes | None = None


class EngineKeys(NamedTuple):
    """How a service is asked for the results of one search engine."""

    country: str
    """The parameter of the searcher's country."""
    defaults: Mapping[str, Any] = {}
    """Parameters of a request that `params` may replace."""


class WebSource:
    """A search service over HTTP.

    `url` replaces the service's address, such as that of a proxy with the same API; it gets the key of
    the variable that `api_key_env` names, and never the service's own without being named for it.
    `engine` is the search engine whose results a service reads (google or bing), `country` that of the
    searcher (cn, de, ...); `params` are further parameters of its requests, such as {"search_depth":
    "advanced"} for tavily. `per_second` limits the requests of this process; a request that would wait
    longer than `timeout` fails. A refused connection and the answers 429 and 5xx are repeated within
    `timeout`; other answers are final.
    """

    name: ClassVar[str]
    address: ClassVar[str]
    variables: ClassVar[tuple[str, ...]]
    """Names of environment variables; the first one holds the key."""
    max_results: ClassVar[int] = 10
    """The most that one request of the service gives."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Parameters of a request that `params` may replace."""
    engines: ClassVar[dict[str, EngineKeys]] = {}
    """The engines, the default first."""

    def __init__(
        self,
        *,
        url: str | None = None,
        api_key_env: str = "",
        timeout: float = 10.0,
        retries: int = 2,
        per_second: float | None = None,
        engine: str = "",
        country: str = "",
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine = self._engine(engine, country)
        self.url = (url or self.address).rstrip("/")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"search url {url!r} is not of the form https://host/path")
        if timeout <= 0 or retries < 0:
            raise ValueError(f"timeout={timeout} must be above 0, retries={retries} at least 0")
        if per_second is not None and per_second <= 0:
            raise ValueError(f"per_second={per_second} must be above 0, or None for no limit")
        named = (api_key_env or self.variables[0], *self.variables[1:])
        missing = [name for name in named if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"search source {self.name!r} needs the environment variable "
                f"{' and '.join(missing)}; a recorded run needs none (cache_mode=replay)"
            )
        owner = urllib.parse.urlsplit(self.address).hostname or ""
        self.key = key_for(self.url, named[0], "" if api_key_env else owner)
        if not self.key:
            raise ValueError(
                f"the key of ${named[0]} is for https://{owner}, and url names another server: name the "
                f"variable with the key for that one (api_key_env={named[0]}, if it is to get this key)"
            )
        self.others = [os.environ[name].strip() for name in named[1:]]
        keys = self.engines.get(self.engine, EngineKeys(""))
        located = {keys.country: country.lower()} if country else {}
        self.params = {**self.defaults, **keys.defaults, **located, **(params or {})}
        settings = [
            *zip(self.variables[1:], self.others, strict=True),
            *sorted(self.params.items()),
            *([("engine", self.engine)] if self.engine not in [*self.engines][:1] else []),
        ]
        self.fingerprint = f"{self.name}:{mask(with_query(self.url, dict(settings)))}"
        self.timeout, self.interval = timeout, 1.0 / per_second if per_second else 0.0
        self._next_start = 0.0
        self._lock = threading.Lock()
        self._client = HttpClient(
            timeout=timeout,
            deadline=timeout,
            retries=retries,
            headers={"Content-Type": "application/json", **self.headers()},
            first_pause=FIRST_PAUSE,
            max_bytes=MAX_REPLY,
        )

    def _engine(self, engine: str, country: str) -> str:
        known = list(self.engines)
        if engine and engine not in known:
            some = f"one of {', '.join(known)}" if known else "left out: it has its own"
            raise ValueError(f"engine={engine!r}: of search source {self.name!r} it must be {some}")
        if country and not known:
            raise ValueError(
                f"country={country!r}: search source {self.name!r} takes none here; its own parameters go "
                "into params"
            )
        if country and not (country.isascii() and country.isalpha() and len(country) == 2):
            raise ValueError(f"country={country!r} is not a code of two letters, such as us or cn")
        return engine or next(iter(known), "")

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def request(self, query: str, topk: int) -> WebRequest:
        raise NotImplementedError(f"{type(self).__name__} must write request()")

    def results(self, reply: dict[str, Any]) -> Iterable[Hit]:
        """The results in the service's reply, best first; ValueError for a reply that is an error."""
        raise NotImplementedError(f"{type(self).__name__} must write results()")

    def open(self) -> None:
        """Nothing to prepare: a request costs money, so none is made to try the key."""

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if len(queries) < 2:
            return [self._answer(query, topk) for query in queries]
        with ThreadPoolExecutor(min(len(queries), CONCURRENT)) as pool:
            return list(pool.map(lambda query: self._answer(query, topk), queries))

    def _answer(self, query: str, topk: int) -> list[Hit]:
        request = self.request(without_surrogates(query), min(topk, self.max_results))
        try:
            reply = self._client.request(
                request.url, request.content, json_of, before=self._wait_for_turn
            )
        except HttpFault as fault:
            raise ToolError(f"{self.name} {self._without_key(str(fault))}") from None
        try:
            if not isinstance(reply, dict):
                raise ValueError(f"expected an object, got {type(reply).__name__}")
            return [hit for hit in self.results(reply) if hit.title or hit.text][:topk]
        except (ValueError, TypeError, AttributeError) as error:
            seen = self._without_key(str(error))
            raise ToolError(f"{self.name} sent no usable reply: {seen}") from None

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "***")

    def _wait_for_turn(self, end: float) -> None:
        """Wait until `per_second` allows a request; a fault if that is after `end`."""
        if not self.interval:
            return
        with self._lock:
            start = max(time.monotonic(), self._next_start)
            if start > end:
                raise HttpFault(
                    f"gets at most {1 / self.interval:g} requests per second (per_second), and "
                    f"{self.timeout:g} s (timeout) are not enough to wait for the earlier ones",
                    is_final=True,
                )
            self._next_start = start + self.interval
        time.sleep(max(0.0, start - time.monotonic()))


class SerpApi(WebSource):
    """Results of an engine (google, bing, baidu, ...); an answer box comes first, as in GEM's server."""

    name = "serpapi"
    address = "https://serpapi.com/search"
    variables = ("SERPAPI_API_KEY",)
    max_results = 100
    engines = {
        "google": EngineKeys("gl", {"engine": "google"}),
        "bing": EngineKeys("cc", {"engine": "bing"}),
    }

    def headers(self) -> dict[str, str]:
        return {}

    def request(self, query: str, topk: int) -> WebRequest:
        amount = "count" if self.params["engine"] == "bing" else "num"
        named = {**self.params, "q": query, amount: topk, "api_key": self.key}
        return WebRequest(with_query(self.url, named))

    def results(self, reply: dict[str, Any]) -> Iterable[Hit]:
        status = _inner(reply, "search_metadata").get("status")
        # a search without results is a success with a text in `error`
        if reply.get("error") and status != "Success":
            raise ValueError(str(reply["error"])[:300])
        box = _inner(reply, "answer_box")
        if box.get("snippet") or box.get("answer"):
            yield _hit(box, text=("snippet", "answer"), link="link")
        for item in _items(reply, "organic_results"):
            yield _hit(item, text=("snippet",), link="link")


class GoogleSearch(WebSource):
    """Google's Custom Search: at most 10 results, of the search engine whose id is GOOGLE_CSE_ID."""

    name = "google_cse"
    address = "https://customsearch.googleapis.com/customsearch/v1"
    variables = ("GOOGLE_API_KEY", "GOOGLE_CSE_ID")
    engines = {"google": EngineKeys("gl")}

    def headers(self) -> dict[str, str]:
        return {}

    def request(self, query: str, topk: int) -> WebRequest:
        named = {**self.params, "q": query, "num": topk, "cx": self.others[0], "key": self.key}
        return WebRequest(with_query(self.url, named))

    def results(self, reply: dict[str, Any]) -> Iterable[Hit]:
        return [_hit(item, text=("snippet",), link="link") for item in _items(reply, "items")]


class BingSearch(WebSource):
    """Bing's Web Search v7. Microsoft ended it in 2025: give the `url` of a service of the same form."""

    name = "bing"
    address = "https://api.bing.microsoft.com/v7.0/search"
    variables = ("BING_API_KEY",)
    max_results = 50
    engines = {"bing": EngineKeys("cc")}

    def headers(self) -> dict[str, str]:
        return {"Ocp-Apim-Subscription-Key": self.key}

    def request(self, query: str, topk: int) -> WebRequest:
        return WebRequest(with_query(self.url, {**self.params, "q": query, "count": topk}))

    def results(self, reply: dict[str, Any]) -> Iterable[Hit]:
        pages = _items(_inner(reply, "webPages"), "value")
        return [_hit(item, title="name", text=("snippet",), link="url") for item in pages]


class BrightData(WebSource):
    """The result page of Google or Bing through Bright Data's SERP API, in its parsed form.

    Bing is asked as ARPO asks it: without quotation marks, in the market of the query's language.
    """

    name = "brightdata"
    address = "https://api.brightdata.com/request"
    variables = ("BRIGHTDATA_API_KEY", "BRIGHTDATA_ZONE")
    max_results = 100
    engines = {"google": EngineKeys("gl", {"hl": "en"}), "bing": EngineKeys("cc")}

    def request(self, query: str, topk: int) -> WebRequest:
        named: dict[str, Any] = {**self.params, "q": query, "num": topk, "brd_json": 1}
        if self.engine == "bing":
            market, language = ("zh-CN", "zh") if _CHINESE.search(query) else ("en-US", "en")
            named = {"q": query.replace('"', ""), "mkt": market, "setLang": language, "brd_json": 1}
            named |= {"count": topk} if topk > PAGE_RESULTS else {}
            named |= self.params
        page = with_query(f"https://www.{self.engine}.com/search", named)
        content = {"zone": self.others[0], "url": page, "format": "raw"}
        return WebRequest(self.url, json.dumps(content).encode())

    def results(self, reply: dict[str, Any]) -> Iterable[Hit]:
        found = _items(reply, "organic")
        return [_hit(item, text=("description",), link="link") for item in found]


class Tavily(WebSource):
    """Tavily: extracts of pages, with scores."""

    name = "tavily"
    address = "https://api.tavily.com/search"
    variables = ("TAVILY_API_KEY",)
    max_results = 20
    defaults = {"search_depth": "basic"}

    def request(self, query: str, topk: int) -> WebRequest:
        content = {**self.params, "query": query, "max_results": topk}
        return WebRequest(self.url, json.dumps(content).encode())

    def results(self, reply: dict[str, Any]) -> Iterable[Hit]:
        return [_hit(item, text=("content",), link="url") for item in _items(reply, "results")]


def with_query(url: str, named: Mapping[str, Any]) -> str:
    if not named:
        return url
    return f"{url}{'&' if '?' in url else '?'}{urllib.parse.urlencode(named)}"


def _inner(reply: dict[str, Any], name: str) -> dict[str, Any]:
    found = reply.get(name)
    return found if isinstance(found, dict) else {}


def _items(reply: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects in a list that is absent where nothing was found."""
    found = reply.get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise ValueError(f"`{name}` is no list of results")
    return [item for item in found if isinstance(item, dict)]


def _hit(item: dict[str, Any], *, title: str = "title", text: tuple[str, ...], link: str) -> Hit:
    found = next((item[name] for name in text if isinstance(item.get(name), str)), "")
    score = item.get("score")
    return Hit(
        str(item.get(link) or ""),
        str(item.get(title) or ""),
        found,
        float(score) if isinstance(score, int | float) else None,
    )
