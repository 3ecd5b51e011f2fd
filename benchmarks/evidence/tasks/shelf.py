"""Five tools whose names are words and whose arguments are nested, in single characters.

    p342?                    the prompt: the price at row 3, place (4, 2)
    [price 3(4,2)]   417;    a call, and the result that the env appends
    417                      the answer; end of text

In tags every character of a call is a decision, and a misspelt name is no call; by actions the name is
one decision, a digit is one, and the brackets are written for them. Both write the same text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from graft.actions.rules import Symbol, SyntaxMove, SyntaxRules
from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_split, split_of
from graft.envs.tool_env import ToolEnv
from graft.tools.errors import ERROR
from graft.tools.formats import COMPACT_BARE, CallStyle
from graft.types import Author, CallText, Turn

ACTION_FILE = "benchmarks/evidence/tasks/shelf.yaml"
NAMES = ("cost", "price", "weight", "quality", "supplier")
SEED = 20_261_119
RANGE = (100, 999)
_ARGUMENTS = re.compile(r"([0-9])\(([0-9]),([0-9])\)")


def fact(name: str, place: str) -> str:
    """What the tool `name` knows of a place, "342": a number that nothing but the call tells."""
    return str(random.Random(f"{SEED} {name} {place}").randint(*RANGE))


def nested(symbols: Sequence[Symbol]) -> SyntaxRules:
    """Three digits, with the brackets of 3(4,2) written between them."""
    between = ("(", ",")

    def move(count: int, symbol: Symbol) -> SyntaxMove:
        return SyntaxMove(count + 1, between[count]) if count < 2 else SyntaxMove(None)

    return SyntaxRules(0, move)


class Lookup:
    """A tool; reads "3(4,2)", or the bare digits of a call made by actions."""

    description = "What is known of a place."

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, content: str) -> str:
        place = "".join(match.groups()) if (match := _ARGUMENTS.fullmatch(content)) else content
        if not re.fullmatch("[0-9]{3}", place):
            return f"{ERROR}not three digits"
        return fact(self.name, place)


class ShelfQuestion(BaseEnv):
    """One question in one turn: 1.0 for the right number, else 0.0."""

    env_id = "shelf"
    saved = (*BaseEnv.saved, "name", "place")

    def __init__(self, split: str) -> None:
        super().__init__()
        self.split = check_split(split)
        self.name = self.place = ""

    def pose(self) -> str:
        while True:
            self.name, self.place = self.rng.choice(NAMES), str(self.rng.randint(*RANGE))
            if split_of(f"{self.name} {self.place}") == self.split:
                self.answer = fact(self.name, self.place)
                return f"{self.name[0]}{self.place}?"

    def respond(self, action: str) -> Turn:
        return Turn(reward=float(action == self.answer), terminated=True)


class Shelf(ToolEnv):
    """A question and the five tools; `syntax` is "tags" or "actions"."""

    alphabet = "".join(sorted({*"".join(NAMES), *"0123456789[](),?; "}))

    def __init__(self, *, syntax: str = "tags", split: str = "train") -> None:
        self.is_bare = syntax == "actions"
        styles = {
            name: COMPACT_BARE if self.is_bare else CallStyle(f"[{name} ", "]", "{};", "?;", "?;")
            for name in NAMES
        }
        tools = [Lookup(name) for name in NAMES]
        inner = ShelfQuestion(split)
        super().__init__(inner, tools, format=syntax, styles=styles, max_uses=2)

    def demonstrate(self, rng: random.Random, tool_rate: float = 0.05) -> Trace:
        """Call and give the right answer with probability `tool_rate`, else guess a number."""
        if rng.random() >= tool_rate:
            return [(Author.POLICY, str(rng.randint(*RANGE)))]
        name, (row, left, right) = self.env.name, self.env.place
        end = "" if self.is_bare else ")]"
        call = CallText(f"[{name} {row}({left},{right}{end}", name, (row, left, right))
        result = self.styles[name].render(self.env.answer)
        return [(Author.POLICY, call), (Author.ENV, result), (Author.POLICY, self.env.answer)]
