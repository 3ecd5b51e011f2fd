"""Who is answered, and who is not."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.viewer.conftest import COMMAND, viewing
from tests.viewer.folders import write_run


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = write_run(
        tmp_path_factory.mktemp("served") / "=made",
        metrics=[{"phase": "rl", "step": 1, "reward": 0.5, "step_time": 1.0}],
        bytes_tokenizer=False,
    )
    with viewing(folder) as url:
        yield url


def request(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict]:
    """One raw request: the path goes out as it stands."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return response.status, response.read().decode(), received
    finally:
        connection.close()


def token(url: str) -> str:
    return parse_qs(urlsplit(url).query)["token"][0]


def test_the_token_in_the_address_becomes_a_cookie_that_opens_the_rest(served):
    status, page, headers = request(served, f"/?token={token(served)}")
    assert status == 200 and "<title>graft view</title>" in page
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    status, text, _ = request(served, "/api/runs", cookie=cookie.partition(";")[0])
    assert status == 200 and json.loads(text)["runs"][0]["step"] == 1
    status, _, _ = request(served, "/api/runs", authorization=f"Bearer {token(served)}")
    assert status == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/pulse", "/static/app.js", "/nothing"])
def test_without_the_token_nothing_is_answered(served, path):
    for target, headers in [
        (path, {}),
        (f"{path}?token=", {}),
        (f"{path}?token=wrong", {}),
        (path, {"cookie": f"graft_view_{urlsplit(served).port}=wrong"}),
        (path, {"authorization": "Bearer wrong"}),
    ]:
        status, text, received = request(served, target, **headers)
        assert status == 401 and "graft view" in text and "set-cookie" not in received


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static/%252e%252e/server.py",
        "/static/..\\server.py",
        "/static//etc/passwd",
        "//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/style.css%00.js",
        "/etc/passwd",
        "/static/",
        "/static/server.py",
    ],
)
def test_paths_that_climb_are_refused(served, path):
    status, text, _ = request(served, path, authorization=f"Bearer {token(served)}")
    assert status == 404 and "root:" not in text and "import" not in text


@pytest.mark.parametrize(
    "query",
    ["run=../0&step=1", "run=0&step=../../etc/passwd", "run=0&step=failed-..", "run=-1&step=1"],
)
def test_names_that_climb_are_refused(served, query):
    authorization = f"Bearer {token(served)}"
    status, text, _ = request(served, f"/api/tasks?{query}", authorization=authorization)
    assert status == 400 and "must be" in text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://127.0.0.1:{port}"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"host": "evil.example:{port}"}, 403),
        ({"host": "127.0.0.1.evil.example:{port}"}, 403),
        ({"host": "127.0.0.1"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors"}, 403),
        ({"origin": "http://127.0.0.1:{port}"}, 200),
        ({"host": "localhost:{port}"}, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
    ],
)
def test_other_origins_and_names_are_refused_even_with_the_token(served, headers, status):
    port = str(urlsplit(served).port)
    sent = {name: value.replace("{port}", port) for name, value in headers.items()}
    got, _, _ = request(served, "/api/runs", authorization=f"Bearer {token(served)}", **sent)
    assert got == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_only_get_is_answered(served, method):
    status, _, _ = request(served, "/api/runs", method, authorization=f"Bearer {token(served)}")
    assert status == 405


def test_every_answer_forbids_foreign_scripts_and_frames(served):
    for path in ("/", "/api/runs", "/static/app.js", "/static/none"):
        for headers in ({"authorization": f"Bearer {token(served)}"}, {}):
            _, _, received = request(served, path, **headers)
            policy = received["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert received["x-content-type-options"] == "nosniff"
            assert received["x-frame-options"] == "DENY"
            assert "access-control-allow-origin" not in received


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/curves?run=7", 404),
        ("/api/tasks?run=0&step=99", 404),
        ("/api/episode?run=0&step=1&line=x", 400),
        ("/api/search?run=0&step=1&words=", 400),
        ("/api/tasks?run=0&step=1&sort=__class__", 404),
        ("/api/curves?run=99999999999999999999", 400),
    ],
)
def test_a_question_that_makes_no_sense_gets_a_sentence(served, path, status):
    got, text, _ = request(served, path, authorization=f"Bearer {token(served)}")
    assert got == status and 5 < len(text) < 300 and "Traceback" not in text


def test_the_table_is_csv_and_no_formula(served):
    path = "/api/csv?runs=0&phase=rl&metrics=reward"
    status, text, received = request(served, path, authorization=f"Bearer {token(served)}")
    assert status == 200 and received["content-type"].startswith("text/csv")
    assert text == "run,phase,step,seconds,reward\n'=made,rl,1,1.0,0.5\n"


def test_the_server_listens_on_the_loopback_alone(served):
    port = urlsplit(served).port
    outside = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port)}
    for address in outside - {"127.0.0.1", "::1", "127.0.1.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, port), timeout=2).close()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "whatever", "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "this machine only" in done.stderr
