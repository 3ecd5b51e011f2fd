"""Supervised examples as episodes: what a teacher would have done, in the very tokens of a rollout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graft.protocols import Env
from graft.text.chat import Chat
from graft.types import Author, Episode, Leaf, Span, Task


def written(parent: int, tokens: list[int], text: str = "") -> Span:
    """A policy span that was written by a teacher: trained, without a sampler's log-probs."""
    n = len(tokens)
    zeros = [0.0] * n
    return Span(
        parent, Author.POLICY, tokens, tokens, zeros, zeros, [0] * n, mask=[True] * n, text=text
    )


def demonstration(task: Task, env: Env, chat: Chat, seed: int, **args: Any) -> Episode:
    """The episode of `env.demonstrate`: policy spans end exactly where sampling would have ended.

    A turn that ends in a stop string (a tool call inside the policy's own turn) ends there; every
    other turn ends with the template's end token, which is trained like any word.
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
    tokens = chat.prompt(list(messages), tools=info.get("tools"))
    episode = Episode(replace(task, prompt=tuple(messages), answer=info.get("answer", task.answer)))
    tip = episode.append(Span(None, Author.TASK, tokens))
    end = chat.tokenizer.encode(chat.end_text)
    for author, text in trace:
        if author is Author.POLICY:
            is_open = env.observe_as == "inline" and text.endswith(env.stop)
            ids = chat.tokenizer.encode(text) + ([] if is_open else end)
            tip = episode.append(written(tip, ids, text))
        elif env.observe_as == "inline":
            tip = episode.append(Span(tip, Author.ENV, chat.tokenizer.encode(text), text=text))
        else:
            ids = chat.extend([{"role": env.observe_as, "content": text}], closed=bool(end))
            tip = episode.append(Span(tip, Author.ENV, ids, text=text))
    episode.leaves.append(Leaf((tip,), reward=1.0))
    return episode


def conversation(task: Task, messages: Sequence[dict[str, Any]], chat: Chat) -> Episode:
    """The episode of a recorded chat: assistant tokens are trained, everything else is context."""
    episode = Episode(replace(task, prompt=tuple(messages)))
    tip: int | None = None
    for ids, is_assistant in chat.conversation(list(messages)):
        if is_assistant and tip is not None:
            tip = episode.append(written(tip, ids, chat.tokenizer.decode(ids)))
        else:
            author = Author.TASK if tip is None else Author.ENV
            tip = episode.append(Span(tip, author, ids))
    if tip is not None:
        episode.leaves.append(Leaf((tip,), reward=1.0))
    return episode
