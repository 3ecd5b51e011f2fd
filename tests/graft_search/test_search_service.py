"""Client and server over a real port, in both forms; what is malformed is refused with a text."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_helpers import Echo, serving

from graft.data.errors import DataError
from graft.serving.listening import listening
from graft.tools.errors import ToolError
from graft_search import Hit, make_source
from graft_search.bm25 import Bm25Source
from graft_search.http import HttpSource
from graft_search.server import build_app, serve
from graft_search.wire import (
    MAX_QUERIES,
    BadMessage,
    RetrievalRequest,
    pack,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from tests.web_server import Reply, Seen
from tests.web_server import answering as answering_with

pytest.importorskip("starlette")
msgpack = pytest.importorskip("msgpack")


@pytest.fixture(scope="module")
def echo():
    return Echo()


@pytest.fixture(scope="module")
def url(echo):
    with serving(build_app(echo, topk=2)) as address:
        yield address


def post(url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url + "/retrieve", body, headers or {}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("wire", ["json", "msgpack"])
def test_a_client_gets_what_the_source_behind_the_server_finds(url, wire):
    client = HttpSource(url, wire=wire, timeout=60)  # a busy machine answers late
    assert client.retrieve(["naïve 東京", "b\nc"], 2) == [
        [Hit("0", "T0", "naïve 東京", 9.0), Hit("1", "T1", "naïve 東京", 8.0)],
        [Hit("0", "T0", "b\nc", 9.0), Hit("1", "T1", "b\nc", 8.0)],
    ]
    assert client.retrieve([], 2) == []


def test_the_wire_of_a_service_is_found_by_the_first_request():
    """GEM's service answers 400 or 422 to JSON."""

    def gems(seen: Seen) -> Reply:
        try:
            request = msgpack.unpackb(seen.body)
            hit = {"document": {"contents": f"T\n{request['query']}"}, "score": None}
        except (ValueError, TypeError, KeyError):
            return Reply(422, b"Input data failed validation")
        return Reply(200, msgpack.packb({"result": [hit]}))

    with answering_with(gems) as (url, requests):
        source = HttpSource(url)
        assert source.retrieve(["q", "r"], 1) == [[Hit("0", "T", "q")], [Hit("0", "T", "r")]]
        assert source.retrieve(["s"], 1) == [[Hit("0", "T", "s")]]
        assert len(requests) == 4 and source.wire == "msgpack"
        with pytest.raises(ToolError, match="answered 422: Input data failed"):
            HttpSource(url, wire="json").retrieve(["q"], 1)
    with answering_with(lambda _: Reply(400, b"no")) as (url, requests):
        with pytest.raises(ToolError, match="answered 400: no"):
            HttpSource(url).retrieve(["q"], 1)
        assert [seen.body[:1] for seen in requests] == [b"{", b"\x83"]


@pytest.mark.parametrize("wire", ["json", "msgpack"])
def test_the_small_corpus_is_the_same_near_and_far(wire):
    near = make_source("bm25", corpus="small")
    with serving(build_app(near)) as url:
        assert HttpSource(url, wire=wire).retrieve(["capital of Peru"], 3) == near.retrieve(
            ["capital of Peru"], 3
        )


def test_search_r1_sends_lists_of_lists_and_bare_documents_without_scores(url):
    body = {"queries": ["q"], "topk": 1, "return_scores": True}
    status, reply = post(url, json.dumps(body).encode())
    document = {"id": "0", "contents": "T0\nq"}
    assert (status, json.loads(reply)) == (
        200,
        {"result": [[{"document": document, "score": 9.0}]]},
    )
    status, reply = post(url, json.dumps({"queries": ["q"], "topk": 1}).encode())
    assert (status, json.loads(reply)) == (200, {"result": [[document]]})


def test_gem_sends_one_query_in_msgpack_without_a_content_type(url):
    body = msgpack.packb({"query": "q", "topk": None, "return_scores": False})
    status, reply = post(url, body, {"Content-Type": "application/octet-stream"})
    documents = [{"id": f"{n}", "contents": f"T{n}\nq"} for n in range(2)]  # topk: the server's
    want = {"result": [{"document": document, "score": None} for document in documents]}
    assert (status, msgpack.unpackb(reply)) == (200, want)


