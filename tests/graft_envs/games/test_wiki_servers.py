"""The MediaWiki and Kiwix backends, against stand-in servers in this process.

They answer in the shape of the real ones, from five pages; no real server is requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from graft_envs.games.wiki.game import WikiGame
from graft_envs.games.wiki.pages import WikiError
from graft_envs.games.wiki.servers import Kiwix, MediaWiki, ServedWiki, title_of
from tests.web_server import Reply, Seen, answering

PAGES = {
    "Apple": ["Tree", "Old Name", "Nowhere"],
    "Tree": ["Apple", "Wood pulp"],
    "Wood pulp": ["Tree", "Mercury"],
    "Stone": ["Apple"],
}
MOVED = {"Old Name": "Stone"}
FAST: dict[str, Any] = {"query_delay_ms": 0, "max_query_attempts": 3, "timeout_s": 5}


def stand_in(seen: Seen) -> Reply:
    address = urlsplit(seen.path)
    query = {name: values[0] for name, values in parse_qs(address.query).items()}
    if address.path == "/w/api.php":
        return Reply(200, json.dumps(media_wiki(query)).encode())
    if address.path == "/suggest":
        titles = sorted(PAGES)
        hints = [{"value": t, "kind": "path", "path": t.replace(" ", "_")} for t in titles]
        return Reply(200, json.dumps([*hints, {"value": "x", "kind": "pattern"}]).encode())
    title = unquote(address.path.removeprefix("/raw/book/content/")).replace("_", " ")
    if title in MOVED:
        to = f'<meta http-equiv="refresh" content="0;URL={MOVED[title]}"><a href="x">x</a>'
        return Reply(200, to.encode())
    if title == "Mercury":
        return Reply(200, b"<h1>Mercury</h1><p>Mercury may refer to: <a href='X'>X</a></p>")
    if title not in PAGES:
        return Reply(404, b"not found")
    return Reply(200, kiwix_html(title).encode())


def media_wiki(query: dict[str, str]) -> dict[str, Any]:
    if query.get("list") == "allpages":
        return {"query": {"allpages": [{"title": title} for title in sorted(PAGES)]}}
    title = MOVED.get(query["titles"], query["titles"])
    if title == "Mercury":
        page = {"title": title, "pageprops": {"disambiguation": ""}, "links": [{"title": "X"}]}
    elif title in PAGES:
        links = [{"title": link} for link in PAGES[title]]
        # links come in portions of two
        at = int(query.get("plcontinue", 0))
        page = {"title": title, "extract": f"{title} is a thing.", "links": links[at : at + 2]}
        if at + 2 < len(links):
            return {"continue": {"plcontinue": str(at + 2)}, "query": {"pages": [page]}}
    else:
        page = {"title": title, "missing": True}
    return {"query": {"pages": [page]}}


def kiwix_html(title: str) -> str:
    links = " ".join(f'<a href="{link.replace(" ", "_")}#top">{link}</a>' for link in PAGES[title])
    out = '<a href="https://example.org">out</a> <a href="#note">1</a> <a href="geo:1,2">here</a>'
    return (
        f"<html><head><title>{title}</title></head><body><h1 id='firstHeading'>{title}</h1>"
        f"<div class='mw-parser-output'><p>{title} is a <b>thing</b>.</p>{links} {out}</div></body>"
    )


@contextmanager
def serving(faults: int = 0) -> Iterator[Any]:
    """The address and the requests of a server that is busy `faults` times."""
    left = [Reply(503, b"busy")] * faults
    with answering(lambda seen: left.pop() if left else stand_in(seen)) as (url, requests):
        yield SimpleNamespace(url=url, requests=requests)


def opened(kind: str, server: Any, **settings: Any) -> ServedWiki:
    if kind == "mw":
        return MediaWiki(f"{server.url}/w/api.php", **{**FAST, **settings})
    return Kiwix(server.url, zimfile="book", **{**FAST, **settings})


both = pytest.mark.parametrize("kind", ["mw", "kiwix"])


@both
def test_a_page_has_title_summary_and_all_its_links(kind: str):
    with serving() as server:
        assert opened(kind, server).page("Apple") == {
            "title": "Apple",
            "summary": "Apple is a thing.",
            "links": ["Tree", "Old Name", "Nowhere"],
        }


@both
def test_redirects_are_followed_and_missing_or_ambiguous_pages_are_none(kind: str):
    with serving() as server:
        wiki = opened(kind, server)
        moved = wiki.page("Old Name")
        assert moved is not None and moved["title"] == "Stone"
        assert wiki.page("Nowhere") is None
        assert wiki.page("Mercury") is None


@both
def test_pages_are_fetched_once_unless_the_cache_is_off(kind: str):
    with serving() as server:
        wiki = opened(kind, server)
        wiki.page("Stone")
        wiki.page("Stone")
        assert len(server.requests) == 1
        wiki = opened(kind, server, query_use_cache=False)
        wiki.page("Stone")
        wiki.page("Stone")
        assert len(server.requests) == 3


@both
def test_faults_are_tried_again_and_then_reported(kind: str):
    with serving(faults=2) as server:
        assert opened(kind, server).page("Stone") is not None
        assert len(server.requests) == 3
    with serving(faults=3) as server, pytest.raises(WikiError, match="tried 3 times"):
        opened(kind, server).page("Stone")


@both
def test_a_server_that_cannot_be_reached_is_reported(kind: str):
    with serving() as server:
        wiki = opened(kind, server, max_query_attempts=1)
    with pytest.raises(WikiError, match="is the server running"):
        wiki.page("Stone")


@both
def test_a_whole_game_can_be_played_forked_and_started_again(kind: str):
    with serving() as server:
        address = f"{server.url}/w/api.php" if kind == "mw" else server.url
        book = {"zimfile": "book"} if kind == "kiwix" else {}
        env = WikiGame(backend=kind, trawler_kwargs={"url": address, **FAST, **book})
        assert env.blocking and env.forkable
        first = env.reset(seed=3)
        assert env.reset(seed=3) == first
        for seed in range(50):
            env.reset(seed=seed)
            if (env.current["title"], env.target["title"]) == ("Apple", "Stone"):
                break
        twin = env.fork()
        assert env.step("\\boxed{Nowhere}").observation.startswith("Turn 1: The page 'Nowhere'")
        assert env.step("\\boxed{Tree}").reward == -0.05
        assert twin.step("\\boxed{Old Name}").reward == 1.0  # the redirect leads to the target


def test_what_a_link_is_called():
    assert title_of("../Solar_System#Planets") == "Solar System"
    assert title_of("./Caf%C3%A9") == "Café"
    assert title_of("https://example.org/A") == title_of("#note") == title_of("geo:1,2") == ""


def test_settings_of_the_servers_are_checked():
    with pytest.raises(ValueError, match="max_query_attempts=0"):
        MediaWiki("http://localhost", max_query_attempts=0)
