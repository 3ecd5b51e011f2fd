"""What an agent that is a Python function gets: the address and key of its session, and clients for it.

async def agent(task, client):                    def agent(task, client):
    api = client.openai()                             answer = client.chat(task.prompt)
    ...                                               return float(task.answer in answer["content"])
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from pydantic_core import from_json

from graft.gateway.dialects import openai_chat
from graft.gateway.request import PolicyAnswer, RefusedRequest
from graft.gateway.session import AgentSession
from graft.gateway.speakers.endpoint import ModelEndpoint
from graft.protocols import AgentHost
from graft.types import Message

MODEL = "policy"
"""The name that clients give for the model; any other is answered too."""


class AgentClient:
    """A session, as the agent sees it: `base_url`, `api_key`, and ways to call the policy."""

    model = MODEL

    def __init__(self, held: AgentSession, base_url: str, anthropic_base_url: str) -> None:
        self.attempt = held
        """The session itself, on the event loop of the engine."""
        self.session, self.api_key = held.id, held.key
        self.base_url = base_url
        """For OpenAI's clients: it ends with /v1."""
        self.anthropic_base_url = anthropic_base_url
        self.host: AgentHost | None = None
        """The environment on whose machine a command runs; None: on this computer."""
        self._opened: list[Any] = []

    def openai(self, **options: Any) -> Any:
        """An openai.AsyncOpenAI for this session; in a blocking agent an openai.OpenAI."""
        return self.opened("openai", "AsyncOpenAI", self.base_url, options)

    def anthropic(self, **options: Any) -> Any:
        """An anthropic.AsyncAnthropic; in a blocking agent an anthropic.Anthropic."""
        return self.opened("anthropic", "AsyncAnthropic", self.anthropic_base_url, options)

    def opened(self, library: str, kind: str, url: str, options: Mapping[str, Any]) -> Any:
        """A client of a provider's library, which `close` closes."""
        made = getattr(_imported(library), kind)(base_url=url, api_key=self.api_key, **options)
        if "http_client" not in options:  # else the connections are the agent's own
            self._opened.append(made)
        return made

    async def close(self) -> None:
        """Close the connections of the attempt; an agent that returns need not."""
        for client in self._opened:
            closing = client.close()
            if isawaitable(closing):
                await closing

    async def chat(
        self,
        messages: Sequence[Message] | str,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> dict[str, Any]:
        """The policy's next message, without HTTP: {"role": "assistant", "content": ..., "tool_calls": ...}.

        The message can be appended to `messages` for the next call. Options are those of OpenAI's chat
        completions: max_tokens, stop, temperature, tool_choice, ...
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        elif not isinstance(messages, Iterable):
            raise RefusedRequest(f"client.chat takes messages or a text, not {messages!r}")
        body = {"model": self.model, "messages": [*messages], "tools": [*tools], **options}
        speaker = self.attempt.speaker(str(body["model"]))
        if isinstance(speaker, ModelEndpoint):
            whole = {name: value for name, value in body.items() if value != []}
            return message_in(await speaker.send(openai_chat.PATH, whole, {}))
        try:
            answers = await speaker.answer(openai_chat.read(body, {}))
        except RefusedRequest as refused:
            self.attempt.refuse(refused)
            raise
        self.attempt.refusal = ""
        return as_message(answers[0])

    def reward(self, value: float, response_id: str | None = None) -> None:
        """A reward for the attempt, or for one answer (the "id" of the message)."""
        self.attempt.reward(value, response_id)

    def blocking(self) -> BlockingClient:
        """The same for an agent that runs on a thread of its own."""
        return BlockingClient(self, asyncio.get_running_loop())


class BlockingClient:
    """The client of an agent that is an ordinary function; the loop of the engine runs elsewhere."""

    model = MODEL

    def __init__(self, inner: AgentClient, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = inner, loop
        self.session, self.api_key = inner.session, inner.api_key
        self.base_url, self.anthropic_base_url = inner.base_url, inner.anthropic_base_url

    def openai(self, **options: Any) -> Any:
        return self._inner.opened("openai", "OpenAI", self.base_url, options)

    def anthropic(self, **options: Any) -> Any:
        return self._inner.opened("anthropic", "Anthropic", self.anthropic_base_url, options)

    def chat(
        self,
        messages: Sequence[Message] | str,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> dict[str, Any]:
        """Do as AgentClient.chat does; wait for the answer."""
        asked = self._inner.chat(messages, tools, **options)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    def reward(self, value: float, response_id: str | None = None) -> None:
        async def give() -> None:
            self._inner.reward(value, response_id)

        asyncio.run_coroutine_threadsafe(give(), self._loop).result()


def message_in(answer: bytes) -> dict[str, Any]:
    """The message of an endpoint's chat completion."""
    try:
        message = from_json(answer)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise RefusedRequest(
            f"the endpoint's answer has no message: {answer[:200]!r}", "internal"
        ) from error
    return message


def as_message(answer: PolicyAnswer) -> dict[str, Any]:
    """An answer as the message that the next request has in its history."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "id": answer.id}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": one.id,
                "type": "function",
                "function": {"name": one.name, "arguments": one.arguments},
            }
            for one in answer.calls
        ]
    return message


def _imported(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"client.{name}() needs the {name} package: pip install {name}; client.chat() needs none"
        ) from error
