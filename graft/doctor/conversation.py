"""One conversation, token by token, with the trained tokens marked.

    task    12+34=
    policy  »[12+34]«
    env     46;
    policy  »46<eos>«

The marks come from the batch that the learner gets, not from the code that wrote the conversation.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from graft.rollout.batching import to_batch
from graft.text.tokenizer import FastTokenizer
from graft.train.monitor.check import FAIL, PASS, Check
from graft.train.monitor.formatting import visible
from graft.types import Author, Episode, Trajectory

OPEN, CLOSE = "»", "«"
MOST_SHOWN = 400
"""Characters of one span."""
MOST_TOKENS = 4096
"""Of the conversation in JSON."""


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


def shown(tokens: list[ShownToken], tokenizer: FastTokenizer) -> str:
    """A line per span of a row; trained tokens stand between marks."""
    lines: list[str] = []
    for author, some in groupby(tokens, key=lambda token: token.author):
        text = ""
        for is_trained, run in groupby(some, key=lambda token: token.is_trained):
            words = visible(tokenizer.decode([token.id for token in run])).replace("\n", "⏎")
            text += f"{OPEN}{words}{CLOSE}" if is_trained else words
        if len(text) > MOST_SHOWN:
            left_out = len(text) - MOST_SHOWN
            half = MOST_SHOWN // 2
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
            for token in tokens[:MOST_TOKENS]
        ],
    }
    seen = f"{where}\n{shown(tokens, tokenizer)}"
    if not trained:
        remedy = "no token of it is trained: check the authors of these spans"
        return Check("loss mask", FAIL, seen, remedy, data)
    return Check("loss mask", PASS, seen, "", data)
