"""Why a request does not continue a conversation that its session knows: `REASONS`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from graft.gateway.canonical import key_of, text_of
from graft.gateway.request import AgentRequest
from graft.types import Message

MAIN, SUB_AGENT, SUMMARY = ROLES = ("main", "sub-agent", "summary")
"""Who an answer belongs to; a recipe says which of them are trained."""
REASONS = {
    "first": "the first request of the attempt",
    "sub-agent": "the client names another agent, or the system prompt is a new one",
    "other system prompt": "what was said goes on under another one: a handoff, or a prompt that changes",
    "other tools": "the same system prompt with other tools",
    "compaction": "a summary that the policy wrote is quoted in the new prompt; or the history got shorter",
    "rewritten history": "the same beginning, and something that was said has changed",
    "new conversation": "the same system prompt, another first question",
    "template": "the chat template rewrites earlier turns, and is followed exactly",
    "prefill": "the answer is begun by the client",
}
"""What begins a new context, in words."""
SHORTEST_SUMMARY = 24
"""Characters of a line from which on finding it in a prompt is no accident."""
LEAST_QUOTED = 0.25
"""Share of a summary's characters that clients quote at least: some drop an analysis before it."""


@dataclass(frozen=True)
class Conversation:
    """A request that was answered, as far as it decides what a later one is."""

    request: AgentRequest
    names: Sequence[str]
    """Of the request's prefixes (`names_of`); the first one is that of its tools."""
    role: str
    answer: Message
    id: str
    """Of the answer."""

    @property
    def tools(self) -> str:
        return self.names[0]

    @property
    def agent(self) -> str:
        return self.request.agent

    @property
    def tool_names(self) -> tuple[str, ...]:
        return names_of_tools(self.request)

    @cached_property
    def system(self) -> tuple[str, ...]:
        return system_of(self.request.messages)

    @property
    def is_continued(self) -> bool:
        """Whether something was answered before: only then can its answer be a summary."""
        return any(one["role"] == "assistant" for one in self.request.messages)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of its messages, the answer included; only a new root compares them."""
        return tuple(map(key_of, (*self.request.messages, self.answer)))

    def is_repeated_in(self, keys: Sequence[str]) -> bool:
        """Whether `keys` begin with all that was said here, the system prompt aside."""
        said = self.keys[len(self.system) :]
        return tuple(keys[: len(said)]) == said


def names_of_tools(request: AgentRequest) -> tuple[str, ...]:
    return tuple(str(tool.get("function", {}).get("name", "")) for tool in request.tools)


def system_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """The system messages at the start."""
    found: list[str] = []
    for message in messages:
        if message["role"] != "system":
            break
        found.append(text_of(message))
    return tuple(found)


def reason_of(request: AgentRequest, start: str, known: Sequence[Conversation]) -> tuple[str, str]:
    """The reason of a new root, and the role of its answers."""
    if not known:
        return "first", MAIN
    if request.messages[-1]["role"] == "assistant":
        return "prefill", MAIN
    system = system_of(request.messages)
    keys, at = tuple(map(key_of, request.messages)), len(system)
    same_agent = [one for one in known if one.agent == request.agent]
    alike = [one for one in same_agent if one.system == system]
    if not alike:
        continued = [one for one in same_agent if one.is_repeated_in(keys[at:])]
        if continued:
            return "other system prompt", continued[-1].role
        return "sub-agent", SUB_AGENT
    role = alike[-1].role
    same_tools = [one for one in alike if one.tools == start]
    if not same_tools:
        return "other tools", role
    same_question = [one for one in same_tools if one.keys[at : at + 1] == keys[at : at + 1]]
    if any(len(keys) < len(one.keys) - 1 for one in same_question):
        return "compaction", role
    return ("rewritten history" if same_question else "new conversation"), role


def summary_in(request: AgentRequest, known: Sequence[Conversation]) -> str | None:
    """The id of the latest answer that is quoted in a message of another author, as a summary is.

    Clients quote a summary whole, or what stands between its tags; a line of a long answer is no summary,
    nor is the first answer of a conversation, which a program may show to the policy again.
    """
    given = [text_of(one) for one in request.messages if one["role"] in ("system", "user")]
    for one in reversed(known):
        if not one.is_continued:
            continue
        text = text_of(one.answer)
        lines = [line.strip() for line in text.splitlines()]
        told = [line for line in lines if len(line) >= SHORTEST_SUMMARY]
        quoted = sum(len(line) for line in told if any(line in text for text in given))
        if quoted and quoted >= LEAST_QUOTED * len(text):
            return one.id
    return None


def answer_before(request: AgentRequest, reason: str, known: Sequence[Conversation]) -> str:
    """The id of the answer after which a new context begins; "": there is none.

    A sub-agent begins after an answer of the main agent, whatever other sub-agents said meanwhile; what
    goes on otherwise, after one of its own agent.
    """
    if reason == "sub-agent":
        likely = [one for one in known if one.role == MAIN]
    else:
        ours = [one for one in known if one.agent == request.agent]
        system = system_of(request.messages)
        likely = [one for one in ours if one.system == system] or ours
    return next((one.id for one in reversed(likely or known)), "")
