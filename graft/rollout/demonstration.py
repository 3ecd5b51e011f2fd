"""Demonstrations of an environment as episodes, in the tokens of a rollout.

prompt "2+3="     policy "[2+3]"   env "5;"   policy "5"
trained           [ 2 + 3 ]                   5 <eos>
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from graft.actions.actions import Actions, Decisions
from graft.envs.checked import as_reset, as_trace
from graft.protocols import Env
from graft.registry import check_options
from graft.text.chat import TEMPLATE, Chat
from graft.text.template import Tools
from graft.text.transcript import Transcript
from graft.types import (
    NO_ACTION,
    Author,
    CallText,
    Episode,
    Leaf,
    Message,
    MessageText,
    Span,
    Task,
)
from graft.user_code import UserCodeError, UserObject

INLINE = "inline"


class DemonstratedTurn(NamedTuple):
    """One entry of an attempt, after its prompt."""

    author: Author
    text: str
    """A `CallText` is a call, to be spelled with the run's actions."""
    role: str = INLINE
    """Of the environment's text: inside the policy's own turn, or a message of this role."""
    ends: bool = True
    """Of the policy's text: the end of its turn follows, and is trained like any token."""
    call: Decisions | None = None
    """The text as decisions, where they are known."""


def decided(parent: int, decisions: Decisions, text: str = "", skip: int = 0) -> Span:
    """A policy span of demonstrated decisions: trained, without log-probs of a sampler.

    Tokens that continue a decision are not trained, nor are the first `skip`.
    """
    zeros = [0.0] * len(decisions.tokens)
    return Span(
        parent,
        Author.POLICY,
        decisions.tokens,
        decisions.actions,
        zeros,
        zeros,
        decisions.modes,
        mask=[i >= skip and action != NO_ACTION for i, action in enumerate(decisions.actions)],
        text=text,
    )


class DemonstratedTask(NamedTuple):
    """What an environment showed of one task, before it is written in tokens."""

    task: Task
    """With the prompt and the answer that the environment gave."""
    entries: list[DemonstratedTurn]
    tools: Tools | None


def demonstration(
    task: Task,
    env: Env,
    chat: Chat,
    seed: int,
    actions: Actions | None = None,
    prefill: str = "",
    start_tool: str = "",
    **args: Any,
) -> Episode:
    """The episode of `env.demonstrate`: policy spans end exactly where sampling would have ended.

    A turn that ends in a stop string (a tool call inside the policy's own turn) ends there, and with
    `actions` one that ends in a call; every other turn ends with the template's end token, which is
    trained. Consecutive policy entries are one turn:

        policy "I compare."   policy CallText("compare", A, B)   env "A < B"        policy "Done."
        I compare.            compare A and B                  : A < B            Done.<eos>
    """
    task, entries, tools = show(task, env, seed, actions is not None, **args)
    return attempt(task, entries, chat, actions, prefill, tools, start_tool)


def show(
    task: Task, env: Env, seed: int, by_actions: bool = False, **args: Any
) -> DemonstratedTask:
    """Reset the environment, let it demonstrate, and close it."""
    reset: Any = as_reset(env.reset(task.seed), UserObject(env, "env", "reset"))
    observation, info = reset
    if isinstance(observation, str):
        messages = [{"role": "user", "content": observation}]
    else:  # copied: they are rendered later, and an environment may write its next task into them
        messages = [{**message} for message in observation]
    if env.observe_as in ("prompt", "raw"):
        raise ValueError(
            f"{task.env} has a wrapper that rewrites the history, so its demonstration is not one "
            "conversation; warm up without such a wrapper, or from recorded chats (sft.data)"
        )
    who = UserObject(env, "env", "demonstrate")
    demonstrate: Any = getattr(env, "demonstrate", None)
    if demonstrate is None:
        raise UserCodeError(
            f"{who} is not written: a warm-up needs it, or recorded chats in sft.data"
        )
    try:
        returned: Any = demonstrate(random.Random(seed), **args)
    except TypeError:
        given = list(inspect.signature(demonstrate).parameters)[:1]  # the generator
        check_options(demonstrate, args, f"{who}, called with sft.demo_args,", given=given)
        raise
    except NotImplementedError as error:
        raise UserCodeError(f"{error}, or give recorded chats in sft.data") from error
    trace = as_trace(returned, who)
    env.close()
    entries: list[DemonstratedTurn] = []
    for number, (author, text) in enumerate(trace, 1):
        goes_on = number < len(trace) and trace[number][0] is Author.POLICY
        is_call = env.observe_as == INLINE and text.endswith(env.stop) and not by_actions
        role = text.role if isinstance(text, MessageText) else env.observe_as
        entries.append(DemonstratedTurn(author, text, role, ends=not (is_call or goes_on)))
    task = replace(task, prompt=tuple(messages), answer=info.get("answer", task.answer))
    return DemonstratedTask(task, entries, info.get("tools"))


