"""Web search services, by stand-ins of their HTTP APIs: requests as documented, answers as hits."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from graft.tools.errors import ToolError
from graft_search import Hit, SearchTool, make_source
from graft_search.server import served_source
from graft_search.source import WEB_SOURCES
from tests.web_server import Reply, Seen, answering

KEY = "secret-key-1"
KEYS = {
    "SERPAPI_API_KEY": KEY,
    "GOOGLE_API_KEY": KEY,
    "GOOGLE_CSE_ID": "engine-7",
    "BING_API_KEY": KEY,
    "BRIGHTDATA_API_KEY": KEY,
    "BRIGHTDATA_ZONE": "serp1",
    "TAVILY_API_KEY": KEY,
}
LIMA = Hit("https://a.org/lima", "Lima", "Lima is the capital of Peru.")
CUSCO = Hit("https://a.org/cusco", "Cusco", "")


def listed(title: str = "title", text: str = "snippet", link: str = "link") -> list[dict[str, Any]]:
    """Two results and one without any text, in the names of a service."""
    return [
        {title: "Lima", text: LIMA.text, link: LIMA.id, "position": 1},
        {title: "Cusco", link: CUSCO.id, "position": 2},
        {link: "https://a.org/empty"},
    ]


REPLIES: dict[str, dict[str, Any]] = {
    "serpapi": {"search_metadata": {"status": "Success"}, "organic_results": listed()},
    "google_cse": {"kind": "customsearch#search", "items": listed()},
    "bing": {"_type": "SearchResponse", "webPages": {"value": listed("name", link="url")}},
    "brightdata": {"general": {}, "organic": listed(text="description")},
    "tavily": {"query": "q", "results": listed(text="content", link="url")},
}
EMPTY: dict[str, dict[str, Any]] = {
    "serpapi": {
        "search_metadata": {"status": "Success"},
        "error": "Google hasn't returned any results for this query.",
    },
    "google_cse": {"searchInformation": {"totalResults": "0"}},
    "bing": {"_type": "SearchResponse"},
    "brightdata": {"general": {}},
    "tavily": {"results": []},
}
REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "serpapi": (401, {"error": "Invalid API key."}),
    "google_cse": (403, {"error": {"code": 403, "message": "The request is missing a valid key."}}),
    "bing": (401, {"error": {"code": "401", "message": "Access denied"}}),
    "brightdata": (400, {"error": "zone 'serp1' not found"}),
    "tavily": (432, {"detail": {"error": "This request exceeds your plan's set usage limit."}}),
}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def at(url: str, name: str) -> dict[str, str]:
    """A server of the same form elsewhere, which gets the key by name."""
    variables = dict(
        zip(WEB_SOURCES, ("SERPAPI", "GOOGLE", "BING", "BRIGHTDATA", "TAVILY"), strict=True)
    )
    return {"url": url, "api_key_env": f"{variables[name]}_API_KEY"}


def sent(status: int, content: Any, **headers: str) -> Reply:
    return Reply(status, json.dumps(content).encode(), headers)


def query_of(seen: Seen) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(seen.path).query).items()}


@pytest.mark.parametrize("name", WEB_SOURCES)
def test_results_become_hits(name: str):
    with answering(lambda _: sent(200, REPLIES[name])) as (url, _):
        source = make_source(name, **at(url, name))
        assert source.retrieve(["capital of Peru"], 3) == [[LIMA, CUSCO]]
        assert source.retrieve(["capital of Peru"], 1) == [[LIMA]]
        assert source.retrieve(["a", "b"], 1) == [[LIMA], [LIMA]]
        assert source.retrieve([], 1) == []
    assert KEY not in source.fingerprint


@pytest.mark.parametrize("name", WEB_SOURCES)
def test_nothing_found_is_no_failure(name: str):
    with answering(lambda _: sent(200, EMPTY[name])) as (url, _):
        tool = SearchTool(name, **at(url, name))
        assert tool("xyzzy") == "<information>No documents found.</information>"
        assert tool.counts["failures"] == 0


@pytest.mark.parametrize("name", WEB_SOURCES)
def test_a_refusal_is_a_text_without_the_key(name: str):
    status, content = REFUSED[name]
    with answering(lambda _: sent(status, {**content, "key": KEY})) as (url, requests):
        tool = SearchTool(name, **at(url, name))
        answer = tool("capital of Peru")
    assert answer.startswith(f"Error: search failed: {name} answered {status}: ")
    assert KEY not in answer and "***" in answer
    assert len(requests) == 1 and tool.counts["failures"] == 1


@pytest.mark.parametrize("name", WEB_SOURCES)
def test_a_missing_key_is_named_at_the_start(name: str, monkeypatch: pytest.MonkeyPatch):
    for variable in KEYS:
        monkeypatch.delenv(variable)
    with pytest.raises(
        ValueError, match=f"source '{name}' needs the environment variable [A-Z_]+KEY"
    ):
        SearchTool(name)


def test_requests_are_those_of_the_services():
    requests: dict[str, Seen] = {}
    for name in WEB_SOURCES:
        with answering(lambda _, name=name: sent(200, REPLIES[name])) as (url, seen):
            make_source(name, **at(f"{url}/api", name)).retrieve(["a & b"], 500)
        requests[name] = seen[0]
    assert query_of(requests["serpapi"]) == {
        "engine": "google",
        "q": "a & b",
        "num": "100",
        "api_key": KEY,
    }
    assert query_of(requests["google_cse"]) == {
        "q": "a & b",
        "num": "10",
        "cx": "engine-7",
        "key": KEY,
    }
    assert query_of(requests["bing"]) == {"q": "a & b", "count": "50"}
    assert requests["bing"].headers["ocp-apim-subscription-key"] == KEY
    assert requests["brightdata"].headers["authorization"] == f"Bearer {KEY}"
    assert json.loads(requests["brightdata"].body) == {
        "zone": "serp1",
        "url": "https://www.google.com/search?hl=en&q=a+%26+b&num=100&brd_json=1",
        "format": "raw",
    }
    assert requests["tavily"].headers["authorization"] == f"Bearer {KEY}"
    assert json.loads(requests["tavily"].body) == {
        "search_depth": "basic",
        "query": "a & b",
        "max_results": 20,
    }
    assert all(seen.path.startswith("/api") for seen in requests.values())


def test_params_reach_the_service_and_tell_recordings_apart():
    with answering(lambda _: sent(200, REPLIES["serpapi"])) as (url, seen):
        other = make_source("serpapi", **at(url, "serpapi"), params={"engine": "bing", "gl": "pe"})
        other.retrieve(["q"], 1)
        assert other.fingerprint != make_source("serpapi", **at(url, "serpapi")).fingerprint
    assert query_of(seen[0])["engine"] == "bing" and query_of(seen[0])["gl"] == "pe"


def asked_page(seen: Seen) -> tuple[str, dict[str, str]]:
    """The result page that a request to Bright Data names, and its parameters."""
    parts = urlsplit(json.loads(seen.body)["url"])
    return f"{parts.scheme}://{parts.netloc}{parts.path}", {
        name: values[0] for name, values in parse_qs(parts.query).items()
    }


@pytest.mark.parametrize(
    ("query", "market", "language"),
    [
        ('capital of "Peru"', "en-US", "en"),
        ("秘鲁的首都", "zh-CN", "zh"),
        ("ペルーの首都", "en-US", "en"),
    ],
)
def test_bing_is_asked_through_bright_data_as_arpo_asks_it(query: str, market: str, language: str):
    with answering(lambda _: sent(200, REPLIES["brightdata"])) as (url, seen):
        tool = SearchTool(
            "brightdata",
            **at(url, "brightdata"),
            engine="bing",
            country="CN",
            topk=10,
            form="pages",
        )
        assert tool(query).startswith("Page 1: Lima: Lima is the capital of Peru.")
        page, named = asked_page(seen[0])
        SearchTool("brightdata", **at(url, "brightdata"), engine="bing", topk=30)(query)
        assert asked_page(seen[1])[1]["count"] == "30"
    assert page == "https://www.bing.com/search"
    assert named == {
        "q": query.replace('"', ""), "mkt": market, "setLang": language, "brd_json": "1", "cc": "cn",
    }  # fmt: skip


def test_an_engine_and_a_country_belong_to_the_recording():
    with answering(lambda _: sent(200, REPLIES["brightdata"])) as (url, seen):

        def source(**more: Any) -> Any:
            return make_source("brightdata", **at(url, "brightdata"), **more)

        prints = [
            source(**more).fingerprint for more in ({}, {"engine": "bing"}, {"country": "de"})
        ]
        assert len(set(prints)) == 3
        assert (
            source(engine="google").fingerprint == prints[0]
        )  # as recorded before there were others
        source(country="de").retrieve(["q"], 5)
    page, named = asked_page(seen[0])
    assert page == "https://www.google.com/search"
    assert named == {"hl": "en", "q": "q", "num": "5", "gl": "de", "brd_json": "1"}


@pytest.mark.parametrize(
    ("source", "engine", "country", "parameters"),
    [
        ("serpapi", "bing", "cn", {"engine": "bing", "cc": "cn", "count": "2"}),
        ("serpapi", "", "pe", {"engine": "google", "gl": "pe", "num": "2"}),
        ("google_cse", "google", "pe", {"gl": "pe"}),
        ("bing", "", "pe", {"cc": "pe"}),
    ],
)
def test_each_service_gets_engine_and_country_in_its_own_names(
    source: str, engine: str, country: str, parameters: dict[str, str]
):
    with answering(lambda _: sent(200, REPLIES[source])) as (url, seen):
        make_source(source, **at(url, source), engine=engine, country=country).retrieve(["q"], 2)
    assert parameters.items() <= query_of(seen[0]).items()


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("brightdata", {"engine": "yahoo"}),
        ("bing", {"engine": "google"}),
        ("tavily", {"engine": "google"}),
        ("tavily", {"country": "cn"}),
        ("brightdata", {"country": "China"}),
    ],
)
def test_an_engine_or_country_that_a_service_does_not_have_is_refused(source: str, wrong: dict):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        make_source(source, **at("https://a.org", source), **wrong)


def test_an_answer_box_comes_first_and_an_error_of_the_search_is_one():
    box = {"title": "Capital", "answer": "Lima"}
    with answering(lambda _: sent(200, {**REPLIES["serpapi"], "answer_box": box})) as (url, _):
        found = make_source("serpapi", **at(url, "serpapi")).retrieve(["q"], 2)
        assert found == [[Hit("", "Capital", "Lima"), LIMA]]
    bad = {"search_metadata": {"status": "Error"}, "error": "proxy timeout"}
    with (
        answering(lambda _: sent(200, bad)) as (url, _),
        pytest.raises(ToolError, match="serpapi sent no usable reply: proxy timeout"),
    ):
        make_source("serpapi", **at(url, "serpapi")).retrieve(["q"], 2)


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'{"organic": 3}'])
def test_a_reply_of_another_form_is_a_failure(body: bytes):
    with answering(lambda _: Reply(200, body)) as (url, _):
        answer = SearchTool("brightdata", **at(url, "brightdata"), retries=0)("q")
    assert answer.startswith("Error: search failed: brightdata sent ")


def test_a_429_is_tried_again_after_the_pause_that_it_names():
    replies = [
        sent(429, {"error": "slow down"}, **{"Retry-After": "0"}),
        sent(200, REPLIES["tavily"]),
    ]
    with answering(lambda _: replies.pop(0)) as (url, requests):
        assert make_source("tavily", **at(url, "tavily")).retrieve(["q"], 1) == [[LIMA]]
    assert len(requests) == 2
    with (
        answering(lambda _: sent(429, {"e": 1}, **{"Retry-After": "60"})) as (url, requests),
        pytest.raises(ToolError, match="tavily answered 429"),
    ):
        make_source("tavily", **at(url, "tavily"), timeout=2).retrieve(["q"], 1)
    assert len(requests) == 1


def test_per_second_spaces_requests_and_refuses_to_wait_too_long():
    with answering(lambda _: sent(200, REPLIES["bing"])) as (url, _):
        source = make_source("bing", **at(url, "bing"), per_second=10)
        start = time.monotonic()
        source.retrieve(["a", "b", "c"], 1)
        assert time.monotonic() - start >= 0.2
        slow = make_source("bing", **at(url, "bing"), per_second=0.1, timeout=1)
        slow.retrieve(["a"], 1)
        with pytest.raises(ToolError, match=r"at most 0\.1 requests per second"):
            slow.retrieve(["b"], 1)


@pytest.mark.parametrize("name", WEB_SOURCES)
def test_a_recorded_run_repeats_without_service_and_key(
    name: str, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    cache = str(tmp_path / "run.db")
    with answering(lambda _: sent(200, REPLIES[name])) as (url, requests):
        tool = SearchTool(name, **at(url, name), cache=cache)
        first = tool("capital of Peru")
        assert tool("capital of Peru") == first and len(requests) == 1
        tool.close()
    for variable in KEYS:
        monkeypatch.delenv(variable)
    again = SearchTool(name, cache=cache, cache_mode="replay")
    assert again("capital of Peru") == first
    assert again("capital of Chile").startswith("Error: search failed: no recorded answer")
    again.close()
    assert KEY.encode() not in (tmp_path / "run.db").read_bytes()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="searches the web; corpus= is for"):
        SearchTool("tavily", corpus="small")
    with pytest.raises(ValueError, match="'tavily' has no argument 'engin'"):
        SearchTool("tavily", engin="google")
    with pytest.raises(ValueError, match="not of the form https"):
        SearchTool("tavily", url="localhost")
    with pytest.raises(ValueError, match="per_second=0 must be above 0"):
        SearchTool("tavily", per_second=0)


def test_the_source_of_a_server():
    assert served_source("", "tavily").fingerprint.startswith("tavily:")
    assert served_source("small").fingerprint.startswith("bm25:")
    for arguments, why in [
        (("",), "nothing to search in"),
        (("small", "tavily"), "searches the web: it has no corpus"),
    ]:
        with pytest.raises(ValueError, match=why):
            served_source(*arguments)
    with pytest.raises(ValueError, match="give --model too"):
        served_source("small", vectors="a.faiss", query_prefix="query: ")


@pytest.mark.parametrize("name", WEB_SOURCES)
def test_a_key_goes_to_its_own_service_only(name: str):
    own = make_source(name)
    assert own.key == KEY and own.url.startswith("https://")  # type: ignore[attr-defined]
    for url in ("https://other.example/search", "http://127.0.0.1:9", own.url.replace("s:", ":")):  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="names another server"):
            make_source(name, url=url)
    with pytest.raises(ValueError, match="in clear"):
        make_source(name, **at("http://other.example/search", name))


def test_a_redirect_to_another_server_gets_no_key():
    with (
        answering(lambda _: sent(200, REPLIES["bing"])) as (other, seen),
        answering(lambda _: Reply(302, b"", {"Location": f"{other}/x"})) as (url, _),
        pytest.raises(ToolError, match="points to another server"),
    ):
        make_source("bing", **at(url, "bing")).retrieve(["q"], 1)
    assert seen == []
