"""Pages as text: HTML, limits, private addresses, recording, a summariser behind an endpoint."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import socket
import time
from collections.abc import Iterator

import pytest

from graft.tools import make_tool
from graft.tools.calling import call_tool
from graft_search import SearchTool
from graft_search.pages import FetchTool
from graft_search.pages.download import is_public
from graft_search.pages.html_text import decoded, html_text
from tests.web_server import Reply, Seen, answering

HTML = {"Content-Type": "text/html; charset=utf-8"}
LIMA = b"<title>Lima </title><body><h1>Lima</h1><p>Capital of <b>Peru</b>.</p></body>"
BIG = b"<p>" + b"word " * 2000

PAGES = {
    "/lima": Reply(200, LIMA, HTML),
    "/big": Reply(200, BIG, HTML),
    "/plain": Reply(
        200, "naïve\n".encode("latin-1"), {"Content-Type": "text/plain; charset=latin-1"}
    ),
    "/json": Reply(200, b'{"a": 1}', {"Content-Type": "application/json"}),
    "/zip": Reply(200, gzip.compress(LIMA), {**HTML, "Content-Encoding": "gzip"}),
    "/odd": Reply(200, LIMA, {**HTML, "Content-Encoding": "br"}),
    "/pdf": Reply(200, b"%PDF", {"Content-Type": "application/pdf"}),
    "/empty": Reply(200, b"<script>render()</script>", HTML),
    "/moved": Reply(302, b"", {"Location": "/lima"}),
    "/loop": Reply(302, b"", {"Location": "/loop"}),
    "/gone": Reply(404, b"not here"),
    "/q?a=b%20c&d=%C3%A9": Reply(200, b"query", {"Content-Type": "text/plain"}),
}


def pages(seen: Seen) -> Reply:
    return PAGES.get(seen.path, Reply(500))


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with answering(pages) as (url, _):
        yield url


def fetch(**options) -> FetchTool:
    return FetchTool(allow_private=True, tag="", **options)


TEXTS = [
    (
        "<title>A &amp; B</title><style>p{}</style><p>one\n two<br>three<p>four",
        "A & B\n\none two\nthree\nfour",
    ),
    ("<ul><li>a<li>b<ul><li>c</ul></ul>", "- a\n- b\n- c"),
    ("<table><tr><th>x<th>y</tr><tr><td>1</td><td>2</td></tr></table>", "x | y\n1 | 2"),
    ("<head><meta><script>if (a<b) {}</script></head><body>text</body>", "text"),
    ("<svg><title>icon</title></svg>shown", "shown"),
    ("<head><title>T</title><body>unclosed head", "T\n\nunclosed head"),
    ("plain &lt;b&gt;", "plain <b>"),
    ("", ""),
]


@pytest.mark.parametrize(("markup", "text"), TEXTS)
def test_html_to_text(markup: str, text: str):
    assert html_text(markup) == text


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("é".encode(), None, "é"),
        ("é".encode("latin-1"), "latin-1", "é"),
        (b"<meta charset='cp1251'>\xcf", None, "<meta charset='cp1251'>П"),
        (b"\xff", "no-such-charset", "\ufffd"),
        (b"\xff", None, "\ufffd"),
    ],
)
def test_a_charset_is_the_answers_the_pages_or_utf8(body: bytes, charset: str | None, text: str):
    assert decoded(body, charset) == text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/lima", "Lima\n\nLima\nCapital of Peru."),
        ("/moved", "Lima\n\nLima\nCapital of Peru."),
        ("/zip", "Lima\n\nLima\nCapital of Peru."),
        ("/plain", "naïve"),
        ("/json", '{"a": 1}'),
        ("/q?a=b%20c&d=é", "query"),
    ],
)
def test_a_page_is_its_text(site: str, path: str, text: str):
    assert fetch()(site + path) == text


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/gone", "the server answered 404"),
        ("/pdf", "it is application/pdf, not text"),
        ("/empty", "no text"),
        ("/loop", "more than 5 redirects"),
        ("/odd", "encoding 'br' is not supported"),
    ],
)
def test_what_cannot_be_read_is_an_error_text(site: str, path: str, why: str):
    tool = fetch()
    answer = tool(site + path)
    assert answer.startswith(f"Error: cannot read {site}{path}: ") and why in answer
    assert tool.counts == {"calls": 1, "cached": 0, "failures": 1}


@pytest.mark.parametrize(
    "content", ["", "  ", "lima", "file:///etc/passwd", "https://", "http://a:x/"]
)
def test_what_is_no_address_is_an_error_text(content: str):
    assert FetchTool()(content).startswith("Error: ")


def test_size_limits(site: str):
    assert fetch(max_chars=9)(f"{site}/big") == "word word [...]"
    assert len(fetch(max_bytes=103)(f"{site}/big")) == 99  # 3 bytes of <p>, 20 words, a blank less
    assert FetchTool(allow_private=True)(f"{site}/json") == '<information>{"a": 1}</information>'


def test_a_server_that_sends_too_slowly_costs_the_timeout_only():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        answer = fetch(timeout=0.3)(f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert "no complete answer in time" in answer
        assert time.monotonic() - start < 5


PRIVATE = [
    *(
        "127.0.0.1",
        "127.9.9.9",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "0.0.0.0",
    ),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1"),
    *("::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "ff02::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_this_machine_and_its_network_are_private(address: str):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111"])
def test_addresses_of_the_internet_are_public(address: str):
    assert is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1"])
def test_a_private_host_is_refused_in_every_spelling(host: str):
    answer = FetchTool()(f"http://{host}/")
    assert answer.startswith("Error: ")
    assert "of this machine or its network" in answer or "no host" in answer


def test_a_private_host_behind_a_name_or_a_redirect_is_refused(
    site: str, monkeypatch: pytest.MonkeyPatch
):
    port = int(site.rpartition(":")[2])
    real = socket.getaddrinfo

    def resolve(host, *args, **kwargs):
        if host == "inside.example":
            return real("127.0.0.1", *args, **kwargs)
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    answer = FetchTool()("http://inside.example/")
    assert "inside.example, 127.0.0.1, is an address of this machine" in answer
    assert f"port {port} is not one of a public page" in FetchTool()(f"{site}/lima")
    # a public page may point inside: the check is made again for the address that it names
    monkeypatch.setattr("graft_search.pages.download.is_public", lambda one: one != "127.0.0.2")
    monkeypatch.setattr("graft_search.pages.download.PORTS", (port,))
    PAGES["/inside"] = Reply(302, b"", {"Location": f"http://127.0.0.2:{port}/lima"})
    assert "127.0.0.2 is an address of this machine" in FetchTool()(f"{site}/inside")
    assert "Capital of Peru" in FetchTool()(f"{site}/moved")


def test_a_recorded_page_is_read_without_a_network(tmp_path):
    cache = str(tmp_path / "run.db")
    with answering(pages) as (url, requests):
        tool = fetch(cache=cache)
        first = tool(f"{url}/lima")
        assert tool(f"{url}/lima") == first and len(requests) == 1
        assert tool(f"{url}/gone").startswith("Error: ")
        assert tool.counts == {"calls": 3, "cached": 1, "failures": 1}
        tool.close()
    again = FetchTool(cache=cache, cache_mode="replay", tag="")
    assert again(f"{url}/lima") == first
    assert "it is not recorded in run.db" in again(f"{url}/gone")
    again.close()


def test_pages_and_searches_share_a_cache_file(tmp_path, site: str, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "graft-cache"))
    cache = str(tmp_path / "run.db")
    pages_tool, search = fetch(cache=cache), SearchTool(corpus="small", topk=1, cache=cache)
    pages_tool(f"{site}/lima")
    found = search("capital of Poland")
    replayed = SearchTool(topk=1, cache=cache, cache_mode="replay")
    assert replayed("capital of Poland") == found
    assert replayed.cache is not None
    assert [query for query, _ in replayed.cache.answers()] == ["capital of Poland"]
    for tool in (pages_tool, search, replayed):
        tool.close()


def test_a_summariser_reads_the_page_for_the_goal(tmp_path, site: str, monkeypatch):
    monkeypatch.setenv("READER_KEY", "k1")
    reply = {"choices": [{"message": {"content": " Lima. "}}]}
    cache = str(tmp_path / "run.db")
    with answering(lambda _: Reply(200, json.dumps(reply).encode())) as (url, requests):
        reader = {"url": f"{url}/v1", "model": "m", "key": "READER_KEY", "max_chars": 20}
        tool = fetch(cache=cache, summariser=reader)
        assert tool(f"{site}/lima Which capital?") == "Lima."
        assert tool(f"{site}/lima Which capital?") == "Lima." and len(requests) == 1
        assert tool.call({"url": f"{site}/lima"}) == "Lima."
        tool.close()
    seen = requests[0]
    assert seen.path == "/v1/chat/completions" and seen.headers["authorization"] == "Bearer k1"
    body = json.loads(seen.body)
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 512, 0.0)
    (message,) = body["messages"]
    assert message["content"].endswith("Goal: Which capital?\n\nPage:\nLima\n\nLima\nCapital o")
    assert "Goal: a summary of the page" in json.loads(requests[1].body)["messages"][0]["content"]
    again = fetch(cache=cache, cache_mode="replay", summariser=reader)
    assert again(f"{site}/lima Which capital?") == "Lima."
    again.close()


def test_a_summariser_that_fails_is_an_error_text(site: str):
    with answering(lambda _: Reply(200, b'{"choices": []}')) as (url, _):
        tool = fetch(summariser={"url": url, "model": "m", "retries": 0})
        assert "sent no choices[0].message.content: " in tool(f"{site}/lima goal")


def test_options_are_checked_at_the_start(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for options, why in [
        ({"max_chars": 0}, "max_chars=0; must be above 0"),
        ({"cache_mode": "replay"}, "needs cache="),
        ({"summariser": {"model": "m"}}, "needs url="),
        ({"summariser": {"url": "http://h/v1", "modle": "m"}}, "did you mean 'model'"),
        ({"summariser": {"url": "h:1", "model": "m"}}, "not of the form"),
        ({"summariser": {"url": "http://h", "model": "m", "key": "NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
        ({"max_char": 1}, "did you mean 'max_chars'"),
    ]:
        with pytest.raises(ValueError, match=why):
            make_tool("fetch", **options)


def test_it_is_a_tool_by_name_for_texts_and_json_calls(site: str):
    tool = make_tool("fetch", allow_private=True, tag="")
    assert call_tool(tool, f"{site}/json") == call_tool(tool, {"url": f"{site}/json"}) == '{"a": 1}'
    assert call_tool(tool, {"link": "x"}).startswith("Error: ")
    assert copy.deepcopy(tool) is tool
    assert pickle.loads(pickle.dumps(tool))(f"{site}/json") == '{"a": 1}'
