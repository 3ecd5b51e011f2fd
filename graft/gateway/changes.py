"""What broke a prefix: the first difference between a request and the conversation that is nearest to it.

known     user "2+3?", assistant "5", user "and 4?", assistant "9"
request   user "2+3?", assistant "six", user "sure?"
change    message 2, before: "assistant: 5", after: "assistant: six"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graft.gateway.canonical import key_of
from graft.gateway.forest import common_length
from graft.gateway.request import AgentRequest
from graft.gateway.roots import Conversation, names_of_tools

LEAD, MAX_SHOWN = 24, 160
"""Characters that are shown before a difference, and in all."""
SHOWN = 24
"""Tokens that are shown from a difference on."""


@dataclass(frozen=True, slots=True)
class PromptChange:
    """The place at which a request first differs, and both texts around it."""

    place: str
    """message 2, tools, reasoning, token 812"""
    before: str
    after: str

    @classmethod
    def between(cls, place: str, before: str, after: str) -> PromptChange:
        """The parts of two texts from shortly before their first difference on."""
        start = max(0, common_length(before, after) - LEAD)
        return cls(place, _cut(before, start), _cut(after, start))


def token_change(
    before: Sequence[int], after: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> PromptChange:
    """Find the place at which two prompts first differ, and what follows there."""
    at = common_length(before, after)
    excerpts = (decode(some[at : at + SHOWN]) for some in (before, after))
    return PromptChange(f"token {at}", *excerpts)


def change_of(
    request: AgentRequest, start: str, known: Sequence[Conversation]
) -> PromptChange | None:
    """The change since the conversation that shares most messages; None: nothing was said before.

    start: the name of the request's tools (`names_of`).
    """
    ours = [one for one in known if one.agent == request.agent] or list(known)
    if not ours:
        return None
    keys = [key_of(message) for message in request.messages]
    shared = [common_length(one.keys, keys) for one in ours]
    at = max(shared)
    alike = [one for one, many in zip(ours, shared, strict=True) if many == at]
    nearest = next((one for one in reversed(alike) if one.tools == start), alike[-1])
    if at and nearest.tools != start:
        before, after = (
            ", ".join(names) for names in (nearest.tool_names, names_of_tools(request))
        )
        if before == after:
            after += " (the same names; a description or a parameter differs)"
        return PromptChange.between("tools", before, after)
    before, after = (
        _describe_message(some[at]) if at < len(some) else "no message"
        for some in (nearest.keys, keys)
    )
    return PromptChange.between(f"message {at + 1}", before, after)


def _describe_message(key: str) -> str:
    """A message from its key: role, text and calls."""
    role, text, *rest = json.loads(key)
    calls = rest[0] if rest else []
    made = [f"{name}({json.dumps(arguments, ensure_ascii=False)})" for name, arguments in calls]
    return f"{role}: {' '.join([text, *made]).strip()}"


def _cut(text: str, start: int) -> str:
    shown = text[start : start + MAX_SHOWN]
    return f"{'...' * bool(start)}{shown}{'...' * (start + MAX_SHOWN < len(text))}"
