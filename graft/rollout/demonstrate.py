"""Supervised examples as episodes: what a teacher would have done, in the very tokens of a rollout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graft.actions.actions import Actions, Decisions
from graft.protocols import Env
from graft.text.chat import Chat
from graft.types import NO_ACTION, Author, Called, Episode, Leaf, Span, Task


def decided(parent: int, decisions: Decisions, text: str = "") -> Span:
    """A policy span of a teacher's decisions: trained, without a sampler's log-probs.

    Tokens that merely continue a decision are not trained.
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
        mask=[action != NO_ACTION for action in decisions.actions],
        text=text,
    )


def demonstration(
    task: Task,
    env: Env,
    chat: Chat,
    seed: int,
    actions: Actions | None = None,
    prefill: str = "",
    **args: Any,
) -> Episode:
    """The episode of `env.demonstrate`: policy spans end exactly where sampling would have ended.

    A turn that ends in a stop string (a tool call inside the policy's own turn) ends there, and with
    `actions` one that ends in a call; every other turn ends with the template's end token, which is
    trained like any word. Policy entries in a row are one turn:

        policy "I compare."   policy Called("compare", A, B)   env "A < B"        policy "Done."
        I compare.            compare A and B                  : A < B            Done.<eos>
    """
    observation, info = env.reset(task.seed)
    messages = (
        [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    )
    if env.observe_as in ("prompt", "raw"):
        raise ValueError(
            f"{task.env} has a wrapper that rewrites the history, so its teacher's turns are no "
            "single conversation; warm up without such a wrapper, or from recorded chats (sft.data)"
        )
    trace: Sequence[tuple[Author, str]] = env.demonstrate(random.Random(seed), **args)  # type: ignore[attr-defined]
    env.close()
    encode = chat.tokenizer.encode
    tokens = chat.prompt(list(messages), tools=info.get("tools"))
    tokens += encode(prefill) if prefill else []
    episode = Episode(replace(task, prompt=tuple(messages), answer=info.get("answer", task.answer)))
    tip = episode.append(Span(None, Author.TASK, tokens))
    end = encode(chat.end_text)
    tool: str | None = None  # whom the policy has just called
    for number, (author, text) in enumerate(trace):
        goes_on = any(following is Author.POLICY for following, _ in trace[number + 1 : number + 2])
        if author is Author.POLICY and actions is not None and isinstance(text, Called):
            call, tool = actions.spell(text.tool, text.arguments), text.tool
            tip = episode.append(decided(tip, call, chat.tokenizer.decode(call.tokens)))
        elif author is Author.POLICY:
            is_call = env.observe_as == "inline" and text.endswith(env.stop) and actions is None
            ids, tool = encode(text) + ([] if is_call or goes_on else end), None
            tip = episode.append(decided(tip, spoken(ids, actions), str(text)))
        elif env.observe_as == "inline":
            if actions is not None and tool is not None:
                text = actions.render(tool, text)
            ids = chat.tokenizer.encode_plain(text)
            tip = episode.append(Span(tip, Author.ENV, ids, text=text))
        else:
            ids = chat.extend([{"role": env.observe_as, "content": text}], closed=bool(end))
            tip = episode.append(Span(tip, Author.ENV, ids, text=text))
    episode.leaves.append(Leaf((tip,), reward=1.0))
    return episode


def spoken(tokens: list[int], actions: Actions | None = None) -> Decisions:
    """Plain words as decisions: each token is one, in the mode that the grammar has reached.

    With tags the mode may move on in the middle of a text, at what looks like a tag; a whole call
    is not plain words, for sampling would have ended behind it.
    """
    if actions is None:
        return Decisions(tokens, tokens, [0] * len(tokens), 0)
    grammar, mode = actions.grammar, actions.grammar.start
    for i, token in enumerate(tokens):
        is_plain = actions.space.allows(mode, token) and not grammar.is_exit(mode, token)
        if not is_plain or [*grammar.written(mode, token)] != [token]:
            raise ValueError(
                f"a teacher's words contain a call, or part of one: token {token}, number {i} of "
                f"{tokens}, in mode {mode} of the grammar. Let `demonstrate` give the call as "
                "a Called of its own, or train without actions"
            )
        mode = grammar.step(mode, token)
    return Decisions(tokens, tokens, grammar.walk(tokens), mode)


def conversation(task: Task, messages: Sequence[dict[str, Any]], chat: Chat) -> Episode:
    """The episode of a recorded chat: assistant tokens are trained, everything else is context."""
    episode = Episode(replace(task, prompt=tuple(messages)))
    tip: int | None = None
    for ids, is_assistant in chat.conversation(list(messages)):
        if is_assistant and tip is not None:
            tip = episode.append(decided(tip, spoken(ids), chat.tokenizer.decode(ids)))
        else:
            author = Author.TASK if tip is None else Author.ENV
            tip = episode.append(Span(tip, author, ids))
    if tip is not None:
        episode.leaves.append(Leaf((tip,), reward=1.0))
    return episode
