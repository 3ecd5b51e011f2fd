"""What lies between a client and the gateway: everything is recorded, and some answers are lost."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

CALLS = ("/chat/completions", "/responses", "/messages")


@dataclass
class Exchange:
    """A call of the model and what came back."""

    path: str
    body: dict[str, Any]
    status: int = 0
    answer: bytes = b""
    is_lost: bool = False

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and not self.is_lost


@dataclass
class SessionWire:
    """Of one session. `lost`: numbers of calls whose answers are replaced by a 502; `before(number)` runs
    before each call."""

    lost: Sequence[int] = ()
    before: Callable[[int], None] = lambda number: None
    exchanges: list[Exchange] = field(default_factory=list)


class Wire:
    """An ASGI application around the gateway's."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._sessions: defaultdict[str, SessionWire] = defaultdict(SessionWire)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    def of(self, session: str) -> SessionWire:
        return self._sessions[session]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if not path.endswith(CALLS):
            return await self.app(scope, receive, send)
        wire = self.of(path.split("/")[2])  # /s/SESSION/v1/...
        number = len(wire.exchanges)
        exchange = Exchange(path, {}, is_lost=number in wire.lost)
        wire.exchanges.append(exchange)
        wire.before(number)

        async def recorded_receive() -> Any:
            message = await receive()
            if message.get("body"):
                exchange.body = json.loads(message["body"])
            return message

        async def recorded_send(message: Any) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.answer += message.get("body", b"")
            if not exchange.is_lost:
                await send(message)

        await self.app(scope, recorded_receive, recorded_send)
        if exchange.is_lost:
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})


def branches(exchanges: Sequence[Exchange]) -> int:
    """The number of branches of verifiers' message graph over the answered calls."""
    from verifiers.v1.dialects.anthropic import AnthropicDialect
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.dialects.responses import ResponsesDialect
    from verifiers.v1.graph import leaves, prepare_turn
    from verifiers.v1.trace import Trace

    trace = Trace.model_construct(nodes=[], mm_token_type_id_map={})
    kinds = dict(zip(CALLS, (ChatDialect, ResponsesDialect, AnthropicDialect), strict=True))
    for one in exchanges:
        if not one.is_answered:
            continue
        dialect = next(kind for end, kind in kinds.items() if one.path.endswith(end))()
        request = dialect.parse_request(one.body)
        if one.body.get("stream"):
            parser = dialect.stream_parser()
            for event in one.answer.split(b"\n\n"):
                parser.feed(event)
            response = parser.finish()
        else:
            response = dialect.parse_response(dialect.validate_response(json.loads(one.answer)))
        prepare_turn(trace, request.messages, request.tools).commit(response)
    return len(leaves(trace))
