"""Whatever one attempt raises or returns, the run goes on: exceptions, numbers, texts and JSON of every kind.

Each oddity comes from one place (an environment, a tool, a reward, an agent, a posted reward, a request) in
one attempt of two. It fails where the collection raises, where the other attempt is not done, where the
odd one is neither trained with a finite reward nor a failure with its reason, and where the log cannot be
written or read back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from graft.types import Episode
from trust.bank import Row
from trust.oddities import oddities
from trust.places import PLACES

SMALL, FULL = 300, 5_000


def fault_of(place: str, oddity: Any) -> str:
    """What an oddity did to the run; "": nothing but its own attempt."""
    try:
        episodes = PLACES[place](oddity)
    except BaseException as error:
        return f"the run ended: {type(error).__name__}: {str(error)[:200]!r}"
    leaves = [leaf for episode in episodes for leaf in episode.leaves]
    if len(leaves) != 2:
        return f"{len(leaves)} leaves"
    odd, fine = leaves if place not in ("env reset", "env prompt", "env answer") else leaves[::-1]
    if fine.status != "done" or fine.reward != 1.0:
        return f"the other attempt ended {fine.status} with {fine.reward}"
    if odd.status.is_trainable and not abs(odd.reward) <= 1e12:
        return f"trained with the reward {odd.reward}"
    lines = [episode.dumps() for episode in episodes]
    infos = [span.info for episode in episodes for span in episode.spans] + [odd.info]
    if not odd.status.is_trainable and not any(info.get("error") for info in infos):
        return f"{odd.status} without a reason"
    for line in lines:
        line.encode()
        if Episode.loads(line).dumps() != line:
            return "the log reads back as another episode"
    return ""


def run(count: int, seed: int) -> Iterator[Row]:
    pairs = [*itertools.product(PLACES, range(len(oddities())))]
    random.Random(seed).shuffle(pairs)
    tried = pairs[:count]
    for place in PLACES:
        mine = [number for where, number in tried if where == place]
        row = Row("one_attempt", place, len(mine))
        for number in mine:
            oddity = oddities()[number]
            if fault := fault_of(place, oddity):
                row.failures.append(f"{number} {type(oddity).__name__} {_shown(oddity)}: {fault}")
        yield row


def _shown(oddity: Any) -> str:
    try:
        return repr(oddity)[:60]
    except Exception:
        return "rude"
