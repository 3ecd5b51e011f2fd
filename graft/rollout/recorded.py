"""The spans after a prompt as plain data: a demonstration, or an attempt of a model.

    {"messages": [{"role": "user", "content": "34*5="}],
     "spans": [{"author": "policy", "text": "[34*5]"}, {"author": "env", "text": "170;"},
               {"author": "policy", "text": "170"}]}

`graft.rollout.examples.read_entries` reads this format and describes it. A turn of the policy is over where
a message or nothing follows it; "end" is written only where that is not so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from graft.actions.actions import Actions
from graft.rollout.demonstration import INLINE
from graft.text.chat import Chat
from graft.types import Author, CallText, Finish, Leaf, Message, MessageText, Span, Trajectory

Row = dict[str, Any]
HALF = "\ufffd"
"""Marks an incomplete character in a text: a model of bytes may stop within one."""


class NotRecordable(ValueError):
    """An attempt whose tokens cannot be written as text; the message gives the reason."""


def spans_of_trace(
    trace: Sequence[tuple[Author, str]], observe_as: str, stop: tuple[str, ...]
) -> list[Row]:
    """The spans of a demonstration, given the environment's `observe_as` and `stop`."""
    spans: list[Row] = []
    for number, (author, text) in enumerate(trace):
        if author is Author.ENV:
            role = text.role if isinstance(text, MessageText) else observe_as
            spans.append(_env_span(text, role))
            continue
        goes_on = any(other is Author.POLICY for other, _ in trace[number + 1 : number + 2])
        is_call = observe_as == INLINE and text.endswith(stop)
        is_made = isinstance(text, CallText)
        call = {"tool": text.tool, "arguments": [*text.arguments]} if is_made else None
        spans.append(_policy_span(text, ends=not (is_call or is_made or goes_on), call=call))
    return _without_default_ends(spans)


def spans_of_attempt(row: Trajectory, chat: Chat, actions: Actions | None = None) -> list[Row]:
    """The spans of one context of a model's attempt, without its prompt."""
    spans: list[Row] = []
    tool: str | None = None  # that the policy has just called by actions
    is_closed = False
    last: int | None = None  # the token that a span stands behind
    for before, span in pairwise(row.spans):
        last = next(reversed(before.tokens), last)
        if span.author is Author.TASK:
            continue
        if span.author is Author.ENV:
            spans.append(_observed(span, chat, is_closed, actions, tool, last))
            tool = None
            continue
        is_closed = chat.is_closed(span.tokens)
        if HALF in span.text:
            raise NotRecordable("it has an incomplete character")
        if actions is not None and span.info.get("finish") == Finish.EXIT:
            text, call, tool = _call_in(span, chat, actions, last)
            spans += [_policy_span(text, ends=False)] if text else []
            spans.append(call)
        else:
            spans.append(_policy_span(span.text, ends=is_closed))
    return _without_default_ends(spans)


def prompt_of_context(row: Trajectory) -> list[Message]:
    """The prompt of a context: the task's, or the one that a wrapper or template made of it."""
    if row.context == 0:
        return list(row.task.prompt)
    written: list[Message] | None = row.spans[0].info.get("messages")
    return written or [{"role": "user", "content": row.spans[0].text}]


def outcome_of(trajectories: Sequence[Trajectory], leaf: Leaf) -> dict[str, Any]:
    """How an attempt went; `length` counts the tokens that the policy has sampled."""
    spans = (span for one in trajectories for span in one.spans)
    sampled = {id(span): span for span in spans if span.author is Author.POLICY}
    return {
        "reward": leaf.reward,
        "turns": int(leaf.metrics.get("turns", 0)),
        "tool_calls": int(leaf.metrics.get("tool_calls", 0)),
        "length": sum(map(len, sampled.values())),
        "status": str(leaf.status),
    }


def _env_span(text: str, role: str) -> Row:
    return {"author": "env", "text": str(text)} | ({} if role == INLINE else {"role": role})


def _policy_span(text: str, ends: bool, call: Mapping[str, Any] | None = None) -> Row:
    span = {"author": "policy", "text": str(text), "end": ends}
    return span if call is None else span | {"call": call}


def _without_default_ends(spans: list[Row]) -> list[Row]:
    """ "end" only where it differs from what a reader assumes."""
    for number, span in enumerate(spans):
        following = spans[number + 1 : number + 2]
        goes_on = any(one["author"] == "policy" or "role" not in one for one in following)
        if span["author"] == "policy" and span["end"] is not goes_on:
            del span["end"]
    return spans


def _observed(
    span: Span,
    chat: Chat,
    is_closed: bool,
    actions: Actions | None,
    tool: str | None,
    last: int | None,
) -> Row:
    """The environment's span, in the role that reproduces the tokens of the rollout."""
    if span.tokens == chat.tokenizer.encode_plain(span.text, last):
        return _env_span(_bare(span.text, actions, tool), INLINE)
    for role in ("user", "tool"):
        message: Message = {"role": role, "content": span.text}
        if span.tokens == chat.extend([message], closed=is_closed, last=last):
            return _env_span(span.text, role)
    return _env_span(span.text, "tool")  # several calls answered at once: one message


def _bare(text: str, actions: Actions | None, tool: str | None) -> str:
    """The answer to a call, without the text that the actions put around it."""
    if actions is None or tool is None:
        return text
    before, _, after = actions.render(tool, "\0").partition("\0")
    return text.removeprefix(before).removesuffix(after)


def _call_in(span: Span, chat: Chat, actions: Actions, last: int | None) -> tuple[str, Row, str]:
    """The text before a call, the call, and its tool."""
    tool, arguments = actions.read(span.actions, span.modes)
    call = actions.spell(tool, arguments).tokens
    if span.tokens[-len(call) :] != call:
        raise NotRecordable(
            f"the call of {tool} with {list(arguments)} has other tokens than the actions write for it"
        )
    decode, before = chat.tokenizer.decode_after, span.tokens[: -len(call)]
    made = {"tool": tool, "arguments": list(arguments)}
    spelled = decode(call, before[-1] if before else last)
    return decode(before, last), _policy_span(spelled, ends=False, call=made), tool
