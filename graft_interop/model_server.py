"""A chat-completions server whose answers the caller gives: for programs that call a model over HTTP.

    request = server.requests.get()     a client has sent POST .../chat/completions
    request.messages, request.tools     what it contains
    request.answer({"role": "assistant", "content": "42"})

It implements what OpenAI's clients need, streamed or not, on the loopback interface. Its address has a token
in its path, since a client's key may come from the environment: http://127.0.0.1:PORT/TOKEN/v1.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

from graft.serving.guard import Rules, new_token
from graft.serving.listening import HEAD_SECONDS
from graft.types import Message

MAX_CONNECTIONS = 64
MAX_BODY = 64 * 2**20

NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


class ModelRequest:
    """One request that waits for its answer."""

    def __init__(self, body: Mapping[str, Any], session: str = "") -> None:
        self.session = session
        """The client's session, from its X-Session-ID header; "" without one."""
        self.messages: list[Message] = list(body.get("messages") or ())
        self.tools: list[dict[str, Any]] = list(body.get("tools") or ())
        self._answered = threading.Event()
        self._message: Message | None = None

    def answer(self, message: Message) -> None:
        self._message = message
        self._answered.set()

    def refuse(self) -> None:
        """End the wait without an answer."""
        self._answered.set()

    def wait(self, seconds: float) -> Message | None:
        self._answered.wait(seconds)
        return self._message


class ModelServer:
    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds a request may wait for its answer."""
        self.requests: SimpleQueue[ModelRequest] = SimpleQueue()
        self._http = LimitedServer(("127.0.0.1", 0), ModelRequestHandler)
        token = new_token()
        rules = Rules(
            token, self._http.server_address, "it is in the server's url", ("GET", "POST")
        )
        vars(self._http).update(requests=self.requests, answer_timeout=timeout, rules=rules)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/{token}/v1"
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="graft-model", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class LimitedServer(ThreadingHTTPServer):
    """A thread per connection, of at most MAX_CONNECTIONS; others are closed."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            return self.shutdown_request(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()


class ModelRequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = HEAD_SECONDS
    """Seconds for one piece of a request."""

    def is_refused(self) -> bool:
        server: Any = self.server
        headers = {name.lower(): value for name, value in self.headers.items()}
        token, _, path = self.path.lstrip("/").partition("/")
        refused = server.rules.refusal(self.command, f"/{path}", headers, [token])
        length = self.headers.get("Content-Length") or "0"
        if refused is None and not (length.isdecimal() and int(length) <= MAX_BODY):
            refused = 413, f"the body needs a length of at most {MAX_BODY} bytes"
        if refused is not None:
            self.close_connection = True  # its body is not read
            self.reply(refused[0], {"error": {"message": refused[1]}})
        return refused is not None

    def do_GET(self) -> None:
        if self.is_refused():
            return
        self.reply(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})

    def do_POST(self) -> None:
        if self.is_refused():
            return None
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw)
        except ValueError:
            return self.reply(400, {"error": {"message": "the body is not JSON"}})
        if not self.path.endswith("/chat/completions"):
            return self.reply(404, {"error": {"message": f"no such path: {self.path}"}})
        server: Any = self.server
        request = ModelRequest(body, self.headers.get("X-Session-ID", ""))
        server.requests.put(request)
        message = request.wait(server.answer_timeout)
        if message is None:
            return self.reply(503, {"error": {"message": "the policy does not answer"}})
        if body.get("stream"):
            return self.reply_in_events(message)
        choice = {"index": 0, "message": message, "finish_reason": finish(message)}
        self.reply(200, {**self.head("chat.completion"), "choices": [choice], "usage": NO_USAGE})

    def reply(self, status: int, body: Mapping[str, Any]) -> None:
        self.send(status, "application/json", json.dumps(body).encode())

    def reply_in_events(self, message: Message) -> None:
        """The same answer as a stream: one event with all of it, one that ends it."""
        delta = dict(message)
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        head = self.head("chat.completion.chunk")
        pieces: list[dict[str, Any]] = [
            {"index": 0, "delta": delta, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": finish(message)},
        ]
        events = [{**head, "choices": [piece]} for piece in pieces]
        lines = [*(json.dumps(event) for event in events), "[DONE]"]
        text = "".join(f"data: {line}\n\n" for line in lines)
        self.send(200, "text/event-stream", text.encode())

    def head(self, kind: str) -> dict[str, Any]:
        now = time.time()
        return {"id": f"graft-{now}", "object": kind, "created": int(now), "model": "policy"}

    def send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client has disconnected
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a log line per request would be noise."""


def finish(message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"
