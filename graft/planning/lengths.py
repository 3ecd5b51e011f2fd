"""How long attempts will probably be: as long as the examples that a warm-up learns from.

The quickstart's budget is 96 tokens; its teacher poses 9, says 19 and is answered 8 where it calls the
calculator. Lengths of a run decide its time, and before it has begun these are the only ones there are.
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

LOOKED_AT = 64
"""Examples whose lengths are counted."""


def lengths_of(config: Config) -> ExampleLengths | None:
    """Of the recipe's own examples; None without a warm-up: nothing says how long attempts will be."""
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
    # a whole run would load the model; examples need no more than this of it
    components = cast(
        "Any", SimpleNamespace(config=config, tokenizer=tokenizer, chat=chat, actions=actions)
    )
    if config.sft.data:
        chats, build = row_builder(components, config.sft.data)
        apart = max(len(chats) // LOOKED_AT, 1)
        places = range(0, len(chats), apart)[:LOOKED_AT]
        limit = config.rollout.max_context
        return [shortened(build(place, chats[place]), limit) for place in places], len(chats)
    env = env_factory(config, config.task.args, tokenizer)
    components.setup = SimpleNamespace(make_env=env)
    examples = demonstrations(components)
    steps = range(1, 1 + math.ceil(LOOKED_AT / config.sft.batch))
    return [one for step in steps for one in examples(step)], None


def _mean(drawn: Sequence[Episode]) -> SequenceLengths:
    def tokens(author: Author) -> int:
        count = sum(len(span) for one in drawn for span in one.spans if span.author == author)
        return math.ceil(count / len(drawn))

    return SequenceLengths(tokens(Author.TASK), tokens(Author.POLICY), tokens(Author.ENV))