def test_requests_that_meet_in_a_batch_keep_their_own_topk_and_scores():
    echo = Echo()
    with serving(build_app(echo, wait=0.3)) as url, ThreadPoolExecutor(6) as threads:
        bodies = [
            {"queries": [f"q{n}"], "topk": 1 + n % 2, "return_scores": n < 3} for n in range(6)
        ]
        replies = list(threads.map(lambda body: post(url, json.dumps(body).encode()), bodies))
    for n, (status, reply) in enumerate(replies):
        (hits,) = json.loads(reply)["result"]
        assert status == 200 and len(hits) == 1 + n % 2
        assert all(("score" in hit) == (n < 3) for hit in hits)
    assert sorted(query for queries, _ in echo.calls for query in queries) == [
        f"q{n}" for n in range(6)
    ]
    assert len(echo.calls) < 6  # some met


def test_health_names_the_source(url):
    with urllib.request.urlopen(url + "/health", timeout=20) as reply:
        assert json.load(reply) == {"status": "ok", "source": "echo", "topk": 2}


def test_empty_queries_find_nothing_and_endless_ones_are_cut(url, echo):
    echo.calls.clear()
    status, reply = post(url, json.dumps({"queries": ["", " ", "x" * 1_000_000]}).encode())
    assert status == 200
    assert [len(hits) for hits in json.loads(reply)["result"]] == [0, 0, 2]
    assert [len(query) for queries, _ in echo.calls for query in queries] == [4000]


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"", "not json"),
        (b"{", "not json"),
        (b"\x00\xff", "not json"),
        (b"[" * 100_000, "not json"),
        (b"\x91" * 100_000, "not msgpack"),
        (b"\xc1", "not msgpack"),
        (msgpack.packb({"query": "q"}) + b"\x00", "not msgpack"),
        (b"[]", "expected an object"),
        (b"{}", "must be a list of texts"),
        (b'{"queries": "q"}', "must be a list of texts"),
        (b'{"queries": [1]}', "must be a list of texts"),
        (msgpack.packb({"query": 1}), "must be a list of texts"),
        (json.dumps({"queries": ["q"] * (MAX_QUERIES + 1)}).encode(), "1025 queries"),
        (b'{"query": "q", "topk": -1}', "`topk` must be"),
        (b'{"query": "q", "topk": true}', "`topk` must be"),
        (b'{"query": "q", "topk": 1e999}', "`topk` must be"),
        (b'{"query": "q", "topk": 100000}', "`topk` must be"),
        (b'{"query": "q", "return_scores": "yes"}', "`return_scores` must be"),
    ],
)
def test_bad_requests_are_answered_with_400_and_a_text(url, body, match):
    status, reply = post(url, body)
    assert status == 400
    assert match in reply.decode()


def test_a_failing_source_costs_only_the_requests_that_met_it():
    class Moody(Echo):
        def retrieve(self, queries, topk):
            if "bad" in queries:
                raise ToolError("upstream is down")
            if "few" in queries:
                return []
            return super().retrieve(queries, topk)

    with serving(build_app(Moody())) as url:
        status, reply = post(url, b'{"queries": ["bad"]}')
        assert (status, reply) == (502, b"the source failed: upstream is down")
        assert post(url, b'{"queries": ["few"]}')[0] == 500
        assert post(url, b'{"queries": ["good"]}')[0] == 200


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(data):
    for read in (read_request, lambda d: read_reply(d, 1, is_single=False)):
        with suppress(ValueError):
            read(data)


text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)


@given(
    st.lists(text, min_size=1, max_size=3),
    st.integers(1, 9),
    text.filter(lambda title: "\n" not in title),
    text,
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["json", "msgpack"]),
)
def test_what_is_written_is_read_again(queries, topk, title, body, score, wire):
    queries = queries if wire == "json" else queries[:1]
    request = read_request(write_request(queries, topk, wire))
    assert request == RetrievalRequest(queries, topk, True, wire == "msgpack", wire)
    answers = [[Hit("i", title, body, score)] for _ in queries]
    reply = write_reply(request, answers)
    assert read_reply(reply, len(queries), is_single=request.is_single) == answers


def test_a_score_that_is_no_number_is_none():
    document = {"contents": "t\nx"}
    items = [{"document": document, "score": bad} for bad in (None, "high", float("nan"))]
    (hits,) = read_reply(pack({"result": [items]}, "json"), 1, is_single=False)
    assert hits == [Hit(str(n), "t", "x", None) for n in range(3)]


@pytest.mark.parametrize(
    "reply", [{}, {"result": None}, {"result": [1]}, {"result": [[], []]}, {"result": [[{"x": 1}]]}]
)
def test_a_reply_of_another_shape_is_refused(reply):
    with pytest.raises(ValueError):
        read_reply(json.dumps(reply).encode(), 1, is_single=False)


# services that misbehave


def answering(*answers: tuple[int, bytes]):
    """A service that gives these answers in turn, the last one for ever; and the list of requests."""
    left = [Reply(*answer) for answer in answers]
    return answering_with(lambda _: left.pop(0) if len(left) > 1 else left[0])