def attempt(
    task: Task,
    entries: Sequence[DemonstratedTurn],
    chat: Chat,
    actions: Actions | None = None,
    prefill: str = "",
    tools: Tools | None = None,
    start_tool: str = "",
) -> Episode:
    """The episode of the task's prompt and the entries after it, in the contexts of a rollout.

    With `start_tool` it begins with a call of this tool, whose entry is not trained.
    """
    encode, decode = chat.tokenizer.encode_after, chat.tokenizer.decode_after
    messages = task.prompt
    prefill = chat.due_prefill(messages, prefill)
    tokens = chat.prefilled(chat.prompt(messages, tools=tools), prefill)
    episode = Episode(task)
    tip = episode.append(Span(None, Author.TASK, tokens))
    transcript = None
    if chat.history == TEMPLATE:
        transcript = Transcript.of(chat, messages, tools, tokens, prefill)
    past: list[int] = []  # the tips of contexts that the template has rewritten
    last: int | None = None  # the token before the next text
    tool: str | None = None  # that the policy has just called
    is_closed = False
    for number, entry in enumerate(entries):
        text, last = entry.text, next(reversed(episode.spans[tip].tokens), last)
        if entry.author is Author.POLICY and actions is not None and isinstance(text, CallText):
            call, tool, is_closed = actions.spell(text.tool, text.arguments), text.tool, False
            skip = _forced(call, actions, start_tool) if not number else 0
            tip = episode.append(decided(tip, call, decode(call.tokens, last), skip))
        elif entry.author is Author.POLICY and entry.call is not None:
            tool, is_closed = None, False  # its answer is taken as it was written
            skip = _forced(entry.call, actions, start_tool) if not number else 0
            tip = episode.append(decided(tip, entry.call, text, skip))
        elif entry.author is Author.POLICY:
            ids, tool, is_closed = encode(text, last), None, entry.ends
            if entry.ends:
                ids += chat.encode_end(ids[-1] if ids else last)
            written = plain_decisions(ids, actions)
            skip = _forced(written, actions, start_tool) if not number else 0
            tip = episode.append(decided(tip, written, str(text), skip))
        elif entry.role == INLINE:
            if actions is not None and tool is not None:
                text = actions.render(tool, text)
            ids = chat.tokenizer.encode_plain(text, last)
            tip = episode.append(Span(tip, Author.ENV, ids, text=text))
        elif not (number and _is_message(entries[number - 1])):  # else it was written with that one
            group = [*takewhile(_is_message, entries[number:])]
            answers: list[Message] = [{"role": one.role, "content": one.text} for one in group]
            text, is_new = "\n".join(one.text for one in group), False
            if transcript is None:
                closed = is_closed and bool(chat.end_text)
                ids = chat.extend(answers, closed=closed, last=last, tool=tool or "tool")
            else:
                written = [token for i in episode.walk(tip) for token in episode.spans[i].tokens]
                transcript, ids, is_new = transcript.answered(chat, written, answers)
            if is_new:
                past.append(tip)
                tip = episode.append(Span(None, Author.TASK, ids, text=text))
            else:
                tip = episode.append(Span(tip, Author.ENV, ids, text=text))
    episode.leaves.append(Leaf((*past, tip), reward=1.0))
    return episode


def _forced(decisions: Decisions, actions: Actions | None, start_tool: str) -> int:
    """The tokens at the start of a demonstration that a rollout writes without the policy."""
    if not start_tool or actions is None:
        return 0
    entry = actions.entry(start_tool)
    if decisions.actions[: len(entry.actions)] != entry.actions:
        raise ValueError(
            f"actions.start={start_tool}: every attempt begins with a call of it, and this "
            "demonstration does not; leave actions.start out, or demonstrate the call first"
        )
    return len(entry.tokens)


def _is_message(entry: DemonstratedTurn) -> bool:
    return entry.author is Author.ENV and entry.role != INLINE


def plain_decisions(tokens: list[int], actions: Actions | None = None) -> Decisions:
    """Plain text as decisions: each token is one, in the mode that the grammar has reached.

    With tags the mode may change in the middle of a text, at what looks like a tag; a whole call is
    refused, because sampling would have ended behind it.
    """
    if actions is None:
        return Decisions(tokens, tokens, [0] * len(tokens), 0)
    grammar, mode = actions.grammar, actions.grammar.start
    for i, token in enumerate(tokens):
        is_plain = actions.space.allows(mode, token) and not grammar.is_exit(mode, token)
        if not is_plain or [*grammar.written(mode, token)] != [token]:
            raise ValueError(
                f"the text of a demonstration contains a call, or part of one: token {token}, number {i} of "
                f"{tokens}, in mode {mode} of the grammar. Return the call from `demonstrate` "
                "as a CallText of its own, or train without actions"
            )
        mode = grammar.step(mode, token)
    return Decisions(tokens, tokens, grammar.walk(tokens), mode)
