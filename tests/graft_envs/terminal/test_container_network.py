"""A port of this computer inside another network, and nothing else of it."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from graft_envs.terminal.container_network import UnreachableNetwork, listen_inside, relaying

INSIDE = """
import fcntl, socket, struct, sys, urllib.request
with socket.socket() as control:  # the loopback device is down in a new network
    fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 1 | 64))
print("ready", flush=True)
for url in sys.stdin:
    try:
        print(urllib.request.urlopen(url.strip(), timeout=20).status, flush=True)
    except OSError as error:
        print("no", flush=True)
"""


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def inside() -> Iterator[subprocess.Popen[str]]:
    """A program in a network of its own, which fetches the addresses that it reads."""
    words = [shutil.which("unshare") or "", "--user", "--map-root-user", "--net", sys.executable]
    if not words[0]:
        pytest.skip("unshare is not installed")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*words, "-c", INSIDE], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None and process.stdin is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip("no network namespaces here")
        yield process
        process.stdin.close()


def fetched(inside: subprocess.Popen[str], port: int) -> str:
    assert inside.stdout is not None and inside.stdin is not None
    inside.stdin.write(f"http://127.0.0.1:{port}/\n")
    inside.stdin.flush()
    return inside.stdout.readline().strip()


def test_one_port_is_reached_from_another_network_while_the_block_lasts(inside, port):
    assert fetched(inside, port) == "no"
    with relaying(listen_inside(inside.pid, port), port):
        assert [fetched(inside, port) for _ in range(3)] == ["200", "200", "200"]
        assert fetched(inside, port + 1 if port < 65535 else port - 1) == "no"
    assert fetched(inside, port) == "no"


def test_a_network_that_cannot_be_entered_is_an_error():
    with pytest.raises(UnreachableNetwork, match=r"FileNotFoundError|PermissionError"):
        listen_inside(os.getpid() + 4_194_304, 1)
