r"""Two agents divide three items that each of them values differently, and see only their own values.

Both claim at the same time. Claims that do not overlap are carried out: an agent earns the share of
its values that it has claimed, and items that nobody claimed are lost. After an overlap both see the
claims and claim again; after the last round nobody gets anything.

    A: hat 7, pen 3, cup 0       \boxed{hat pen}    \boxed{hat}         earns 0.7
    B: hat 0, pen 4, cup 6       \boxed{pen cup}    \boxed{pen cup}     earns 1.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any

from graft.envs.multi_agent.base import MultiAgentEnv, read_move
from graft.types import Turn

ITEMS = ("hat", "pen", "cup")
NOTHING = "nothing"
SUM = 10
"""Of an agent's values."""


def yielding(game: Any, agent: str, rng: Random) -> str:
    """Claims what has a value; after an overlap it gives up the contested item that it values least."""
    mine = [item for item in ITEMS if game.values[agent][item]]
    for claims in game.claims:
        (theirs,) = (claim for name, claim in claims.items() if name != agent)
        contested = [item for item in mine if item in theirs and item in claims[agent]]
        if len(mine) > 1 and contested:
            mine.remove(min(contested, key=game.values[agent].__getitem__))
    return game.spelled(mine)


class SplitItems(MultiAgentEnv):
    """`rounds` attempts to find claims that do not overlap. Not zero-sum, with hidden values."""

    agents = ("A", "B")
    turn_order = "simultaneous"
    PLAYERS = {"yielding": yielding}
    teacher = "yielding"
    saved = (*MultiAgentEnv.saved, "values", "claims")

    def __init__(self, *, rounds: int = 3, **seats: Any) -> None:
        if rounds < 1:
            raise ValueError(f"rounds={rounds}: must be 1 or more")
        super().__init__(**seats)
        self.rounds = rounds
        self.values: dict[str, dict[str, int]] = {}
        self.claims: list[dict[str, list[str]]] = []
        """Of the rounds so far, by agent."""

    def pose(self) -> dict[str, str]:
        self.claims = []
        self.values = {agent: self._drawn_values() for agent in self.agents}
        return {agent: self._rules(agent) for agent in self.agents}

    def respond(self, actions: Mapping[str, str]) -> Mapping[str, Turn]:
        read = {agent: read_claim(action) for agent, action in actions.items()}
        claims = {agent: claim for agent, claim in read.items() if claim is not None}
        if bad := [agent for agent in read if agent not in claims]:
            return self.lose(bad)
        self.claims.append(claims)
        first, second = self.agents
        told = "; ".join(
            f"{agent} claimed {' '.join(claims[agent]) or NOTHING}" for agent in claims
        )
        contested = [item for item in claims[first] if item in claims[second]]
        if contested and len(self.claims) < self.rounds:
            left = self.rounds - len(self.claims)
            text = f"{told}. You both want: {' '.join(contested)}. Claim again ({left} more)."
            return dict.fromkeys(self.agents, Turn(text))
        rewards = {
            agent: 0.0
            if contested
            else sum(self.values[agent][item] for item in claims[agent]) / SUM
            for agent in self.agents
        }
        text = f"{told}. {'No agreement.' if contested else 'Agreed.'}"
        return {agent: Turn(text, reward, terminated=True) for agent, reward in rewards.items()}

    def legal_actions(self, agent: str) -> Sequence[str]:
        sets = (chosen for size in range(len(ITEMS) + 1) for chosen in combinations(ITEMS, size))
        return [self.spelled(chosen) for chosen in sets]

    def spelled(self, items: Sequence[str]) -> str:
        return f"\\boxed{{{' '.join(items) or NOTHING}}}"

    def _drawn_values(self) -> dict[str, int]:
        """Values with the sum 10; one or two items may be worth nothing."""
        valued = self.rng.sample(ITEMS, self.rng.randint(1, len(ITEMS)))
        cuts = sorted(self.rng.sample(range(1, SUM), len(valued) - 1))
        parts = [end - start for start, end in pairwise((0, *cuts, SUM))]
        drawn = dict(zip(valued, parts, strict=True))
        return {item: drawn.get(item, 0) for item in ITEMS}

    def _rules(self, agent: str) -> str:
        values = ", ".join(f"{item} {worth}" for item, worth in self.values[agent].items())
        return (
            f"You are {agent}. You and one other agent divide a hat, a pen and a cup. Your values: "
            f"{values}. The other agent has other values, which you do not see.\nBoth claim at the same "
            "time. If no item is claimed twice, you earn the value of your claim divided by 10; else "
            f"you both claim again, {self.rounds} times at most, and then earn nothing.\nWrite your "
            "claim as \\boxed{hat pen}, or \\boxed{nothing}."
        )


def read_claim(action: str) -> list[str] | None:
    r"""The items of a claim, in the order of `ITEMS`: "\boxed{cup, hat}" -> hat, cup; None: not a claim."""
    words = read_move(action)[:200].lower().replace(",", " ").split()
    if not words or (set(words) != {NOTHING} and not set(words) <= set(ITEMS)):
        return None
    return [item for item in ITEMS if item in words]
