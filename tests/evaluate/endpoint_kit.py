"""A small server with OpenAI's API that fails in the way a test sets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = int | str
"""A status such as 429, or: garbage, half, nothing (hangs up), silence (sends nothing for 2 s), shape."""


class Served:
    """The requests that the server received, and what goes wrong next."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Fault] = []
        """Used up one by one, before it answers properly."""
        self.always: Fault | Callable[[dict[str, Any]], Fault | None] | None = None
        self.reply: Callable[[dict[str, Any]], str] = lambda content: "5"
        self.finish = "stop"
        self.owner = "someone"
        self.models: list[str] | None = ["tiny"]
        self.delay = 0.0
        self.retry_after = ""
        self.error_text = "not now"
        self.at_a_time = self.most_at_a_time = 0


@contextmanager
def serving() -> Iterator[Served]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if served.models is None:
                return self._send(404, b"{}")
            listed = [{"id": name, "owned_by": served.owner} for name in served.models]
            return self._send(200, json.dumps({"data": listed}).encode())

        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                served.requests.append({"path": self.path, **content})
                served.headers.append(dict(self.headers))
                fault = served.faults.pop(0) if served.faults else served.always
                fault = fault(content) if callable(fault) else fault
                served.at_a_time += 1
                served.most_at_a_time = max(served.most_at_a_time, served.at_a_time)
            try:
                time.sleep(served.delay)
                self._answer(content, fault)
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with lock:
                    served.at_a_time -= 1

        def _answer(self, content: dict[str, Any], fault: Fault | None) -> None:
            text = served.reply(content)
            is_chat = self.path.endswith("/chat/completions")
            message = (
                {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            )
            choice = {**message, "finish_reason": served.finish}
            body = json.dumps(
                {"choices": [choice], "usage": {"completion_tokens": 3}, "padding": "." * 200}
            ).encode()
            if isinstance(fault, int):
                self._send(fault, served.error_text.encode())
            elif fault == "garbage":
                self._send(200, b"<html>busy</html>")
            elif fault == "shape":
                self._send(200, b'{"choices": []}')
            elif fault == "half":
                self._send(200, body[:100], len(body))
            elif fault == "nothing":
                self.close_connection = True
            elif fault == "silence":
                time.sleep(60.0)
                self.close_connection = True
            else:
                self._send(200, body)

        def _send(self, code: int, body: bytes, length: int | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            if code == 429 and served.retry_after:
                self.send_header("Retry-After", served.retry_after)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Served(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
