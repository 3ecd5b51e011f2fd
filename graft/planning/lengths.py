"""Likely lengths of attempts: those of the examples that a warm-up learns from.

The quickstart's budget is 96 tokens; its demonstrations have 9 of a prompt, 19 of the teacher and 8 of the
calculator's answer. The lengths decide the time of a run, and before a run no others are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from graft.config import Config
from graft.rollout.examples import shortened
from graft.train.actions import actions_of
from graft.train.build import env_factory
from graft.train.memory.workload import ExampleLengths, SequenceLengths
from graft.train.model import load_tokenizer, make_chat, recipe_shape, source_of
from graft.train.sft_dataset import demonstrations, row_builder
from graft.types import Author, Episode

NUM_EXAMPLES = 64
"""Examples whose lengths are counted."""


def lengths_of(config: Config) -> ExampleLengths | None:
    """Lengths of the recipe's examples; None without a warm-up."""
    if not config.sft.is_on:
        return None
    drawn, rows = _examples(config)
    answered = [one for one in drawn if any(span.author == Author.ENV for span in one.spans)]
    return ExampleLengths(_mean(drawn), _mean(answered or drawn), rows)


def _examples(config: Config) -> tuple[list[Episode], int | None]:
    source = source_of(config)
    tokenizer = load_tokenizer(config, source)
    actions = actions_of(config, tokenizer, recipe_shape(config).vocab_size)
    chat = make_chat(config, tokenizer)
    # examples need these components only, without the model
    components = cast(
        "Any", SimpleNamespace(config=config, tokenizer=tokenizer, chat=chat, actions=actions)
    )
    if config.sft.data:
        chats, build = row_builder(components, config.sft.data)
        apart = max(len(chats) // NUM_EXAMPLES, 1)
        places = range(0, len(chats), apart)[:NUM_EXAMPLES]
        limit = config.rollout.max_context
        return [shortened(build(place, chats[place]), limit) for place in places], len(chats)
    env = env_factory(config, config.task.args, tokenizer)
    components.setup = SimpleNamespace(make_env=env)
    examples = demonstrations(components)
    steps = range(1, 1 + math.ceil(NUM_EXAMPLES / config.sft.batch))
    return [one for step in steps for one in examples(step)], None


def _mean(drawn: Sequence[Episode]) -> SequenceLengths:
    def tokens(author: Author) -> int:
        count = sum(len(span) for one in drawn for span in one.spans if span.author == author)
        return math.ceil(count / len(drawn))

    return SequenceLengths(tokens(Author.TASK), tokens(Author.POLICY), tokens(Author.ENV))
