"""Requests as tokens: what continues an answer of the session, and what begins a new context.

    call 1   [system, user]                      -> answer a     the prompt is rendered: a new root
    call 2   [system, user, a, tool result]      -> answer b     tokens of call 1, those sampled, the result
    call 3   [system, a summary of all that]     -> answer c     a new root, reason "compaction"

An answer is recognised in canonical form (`canonical`) and never rendered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graft.gateway.canonical import (
    name_after,
    name_of_tools,
    names_of,
    normalised,
    num_shared,
    reasoning_of,
    text_of,
)
from graft.gateway.changes import PromptChange, change_of, token_change
from graft.gateway.forest import LiveContext, Node
from graft.gateway.policy import ServedPolicy
from graft.gateway.rendering import template_messages
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest
from graft.gateway.roots import (
    Conversation,
    NewRoot,
    answer_before,
    aside_summary_in,
    root_of,
    summary_in,
)
from graft.text.chat import TEMPLATE
from graft.text.transcript import Transcript
from graft.types import Message

MAX_COMPARED = 8
"""Conversations that a request is compared with to the letter: those of the sub-agents that run at a time."""


@dataclass(slots=True, eq=False)
class Answered:
    """An answer and the context that it ends: what a later request may continue."""

    answer: PolicyAnswer
    nodes: tuple[Node, ...]
    """Of what was sampled: one, or one for each version of the weights."""
    live: LiveContext | None
    """None: it was answered from the record of another attempt."""
    tokens: list[int]
    """The whole context, the answer included."""
    transcript: Transcript | None
    """Before the answer, where the chat template is followed exactly."""
    reasoning: tuple[str, ...]
    """Of the answers of this context, this one included."""
    context: int
    """The number of the context among those of the session."""
    role: str
    thread: int = 0
    """The number of its conversation with all that goes on from it."""

    @property
    def is_last(self) -> bool:
        """Whether nothing has continued its context yet, and nothing is about to."""
        live = self.live
        return (
            live is not None and not live.is_busy and len(live.context.tokens) == len(self.tokens)
        )


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A request that was answered, for attempts that begin like this one."""

    asked: str
    message: Message
    """The answer as a client repeats it."""
    done: Answered


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as tokens."""

    tokens: list[int]
    known: Answered | None
    """The answer that it continues; None: it begins a context."""
    transcript: Transcript | None
    reason: str
    """Why it begins a context; "" if it does not."""
    role: str
    summary: Answered | None = None
    """The answer that it repeats as a summary."""
    change: PromptChange | None = None
    """What differs from the conversation that is nearest, where it begins a context."""
    text: str = ""
    """The contents of the messages behind the answer that it continues."""
    after: str = ""
    """The id of the answer after which it begins a context."""
    thread: int | None = None
    """The one that goes on in it; None: a new one begins."""
    begun: int = 0
    """The number of tokens at its end that begin the answer (`ServedPolicy.opening`)."""


class CallHistory:
    """The answers of one session, by the conversations that they end."""

    def __init__(self, policy: ServedPolicy) -> None:
        self.policy, self.chat = policy, policy.chat
        self.answers: dict[str, Answered] = {}
        """By id, in the order of their completion."""
        self._ends: dict[str, Answered] = {}
        self._plain: list[Answered] = []
        """Answers to prompts without a chat."""
        self.conversations: list[Conversation] = []
        """The answered requests, in order."""

    def add(
        self, request: AgentRequest, names: Sequence[str], message: Message, done: Answered
    ) -> None:
        """Remember an answer; `message` is what a client repeats of it."""
        self.answers[done.answer.id] = self._ends[name_after(names[-1], message)] = done
        if request.is_plain:
            self._plain.append(done)
        said = Conversation(request, names, done.role, message, done.answer.id, done.thread)
        self.conversations.append(said)

    def named(self, request: AgentRequest) -> tuple[AgentRequest, list[str]]:
        """The request and the names of its prefixes.

        What it repeats of a recent one is only compared, and held once: an agent sends its whole history
        with every call.
        """
        messages, start = normalised(request.messages), name_of_tools(request.tools)
        most, nearest = 0, None
        for one in self.conversations[: -MAX_COMPARED - 1 : -1]:
            said = one.request.messages
            if one.tools == start and (shared := num_shared(messages, said)) > most:
                most, nearest = shared, one
                if shared == len(said):  # it goes on from there
                    break
        if nearest is None:
            return replace(request, messages=messages), names_of(messages, request.tools)
        messages = (*nearest.request.messages[:most], *messages[most:])
        known = nearest.names[: most + 1]
        tools = nearest.request.tools if nearest.request.tools == request.tools else request.tools
        return replace(request, messages=messages, tools=tools), names_of(messages, (), known)

    def prompt(self, request: AgentRequest, names: Sequence[str]) -> Prompt:
        """The tokens of a request; `names` are those of its conversation (`names_of`)."""
        if request.is_plain and (going_on := self._plain_following(request)) is not None:
            return going_on
        known = self._continued(request, names)
        if known is None:
            root = root_of(request, names[0], self.conversations)
        else:
            count = 1 + _last_answer(request.messages)
            following = self._following(known, self._rendered(request.messages, count))
            if following is not None:
                return following
            root = NewRoot("template", known.role, known.thread)
        tokens, transcript = self.render(request), None
        if self.chat.history == TEMPLATE and not request.is_plain:
            messages = self._rendered(request.messages)
            transcript = Transcript.of(self.chat, messages, _offered(request), tokens)
        told = None
        if root.reason not in ("first", "template"):
            told = self.answers.get(summary_in(request, self.conversations) or "")
        if told is not None and told.role == root.role:
            root = NewRoot("compaction", root.role, told.thread)
        elif (aside := aside_summary_in(request, names[0], self.conversations)) is not None:
            told = self.answers[aside[0]]
            root = NewRoot("compaction", root.role, aside[1])
        change = self._change(request, names, known, tokens)
        after = answer_before(request, root.reason, self.conversations)
        return Prompt(
            tokens,
            None,
            transcript,
            root.reason,
            root.role,
            told,
            change,
            after=after,
            thread=root.thread,
        )

    def render(self, request: AgentRequest) -> list[int]:
        """The tokens of a request as the chat template writes it, whatever was sampled before."""
        if request.is_plain:
            return self._plain_tokens(request)
        try:
            return self.policy.prompt(self._rendered(request.messages), _offered(request))
        except ValueError as error:
            raise RefusedRequest(str(error), param="messages") from error

    def _plain_following(self, request: AgentRequest) -> Prompt | None:
        """A prompt without a chat that begins with the whole context of an answer, and goes on in it."""
        (message,) = request.messages
        decode = self.chat.tokenizer.decode
        for known in sorted(self._plain, key=lambda done: len(done.tokens), reverse=True):
            if (ids := message.get("tokens")) is not None:
                if ids[: len(known.tokens)] != known.tokens:
                    continue
                new = self._checked_ids(ids[len(known.tokens) :])
            elif message["content"].startswith(told := decode(known.tokens)):
                rest = message["content"][len(told) :]
                new = self.chat.tokenizer.encode_after(rest, known.tokens[-1]) if rest else []
            else:
                continue
            text = message["content"] and decode(new)
            return Prompt(known.tokens + new, known, None, "", known.role, text=text)
        return None

    def _plain_tokens(self, request: AgentRequest) -> list[int]:
        (message,) = request.messages
        if "tokens" in message:
            return self._checked_ids(message["tokens"])
        return self.chat.tokenizer.encode(message["content"])

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        size = self.policy.engine.vocab_size
        if wrong := [id for id in ids if id >= size]:
            raise RefusedRequest(
                f"prompt has the token {wrong[0]}, and the policy's vocabulary has {size}",
                param="prompt",
            )
        return [*ids]

    def change_of(self, request: AgentRequest, names: Sequence[str]) -> PromptChange | None:
        """Find the place at which a request leaves what is known."""
        known = self._ends.get(names[_last_answer(request.messages) + 1])
        for told, thought in _thoughts(request, known) if known is not None else ():
            if not _is_same_thought(told, thought):
                return PromptChange.between("reasoning", thought.strip(), told.strip())
        return change_of(request, names[0], self.conversations)

    def _change(
        self,
        request: AgentRequest,
        names: Sequence[str],
        known: Answered | None,
        tokens: list[int],
    ) -> PromptChange | None:
        if known is None:
            return self.change_of(request, names)
        return token_change(known.tokens, tokens, self.chat.tokenizer.decode)  # the template's

    def _rendered(self, messages: Sequence[Message], first: int = 0) -> list[Message]:
        """The messages from `first` on for the chat template."""
        policy = self.policy
        return template_messages(messages, policy.inner_system, policy.syntax.has_channels, first)

    def _continued(self, request: AgentRequest, names: Sequence[str]) -> Answered | None:
        """The answer that the request's last assistant message repeats, if something follows it."""
        last = _last_answer(request.messages)
        known = self._ends.get(names[last + 1])
        if last < 0 or known is None or last + 1 == len(request.messages):
            return None
        is_same = all(_is_same_thought(*pair) for pair in _thoughts(request, known))
        return known if is_same else None

    def _following(self, known: Answered, rest: list[Message]) -> Prompt | None:
        """The prompt that continues an answer; None where the template rewrites what was said."""
        chat, tokens = self.chat, known.tokens
        text = "\n".join(map(text_of, rest))
        try:
            if known.transcript is not None:
                following = known.transcript.answered(chat, tokens, rest)
                if following.is_new:
                    return None
                tokens = tokens + following.tokens
                return Prompt(tokens, known, following.transcript, "", known.role, text=text)
            closed = chat.is_closed([one for node in known.nodes for one in node.span.tokens])
            tool = next((call.name for call in known.answer.calls), "tool")
            new = chat.extend(rest, closed=closed, last=tokens[-1], tool=tool)
        except ValueError as error:
            raise RefusedRequest(str(error), param="messages") from error
        return Prompt(tokens + new, known, None, "", known.role, text=text)


def _offered(request: AgentRequest) -> list[Any] | None:
    """The tools that the policy is shown, whatever `tool_choice` is: the next request may call them."""
    return list(request.tools) or None


def _thoughts(request: AgentRequest, known: Answered) -> Iterator[tuple[str, str]]:
    """The reasoning that a client sends with each answer, latest first, and what was sampled."""
    told = [reasoning_of(one) for one in request.messages if one["role"] == "assistant"]
    return zip(reversed(told), reversed(known.reasoning), strict=False)


def _is_same_thought(told: str, thought: str) -> bool:
    return not told or told.strip() == thought.strip()


def _last_answer(messages: Sequence[Message]) -> int:
    """The index of the last message of the assistant; -1 without one."""
    turns = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    return turns[-1] if turns else -1
