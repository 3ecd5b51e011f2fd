"""A search whose pages a second model reads: pages by their addresses, excerpts, recordings, faults."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.config import ConfigError
from graft.envs import make
from graft.evaluate.benchmarks import BENCHMARKS
from graft.evaluate.task_sets import read_sets
from graft.recipe.attempt_keys import TaskSection
from graft.tools import make_tool, make_tools
from graft_search import Hit
from graft_search.pages.browse import BrowseTool, excerpt
from tests.web_server import Reply, Seen, answering

PAGE = (
    b"<title>Lima</title><body><p>"
    + b"Old towns. " * 900
    + b"<p>Lima was founded in 1535. It grew.</p>"
)


class Found:
    """Three results: a page, one that is gone, a document without an address."""

    fingerprint = "found"

    def __init__(self, site: str) -> None:
        self.site = site

    def open(self) -> None: ...

    def retrieve(self, queries: Any, topk: int) -> list[list[Hit]]:
        hits = [
            Hit(f"{self.site}/lima", "Lima", "founded in 1535"),
            Hit(f"{self.site}/gone", "Gone", "a snippet"),
            Hit("doc-3", "Cusco", "a document"),
        ]
        return [hits[:topk] if query != "nothing" else [] for query in queries]


@contextmanager
def world(status: int = 200) -> Iterator[tuple[str, dict[str, Any], list[Seen]]]:
    """A site and a summariser; the requests to the second."""
    reply = json.dumps({"choices": [{"message": {"content": " Founded in 1535. "}}]}).encode()
    html = {"Content-Type": "text/html"}
    with (
        answering(lambda seen: Reply(200, PAGE, html) if seen.path == "/lima" else Reply(404)) as (
            site,
            _,
        ),
        answering(lambda _: Reply(status, reply)) as (url, requests),
    ):
        yield site, {"url": f"{url}/v1", "model": "m", "retries": 0}, requests


def browse(site: str, summariser: dict[str, Any], **more: Any) -> BrowseTool:
    return BrowseTool(Found(site), summariser=summariser, allow_private=True, **more)


def test_one_summary_of_all_pages_is_the_answer():
    with world() as (site, summariser, requests):
        tool = browse(site, summariser, page_chars=60)
        assert tool("When was Lima founded?") == "<information>Founded in 1535.</information>"
        [asked] = [json.loads(seen.body) for seen in requests]
        text = asked["messages"][0]["content"]
        assert "Goal: When was Lima founded?" in text
        assert (
            "Lima was founded in 1535." in text
        )  # the passage of the snippet, 9,900 characters in
        assert (
            f"Page 2: Gone {site}/gone\na snippet" in text
            and "Page 3: Cusco doc-3\na document" in text
        )
        assert len(text) < 1000 and asked["max_tokens"] == 4096
        assert tool("nothing") == "<information>No documents found.</information>"
        assert (tool.name, dict(tool.counts)) == (
            "search",
            {"calls": 2, "cached": 0, "failures": 0},
        )


def test_a_recorded_run_needs_neither_pages_nor_summariser(tmp_path: Path):
    cache = str(tmp_path / "run.db")
    with world() as (site, summariser, requests):
        tool = browse(site, summariser, cache=cache, form="pages")
        first = tool("When was Lima founded?")
        assert tool("When was Lima founded?") == first and len(requests) == 1
        tool.close()
    again = browse(site, summariser, cache=cache, cache_mode="replay", form="pages")
    assert again("When was Lima founded?") == first == "Founded in 1535."
    assert again("Another?").startswith("Error: search failed: ")
    again.close()


def test_a_summariser_that_fails_is_an_error_text():
    with world(status=500) as (site, summariser, _):
        tool = browse(site, summariser)
        assert tool("q").startswith("Error: search failed: the summariser at ")
        assert tool.counts["failures"] == 1


def test_it_is_made_from_a_recipe_in_tags_of_search_and_by_workers():
    options = {"corpus": "small", "summariser": {"url": "http://h/v1", "model": "m"}, "topk": 2}
    [tool] = make_tools([{"browse": options}])
    assert (tool.name, tool.topk, tool.page_chars) == ("search", 2, 6000)
    assert pickle.loads(pickle.dumps(tool)).summariser.fingerprint == tool.summariser.fingerprint
    wrappers = [{"tools": {"use": [{"browse": options}], "format": "arpo"}}]
    assert make("prompts", rows=[{"prompt": "q", "answer": "a"}], wrappers=wrappers).stop == (
        "</search>",
    )
    for wrong, why in [
        ({"summariser": {"model": "m"}}, "needs url="),
        ({"summariser": {"url": "http://h/v1", "modle": "m"}}, "did you mean 'model'"),
        ({**options, "page_chars": 0}, "page_chars=0"),
    ]:
        with pytest.raises(ValueError, match=why):
            make_tool("browse", **wrong)


def test_an_excerpt_is_the_beginning_unless_a_sentence_is_like_the_snippet():
    page = "a b c d. " * 50 + "Lima is the capital. " + "e f g h. " * 50
    assert excerpt(page, "the capital, Lima", 100).count("Lima is the capital.") == 1
    assert excerpt(page, "nothing of it", 100) == page[:100]
    assert excerpt("short", "the capital", 100) == "short"


def test_benchmarks_take_options_of_their_tools():
    reader = '{summariser: {url: "http://h/v1", model: m}, source: brightdata, engine: bing, country: cn}'
    given = [f"gaia.search={reader}", "gaia.python={timeout: 7}", "gaia.data=rows.jsonl"]
    [tasks] = read_sets("gaia", given, TaskSection())
    used = {
        name: options
        for one in tasks.wrappers[:2]
        for name, options in one["tools"]["use"][0].items()
    }
    assert used["python"] == {"timeout": 7}
    assert used["browse"]["summariser"] == {"url": "http://h/v1", "model": "m"}
    assert used["browse"]["topk"] == 10 and used["browse"]["engine"] == "bing"
    assert [one["tools"]["max_uses"] for one in tasks.wrappers[:2]] == [5, 10]
    assert (
        tasks.wrappers[2] == BENCHMARKS["gaia"].wrappers[2] and tasks.args["data"] == "rows.jsonl"
    )
    [plain] = read_sets("gaia", ["gaia.search={topk: 3}"], TaskSection())
    assert plain.wrappers[1]["tools"]["use"][0]["search"]["topk"] == 3
    with pytest.raises(ConfigError, match=r"aime24\.search"):
        read_sets("aime24", ["aime24.search={topk: 3}"], TaskSection())
    with pytest.raises(ConfigError, match=r"gaia\.search=5"):
        read_sets("gaia", ["gaia.search=5"], TaskSection())
