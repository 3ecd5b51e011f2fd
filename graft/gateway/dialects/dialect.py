"""What a dialect is, and the table of those that the gateway speaks.

request = dialect.read(body, headers)               # RefusedRequest: dialect.error(refused)
answers = await session.answer(request)
body = dialect.answer(request, answers)             # or, streamed:

dialect.ping()                                      # as often as needed, from the start
dialect.opening(request, answers[0].id)
dialect.events(request, answers)                    # deltas and the end; dialect.error_event(refused)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from graft.gateway.dialects import anthropic, openai_chat, openai_completions, openai_responses
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest


class Dialect(Protocol):
    """The form of one API; the modules of this folder are such objects."""

    PATH: str
    """Where its requests go."""
    PREFIX: str
    """Of the ids of its answers."""

    def read(self, body: Any, headers: Mapping[str, str]) -> AgentRequest:
        """The request; RefusedRequest, and no other exception, whatever the body is."""
        ...

    def answer(self, request: AgentRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
        """The body of a whole answer."""
        ...

    def opening(self, request: AgentRequest, id: str) -> bytes:
        """The first events of a stream; `id` is that of the first answer."""
        ...

    def events(self, request: AgentRequest, answers: Sequence[PolicyAnswer]) -> Iterator[bytes]:
        """The events after the opening, to the end of the stream."""
        ...

    def ping(self) -> bytes:
        """What keeps a stream open, before its opening too; clients skip it."""
        ...

    def error(self, refused: RefusedRequest) -> tuple[int, dict[str, Any]]:
        """The status and the body of a refused request."""
        ...

    def error_event(self, refused: RefusedRequest) -> bytes:
        """The same inside a stream, which it ends."""
        ...

    def models(self, names: Sequence[str]) -> Mapping[str, Any]:
        """The answer to GET /v1/models; the answer for one model is the entry of `data`."""
        ...


DIALECTS: dict[str, Dialect] = {
    "openai_chat": openai_chat,
    "openai_completions": openai_completions,
    "openai_responses": openai_responses,
    "anthropic": anthropic,
}


def answer_id(response_id: str) -> str:
    """The id of the answer in an id that a client saw, or in its own: "chatcmpl-7f", "7f" -> "7f"."""
    for dialect in DIALECTS.values():
        if response_id.startswith(dialect.PREFIX):
            return response_id.removeprefix(dialect.PREFIX)
    return response_id