GOOD = json.dumps({"result": [[{"document": {"contents": "t\nx"}, "score": 1}]]}).encode()


def test_a_request_to_a_busy_service_is_repeated():
    with answering((503, b"busy"), (429, b""), (200, GOOD)) as (url, seen):
        assert HttpSource(url).retrieve(["q"], 3) == [[Hit("0", "t", "x", 1)]]
        assert len(seen) == 3


def test_retries_end():
    with answering((500, b"broken")) as (url, seen):
        with pytest.raises(ToolError, match="answered 500: broken"):
            HttpSource(url, retries=1).retrieve(["q"], 3)
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ((400, b"no such field"), "answered 400: no such field"),
        ((200, b"<html>"), "sent no usable reply: not json"),
        ((200, b'{"result": []}'), "sent no usable reply: expected 1 lists"),
        ((200, b'{"result": [[{"document": {}}]]}'), "sent no usable reply: document 1"),
    ],
)
def test_a_final_error_is_not_retried(answer, match):
    with answering(answer) as (url, seen):
        with pytest.raises(ToolError, match=match):
            HttpSource(url, wire="json").retrieve(["q"], 3)
        assert len(seen) == 1


def test_documents_beyond_topk_are_dropped():
    many = json.dumps({"result": [[{"document": {"contents": "t\nx"}}] * 9]}).encode()
    with answering((200, many)) as (url, _):
        assert len(HttpSource(url).retrieve(["q"], 3)[0]) == 3


def test_a_service_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ToolError, match=rf"{url}/retrieve cannot be reached: .*refused"):
            HttpSource(url, retries=1).retrieve(["q"], 3)


def test_a_service_that_hangs_or_dribbles_runs_into_the_timeout():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ToolError, match=r"gave no answer in 0.1 s"):
            HttpSource(url, timeout=0.1).retrieve(["q"], 3)

        def dribble():
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
                    try:
                        connection.sendall(head)
                        for _ in range(1000):
                            connection.sendall(b"x")
                            time.sleep(0.02)
                    except OSError:
                        return

        threading.Thread(target=dribble, daemon=True).start()
        with pytest.raises(ToolError, match=r"gave no answer in 0.3 s"):
            HttpSource(url, timeout=0.3).retrieve(["q"], 3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"url": "localhost:8000"}, "not of the form"),
        ({"url": "ftp://x/"}, "not of the form"),
        ({"url": "http://x", "wire": "xml"}, "known: auto, json, msgpack"),
        ({"url": "http://x", "timeout": 0}, "timeout=0"),
    ],
)
def test_a_client_that_cannot_work_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        HttpSource(**arguments)


def test_messages_name_what_is_wrong():
    with pytest.raises(BadMessage, match="got list"):
        read_request(b"[]")


def test_a_missing_package_for_a_wire_is_an_error_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match=r"graft-rl\[search\]"):
        HttpSource("http://localhost:1", wire="msgpack")


def test_a_port_that_is_taken_and_a_host_that_is_not_are_named(echo):
    with listening("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1, port {port}: Address already in use"):
            serve(echo, port=port)
    with pytest.raises(ValueError, match=r"cannot listen on no-such-host\.invalid, port 0"):
        serve(echo, host="no-such-host.invalid", port=0)


def test_a_corpus_that_cannot_be_read_is_an_error_before_the_service_starts(tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"contents": 3}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl, row 1: no text"):
        serve(Bm25Source(str(bad)), port=0)
    assert capsys.readouterr().out == ""


SERVE = """
from graft_search import make_source
from graft_search.server import serve
serve(make_source("bm25", corpus="small"), port=0)
"""


@pytest.mark.slow
def test_the_address_is_printed_and_an_interrupt_ends_the_service():
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=-1, stderr=-1, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        address = line.removeprefix("answering ").partition(",")[0]
        url, _, token = address.partition("/retrieve?token=")
        assert len(token) > 20 and post(url, b"{}")[0] == 401
        assert HttpSource(url).retrieve(["Warsaw"], 1)[0][0].id == "small-02"  # finds the token
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr and child.returncode in (1, 130, -signal.SIGINT)


@pytest.mark.peer
def test_gems_own_client_is_served(url):
    gem = pytest.importorskip("gem.tools.search_tool")
    tool = gem.SearchTool(search_url=url + "/retrieve", topk=2)
    is_valid, has_error, observation, _ = tool.execute_action("I look. <search>q</search>")
    assert is_valid and not has_error
    assert observation.strip() == (
        "<information>Doc 1(Title: T0) q\nDoc 2(Title: T1) q\n</information>"
    )
