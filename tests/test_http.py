"""The HTTP client, against servers on this machine that answer well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from graft.http import HttpClient, HttpFault, json_of, key_for, read_retry_after
from graft.trust import NotTrusted, Source, reading

Answer = Callable[[BaseHTTPRequestHandler], None]


def sending(code: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def nothing(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def silence(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(0.5)


def drip(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then: no single wait is long."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


@contextmanager
def serving(*answers: Answer) -> Iterator[tuple[str, list[BaseHTTPRequestHandler]]]:
    """The first answer to the first request and so on, the last one from then on; url, requests."""
    seen: list[BaseHTTPRequestHandler] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.append(self)
            answers[min(len(seen), len(answers)) - 1](self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(
            self, *_: object
        ) -> None: ...  # clients that hang up are part of the tests

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def in_thread(client: HttpClient, url: str, content: bytes | None = None) -> Any:
    return client.request(url, content, json_of)


def in_event_loop(client: HttpClient, url: str, content: bytes | None = None) -> Any:
    return asyncio.run(client.request_async(url, content, json_of))


@pytest.fixture(params=[in_thread, in_event_loop], ids=["threads", "asyncio"])
def request_with(request, monkeypatch) -> Callable[..., Any]:
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    return request.param


PASSING: dict[str, tuple[Answer, str]] = {
    "500": (sending(500, b"out of memory"), "answered 500: out of memory"),
    "429": (sending(429), "answered 429: Too Many Requests"),
    "408": (sending(408), "answered 408"),
    "half an error": (sending(500, b"it is", Content_Length="99"), "answered 500: it is"),
    "half an answer": (sending(200, b"{", Content_Length="99"), "closed the connection before"),
    "nothing": (nothing, "closed the connection before"),
    "silence": (silence, r"gave no answer in 0\.2 s"),
    "drips": (drip, r"gave no answer in 0\.2 s"),
    "no JSON": (sending(200, b"<html>"), "sent what is no JSON: '<html>'"),
    "too much": (sending(200, b" " * 101), "sent more than 100 bytes"),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_may_pass_is_repeated(fault, request_with):
    broken, text = PASSING[fault]
    timeout = 0.2 if fault in ("silence", "drips") else 5.0
    client = HttpClient(timeout=timeout, deadline=20.0, retries=1, max_bytes=100)
    patient = HttpClient(timeout=max(timeout, 0.4), deadline=20.0, retries=3, max_bytes=100)
    with serving(broken, sending(200, b'{"a": 1}')) as (url, seen):
        assert request_with(patient, url) == {"a": 1} and len(seen) >= 2
    with serving(broken) as (url, seen):
        with pytest.raises(HttpFault, match=text) as raised:
            request_with(client, url)
        assert len(seen) == raised.value.attempts == 2


@pytest.mark.parametrize("code", [400, 401, 404])
def test_a_refusal_is_not_repeated(code, request_with):
    with serving(sending(code, b"no")) as (url, seen):
        with pytest.raises(HttpFault, match=f"answered {code}: no") as raised:
            request_with(HttpClient(timeout=5.0, retries=5), url)
        assert len(seen) == 1 and raised.value.is_final and raised.value.code == code


def test_an_unreachable_server_is_named_with_the_systems_reason(request_with):
    with pytest.raises(HttpFault, match=r"cannot be reached: \[Errno \d+\] Connect"):
        request_with(HttpClient(timeout=5.0, retries=0), "http://127.0.0.1:9")


def test_content_is_posted_and_an_empty_answer_is_none(request_with):
    with serving(sending(200)) as (url, seen):
        client = HttpClient(timeout=5.0, retries=0, headers={"X-Key": "k"})
        assert request_with(client, url) is None and request_with(client, url, b"{}") is None
        assert [one.command for one in seen] == ["GET", "POST"]
        assert seen[0].headers["X-Key"] == "k"


def test_a_429_may_be_waited_out_and_retry_after_is_kept(request_with):
    busy = sending(429, Retry_After="0.1")
    with serving(busy, busy, busy, sending(200)) as (url, seen):
        start = time.monotonic()
        assert request_with(HttpClient(timeout=5.0, retries=0, waits_out_429=True), url) is None
        assert len(seen) == 4 and time.monotonic() - start >= 0.3
    with serving(sending(503, Retry_After="60")) as (url, seen):
        with pytest.raises(HttpFault, match="answered 503"):
            request_with(HttpClient(timeout=5.0, deadline=5.0, retries=9), url)
        assert len(seen) == 1  # the pause would end after the deadline


def test_a_direct_client_names_where_a_redirect_points(request_with):
    elsewhere = sending(302, Location="http://127.0.0.1:9/x")
    redirected = pytest.raises(
        HttpFault, match=r"answered 302 \(it points to http://127.0.0.1:9/x\)"
    )
    with serving(elsewhere) as (url, _), redirected:
        request_with(HttpClient(timeout=5.0, retries=0, is_direct=True), url)


def test_pauses_double_up_to_a_limit_and_differ(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    client = HttpClient(timeout=5.0, retries=7, first_pause=1.0)
    with pytest.raises(HttpFault):
        client.request("http://127.0.0.1:9", None, json_of)
    for pause, middle in zip(slept, (1, 2, 4, 8, 16, 30, 30), strict=True):
        assert 0.75 * middle <= pause <= 1.25 * middle
    assert len(set(slept)) == 7


def test_hooks_run_before_attempts_and_after_faults(monkeypatch):
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    events: list[Any] = []
    with serving(sending(500), sending(500)) as (url, _), pytest.raises(HttpFault):
        HttpClient(timeout=5.0, deadline=9.0, retries=1).request(
            url,
            None,
            json_of,
            before=lambda end: events.append(end > time.monotonic()),
            on_fault=lambda fault, pause: events.append((fault.code, pause is None)),
        )
    assert events == [True, (500, False), True, (500, True)]


def test_retry_after_may_be_a_date():
    soon = datetime.now(UTC) + timedelta(seconds=90)
    assert 85 < read_retry_after(format_datetime(soon)) <= 90
    assert 85 < read_retry_after(format_datetime(soon, usegmt=True)) <= 90
    assert read_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert [read_retry_after(text) for text in ("1.5", "-3", "nan", "inf", "", "x" * 9)] == [
        1.5, 0.0, 0.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip


def test_redirects_stay_on_their_server(request_with):
    """Neither headers nor a request reach another origin; the same one gets both."""
    client = HttpClient(timeout=5.0, retries=0, headers={"X-Key": "canary"})
    with serving(sending(200)) as (other, seen):
        for code in (301, 302, 303, 307, 308):
            with (
                serving(sending(code, Location=f"{other}/b")) as (url, _),
                pytest.raises(HttpFault, match="points to another server") as fault,
            ):
                request_with(client, url)
            assert fault.value.is_final
        assert seen == []
    with serving(sending(307, Location="/b"), sending(200)) as (url, seen):
        request_with(client, url)
        assert [request.headers["X-Key"] for request in seen] == ["canary", "canary"]


KEYS = [
    ("https://api.openai.com/v1", "", "openai"),
    ("http://api.openai.com/v1", "", ""),
    ("https://api.openai.com.evil.example/v1", "", ""),
    ("https://evil.example/api.openai.com", "", ""),
    ("https://api.openai.com@evil.example/v1", "", ""),
    ("http://127.0.0.1:8000/v1", "", ""),
    ("http://127.0.0.1:8000/v1", "MINE", "mine-key"),
    ("http://[::1]:8000/v1", "MINE", "mine-key"),
    ("https://host.example/v1", "MINE", "mine-key"),
]


@pytest.mark.parametrize(("url", "variable", "want"), KEYS)
def test_a_key_goes_to_the_server_it_was_named_for(monkeypatch, url, variable, want):
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    monkeypatch.setenv("MINE", "mine-key")
    assert key_for(url, variable) == want


@pytest.mark.parametrize("host", ["host.example", "10.0.0.1", "127.0.0.1.evil.example", "0.0.0.0"])
def test_a_named_key_does_not_travel_in_clear(monkeypatch, host):
    monkeypatch.setenv("MINE", "mine-key")
    with pytest.raises(ValueError, match="in clear"):
        key_for(f"http://{host}/v1", "MINE")


def test_a_strangers_settings_name_no_key_of_ours(monkeypatch):
    monkeypatch.setenv("MINE", "mine-key")
    with reading(Source("downloads/config.yaml", "it is a stranger's")):
        with pytest.raises(NotTrusted, match=r"the key of \$MINE, to be sent to host\.example"):
            key_for("https://host.example/v1", "MINE")
        assert key_for("https://host.example/v1") == ""
    with reading(Source("downloads/config.yaml", "it is a stranger's", typed=frozenset({"MINE"}))):
        assert key_for("https://host.example/v1", "MINE") == "mine-key"
