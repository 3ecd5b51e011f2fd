"""The guard of everything that listens: who is answered, and that slow clients stall no one."""

from __future__ import annotations

import http.client
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from graft.serving import guard, listening
from graft.serving.guard import Guard, Rules, local_token, stored_token
from graft.serving.listening import most_connections, server_config
from graft_search import make_source
from graft_search.http import HttpSource
from graft_search.server import MAX_BODY, build_app

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

QUERY = json.dumps({"queries": ["Peru"], "topk": 1}).encode()


@contextmanager
def searching(host: str = "127.0.0.1") -> Iterator[int]:
    """The port of a search service over the small corpus; its token is "canary"."""
    listener = listening.listening(host, 0)
    rules = Rules("canary", listener.getsockname(), "ask", ("GET", "POST"))
    app = Guard(build_app(make_source("bm25", corpus="small"), wait=0.0), rules, MAX_BODY)
    server = uvicorn.Server(server_config(app))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with searching() as found:
        yield found


def ask(
    port: int, path: str = "/retrieve", body: bytes | None = QUERY, method: str = "", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method or ("POST" if body else "GET"), path, body, named)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


BEARER = {"Authorization": "Bearer canary"}


def test_a_token_opens_it_in_the_address_or_as_a_bearers(port: int):
    assert ask(port, "/retrieve?token=canary")[0] == ask(port, **BEARER)[0] == 200
    assert ask(port, "/health", None, **BEARER)[0] == 200


@pytest.mark.parametrize(
    ("status", "method", "headers"),
    [
        (401, "POST", {"Authorization": ""}),
        (401, "POST", {"Authorization": "Bearer wrong"}),
        (401, "POST", {"Authorization": "Basic canary"}),
        (403, "POST", {"Host": "evil.example"}),
        (403, "POST", {"Host": "127.0.0.1.evil.example:80"}),
        (403, "POST", {"Origin": "http://evil.example"}),
        (403, "POST", {"Origin": "null"}),
        (403, "POST", {"Sec_Fetch_Site": "cross-site"}),
        (405, "PUT", {}),
        (405, "OPTIONS", {}),
        (413, "POST", {"Content_Length": "99999999"}),
    ],
)
def test_other_requests_are_refused_before_they_are_read(
    port: int, status: int, method: str, headers: dict[str, str]
):
    assert ask(port, method=method, **{**BEARER, **headers})[0] == status


def test_a_body_beyond_the_limit_is_refused_without_a_length_too(port: int):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    pieces = iter([b" " * 2**20] * 9)
    with suppress(BrokenPipeError, ConnectionResetError):  # it stops reading
        connection.request("POST", "/retrieve", pieces, BEARER, encode_chunked=True)
        assert connection.getresponse().status == 413
    connection.close()
    assert ask(port, **BEARER)[0] == 200


def half_sent(port: int, count: int, text: bytes) -> list[socket.socket]:
    opened: list[socket.socket] = []
    for _ in range(count):
        one = socket.create_connection(("127.0.0.1", port), timeout=5)
        with suppress(OSError):  # closed already, for a newer one
            one.sendall(text)
        opened.append(one)
    return opened


@pytest.mark.parametrize(
    "text", [b"", b"POST /retrieve HTTP/1.1\r\nHost: x", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /"]
)
def test_many_half_sent_requests_stall_no_one(
    port: int, text: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 40)
    with searching() as port:
        opened = half_sent(port, 150, text)
        try:
            start, status = time.monotonic(), 0
            while status != 200 and time.monotonic() - start < 20.0:
                with suppress(ConnectionError):  # all 40 were being answered at that moment
                    status = ask(port, **BEARER)[0]
            assert status == 200
        finally:
            for one in opened:
                one.close()


def is_closed(connection: socket.socket, within: float) -> bool:
    connection.settimeout(within)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_head_a_body_and_a_second_request_have_to_arrive_in_time(monkeypatch):
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    head = b"POST /retrieve HTTP/1.1\r\nAuthorization: Bearer canary\r\nContent-Length: 9\r\n"
    with searching() as port:
        host = b"Host: 127.0.0.1:%d\r\n" % port
        whole = b"GET /health HTTP/1.1\r\nAuthorization: Bearer canary\r\n" + host + b"\r\n"
        for text in (b"", b"GET /", head + host + b"\r\n12", whole + b"GET /"):
            (one,) = half_sent(port, 1, text)
            with one:
                assert is_closed(one, 5.0), text


def test_an_open_address_is_answered_under_its_own_names():
    rules = Rules("t", ("0.0.0.0", 80), "ask")
    for host, to, status in [
        ("10.1.2.3:80", "10.1.2.3", None),
        (f"{socket.gethostname()}:80", "10.1.2.3", None),
        ("10.9.9.9:80", "10.1.2.3", 403),
        ("evil.example:80", "10.1.2.3", 403),
    ]:
        refused = rules.refusal("GET", "/", {"host": host}, ["t"], to)
        assert (refused and refused[0]) == status, host
    assert rules.refusal("GET", "/", {"host": "10.1.2.3:80"}, [], "10.1.2.3") is not None


def test_a_local_service_is_found_with_its_token(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    url = f"http://127.0.0.1:{port}"
    with stored_token("canary", port):
        (file,) = tmp_path.rglob("*.token")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert local_token(url) == "canary"
        assert HttpSource(url).retrieve(["Peru"], 1)[0]
        for other in (
            f"http://host.example:{port}",
            f"http://127.0.0.1:{port - 1}",
            "http://127.0.0.1",
        ):
            assert local_token(other) == ""
    assert local_token(url) == ""
    with pytest.raises(Exception, match="answered 401"):
        HttpSource(url).retrieve(["Peru"], 1)


def test_connections_leave_files_to_the_application():
    assert 8 <= most_connections() <= listening.MAX_CONNECTIONS
