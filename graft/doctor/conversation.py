"""One conversation, token by token, with the trained tokens marked.

    task    12+34=
    policy  »[12+34]«
    env     46;
    policy  »46<eos>«

The marks come from the batch that the learner gets, not from the code that wrote the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from graft.config import Config
from graft.data.chats import open_chats
from graft.doctor.environments import first_tasks
from graft.rollout.action_spelling import ActionSpeller
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.demonstration import demonstration
from graft.rollout.examples import example
from graft.text.tokenizer import FastTokenizer
from graft.train.components import RunComponents
from graft.train.monitor.check import FAIL, PASS, Check
from graft.train.monitor.printable import visible
from graft.types import Author, Episode, Task, Trajectory

OPEN, CLOSE = "»", "«"
MAX_SHOWN = 400
"""Characters of one span."""
MAX_TOKENS = 4096
"""Of the conversation in JSON."""
LESSONS = 64
"""Demonstrations that are searched for one of several turns."""


class ShownToken(NamedTuple):
    author: str
    id: int
    is_trained: bool


def tokens_of(row: Trajectory) -> list[ShownToken]:
    """All tokens of a row, each with its author and whether the learner trains it."""
    prompt = sum(len(span) for span in row.spans if span.author is Author.TASK)
    trained = [False] * prompt + to_batch([row]).mask[0].tolist()
    authors = [str(span.author) for span in row.spans for _ in span.tokens]
    pairs = zip(authors, row.tokens, trained, strict=True)
    return [ShownToken(author, token, flag) for author, token, flag in pairs]


def render_tokens(tokens: list[ShownToken], tokenizer: FastTokenizer) -> str:
    """A line per span of a row; trained tokens stand between marks."""
    lines: list[str] = []
    for author, some in groupby(tokens, key=lambda token: token.author):
        text = ""
        for is_trained, run in groupby(some, key=lambda token: token.is_trained):
            words = visible(tokenizer.decode([token.id for token in run])).replace("\n", "⏎")
            text += f"{OPEN}{words}{CLOSE}" if is_trained else words
        if len(text) > MAX_SHOWN:
            left_out = len(text) - MAX_SHOWN
            half = MAX_SHOWN // 2
            text = f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"
        lines.append(f"{author:<6}  {text}")
    return "\n".join(lines)


def conversation_check(episode: Episode, tokenizer: FastTokenizer, origin: str) -> Check:
    """The first attempt of an episode; `origin` says where it comes from."""
    row = next(episode.trajectories())
    tokens = tokens_of(row)
    trained = sum(token.is_trained for token in tokens)
    where = (
        f"{origin}: {trained} of {len(tokens)} tokens are trained, those between {OPEN} and {CLOSE}"
    )
    data: dict[str, Any] = {
        "origin": origin,
        "tokens": [
            {
                "author": token.author,
                "id": token.id,
                "text": tokenizer.decode([token.id]),
                "is_trained": token.is_trained,
            }
            for token in tokens[:MAX_TOKENS]
        ],
    }
    seen = f"{where}\n{render_tokens(tokens, tokenizer)}"
    if not trained:
        remedy = "no token of it is trained: check the authors of these spans"
        return Check("loss mask", FAIL, seen, remedy, data)
    return Check("loss mask", PASS, seen, "", data)


def find_example(
    components: RunComponents, config: Config, episodes: Sequence[Episode]
) -> tuple[Episode, str] | None:
    """A row of the warm-up, a demonstration, or the longest of the sampled `episodes`; and which it is."""
    sft = config.sft
    if sft.is_on and sft.data:
        chats, marks = open_chats(sft.data, sft.skip_bad, sft.layout), sft.mask_results
        speller = (
            ActionSpeller(components.actions, components.tokenizer, marks)
            if components.actions
            else None
        )
        row = example(
            Task("row:1", ""),
            chats[0],
            components.chat,
            marks,
            speller,
            config.task.prefill,
            config.actions.start,
        )
        return row, f"the first row of {sft.data}"
    if sft.is_on or not config.task.agent:  # an agent's attempts are not the environment's
        with suppress(NotImplementedError, ValueError, AttributeError):
            return _taught(components, config), "a demonstration"
    rows = trajectories_of(episodes)
    if not rows:
        return None
    longest = max(rows, key=lambda row: len(row.spans))
    return replace(longest.episode, leaves=[longest.leaf]), "a sampled attempt"


def _taught(components: RunComponents, config: Config) -> Episode:
    """A demonstration of more than one turn, if there is one among several draws."""
    task = first_tasks(config, 1)[0]

    def taught(seed: int) -> Episode:
        return demonstration(
            task,
            components.setup.make_env(task),
            components.chat,
            seed=seed,
            actions=components.actions,
            prefill=components.setup.for_task(task).prefill,
            start_tool=config.actions.start,
            **config.sft.demo_args,
        )

    several = (episode for episode in map(taught, range(LESSONS)) if len(episode.spans) > 2)
    return next(several, None) or taught(0)
