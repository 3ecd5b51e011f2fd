"""Why a request does not continue a conversation that its session knows: `REASONS`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from graft.gateway.canonical import key_of, text_of
from graft.gateway.request import AgentRequest
from graft.types import Message

MAIN, SUB_AGENT, SUMMARY, USER = ROLES = ("main", "sub-agent", "summary", "user")
"""Who an answer belongs to; a recipe says which of them are trained. A user is simulated: what
it says is what the main agent reads from its user."""
TRAINED_ROLES = (MAIN, SUB_AGENT, SUMMARY)
"""Those that are trained unless a recipe says otherwise."""
REASONS = {
    "first": "the first request of the agent",
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
    thread: int = 0
    """The number of the conversation with all that goes on from it (`speakers.main_choice`)."""

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


class NewRoot(NamedTuple):
    """Why a request begins a context, and whose it is as far as one can tell so early."""

    reason: str
    role: str
    thread: int | None = None
    """That goes on in it; None: a new one begins."""


def root_of(request: AgentRequest, start: str, known: Sequence[Conversation]) -> NewRoot:
    """Find out why a request that continues no answer begins a context."""
    if not known:
        return NewRoot("first", MAIN)
    system = system_of(request.messages)
    keys, at = tuple(map(key_of, request.messages)), len(system)
    same_agent = [one for one in known if one.agent == request.agent]
    alike = [one for one in same_agent if one.system == system]
    asked_before = [one for one in alike if one.keys[at : at + 1] == keys[at : at + 1]]
    thread = asked_before[-1].thread if asked_before else None
    if request.messages[-1]["role"] == "assistant":
        return NewRoot("prefill", MAIN, thread)
    if not alike:
        continued = [one for one in same_agent if one.is_repeated_in(keys[at:])]
        if continued:
            return NewRoot("other system prompt", continued[-1].role, continued[-1].thread)
        return NewRoot("sub-agent", SUB_AGENT)
    role = alike[-1].role
    same_tools = [one for one in alike if one.tools == start]
    if not same_tools:
        return NewRoot("other tools", role, thread)
    same_question = [one for one in asked_before if one.tools == start]
    if any(len(keys) < len(one.keys) - 1 for one in same_question):
        return NewRoot("compaction", role, thread)
    return NewRoot("rewritten history" if same_question else "new conversation", role, thread)


def summary_in(
    request: AgentRequest, known: Sequence[Conversation], needs_history: bool = True
) -> str | None:
    """The id of the latest answer that is quoted in a message of another author, as a summary is.

    Clients quote a summary whole, or what stands between its tags; a line of a long answer is no summary,
    nor is the first answer of a conversation, which a program may show to the policy again.
    """
    given = [text_of(one) for one in request.messages if one["role"] in ("system", "user")]
    for one in reversed(known):
        if needs_history and not one.is_continued:
            continue
        text = text_of(one.answer)
        lines = [line.strip() for line in text.splitlines()]
        told = [line for line in lines if len(line) >= SHORTEST_SUMMARY]
        quoted = sum(len(line) for line in told if any(line in text for text in given))
        if quoted and quoted >= LEAST_QUOTED * len(text):
            return one.id
    return None


def aside_summary_in(
    request: AgentRequest, start: str, known: Sequence[Conversation]
) -> tuple[str, int] | None:
    """A summary that was asked for in a conversation of its own: its id, and the thread that goes on from it.

    The thread is that of the same agent, which was answered before and now sends less than it did:

    system A, 9 messages    ->    system B, "Summarise: ..."    ->    system A, "So far: ..."
    """
    system = system_of(request.messages)
    ours = [
        said
        for said in known
        if (said.agent, said.system, said.tools) == (request.agent, system, start)
    ]
    long = [said for said in ours if said.is_continued]
    if not long or len(request.messages) > len(long[-1].request.messages):
        return None
    threads = {said.thread for said in ours}
    asides = [
        said
        for said in known[known.index(long[-1]) + 1 :]
        if said.thread not in threads and not said.request.tools and not said.is_continued
    ]
    quoted = summary_in(request, asides, needs_history=False)
    return None if quoted is None else (quoted, long[-1].thread)


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
