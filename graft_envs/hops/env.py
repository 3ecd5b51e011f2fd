"""Questions of several hops: the result of one search is part of the next query.

kab.M.S*37               the prompt: the salary of kab's mentor, times 37
(kab M)   mod;           a search, and the result that the env appends
(mod S)   342;           the second hop, which needs the first result
[342*37]  12654;         a product in python
=12654                   the answer; end of text

That is the syntax "compact", for models that read single characters. The syntax "words" has the same
questions about the same people in English, with ARPO's tags; see `graft_envs.hops.syntax`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_range, check_split
from graft.envs.tool_env import ToolEnv
from graft.registry import resolve
from graft.rewards.numbers import same_number
from graft.types import Author, Turn
from graft_envs.hops.facts import AMOUNTS, LINKS, NUMBERS, Town, build_town
from graft_envs.hops.syntax import SYNTAXES, HopsSyntax

FACTORS = (11, 99)
SPARE = 3
"""Calls allowed beyond the searches of the longest question: the product, and two mistakes."""


class HopsQuestion(BaseEnv):
    """Person, relations to follow, factor, in one turn: 1.0 for the right number, else 0.0."""

    env_id = "hops"
    shared = ("town", "syntax")
    saved = (*BaseEnv.saved, "person", "relations", "factor")

    def __init__(self, syntax: HopsSyntax, hops: tuple[int, int], people: int, split: str) -> None:
        super().__init__()
        self.hops = hops
        self.split = check_split(split)
        self.syntax = syntax
        self.town: Town = build_town(people, syntax.is_short)
        self.person = ""
        self.relations: list[str] = []
        self.factor = 0

    def pose(self) -> str:
        rng = self.rng
        self.person = rng.choice(self.town.starts[self.split])
        self.relations = [rng.choice(LINKS) for _ in range(rng.randint(*self.hops) - 1)]
        self.relations.append(rng.choice(NUMBERS))
        self.factor = rng.randint(*FACTORS)
        found = self.person
        for relation in self.relations:
            found = self.town.facts[found, relation]
        self.answer = str(int(found) * self.factor)
        return self.syntax.question(self.person, self.relations, self.factor)

    def respond(self, action: str) -> Turn:
        number = self.syntax.read(action)
        is_right = number is not None and same_number(number, self.answer)
        return Turn(reward=float(is_right), terminated=True, info={"is_right": is_right})

    def describe(self) -> dict[str, object]:
        return {"person": self.person, "relations": list(self.relations), "factor": self.factor}

    def guess(self, rng: random.Random) -> str:
        """A product as likely as any other: right one time in thousands."""
        return str(rng.randint(*AMOUNTS) * rng.randint(*FACTORS))


class HopsTask(ToolEnv):
    """A `HopsQuestion`, search and python; see the top of this file.

    `hops` is the range of searches that a question takes: (2, 2), or (1, 3) for a mix. The person that
    a question begins with decides its split, so no test question begins with a person of training.
    `max_uses` limits the calls of both tools together; None allows three more than the longest
    question has hops. An invalid call is answered ("?;" in the compact syntax) and the episode goes on.
    """

    def __init__(
        self,
        *,
        syntax: str = "compact",
        hops: Sequence[int] = (2, 2),
        people: int = 2000,
        split: str = "train",
        max_uses: int | None = None,
    ) -> None:
        chosen: HopsSyntax = resolve(syntax, SYNTAXES, "question syntax")
        bounds = check_range("hops", hops, 1)
        super().__init__(
            HopsQuestion(chosen, bounds, people, split),
            chosen.tools(people),
            format=chosen.format,
            styles=chosen.styles,
            max_uses=bounds[1] + SPARE if max_uses is None else max_uses,
        )

    def step(self, action: str) -> Turn:
        """Adds the calls of each tool so far to info: "tools/search/calls"."""
        turn = super().step(action)
        # not counters=True, which also adds the previous episode: equal seeds would differ
        turn.info.update(self._totals())
        return turn

    @property
    def alphabet(self) -> str:
        """Every character of prompts, results and demonstrations; "" in the syntax "words"."""
        return self.env.syntax.alphabet

    def demonstrate(
        self,
        rng: random.Random,
        tool_rate: float = 0.8,
        stop_short: float = 0.7,
        wrong_query: float = 0.2,
    ) -> Trace:
        """A teacher that can solve the question and often does not.

        A share `tool_rate` of the traces call tools; the others guess at once. Of those that call, a
        share `stop_short` guesses after one of the results before the last, and a share `wrong_query`
        follows a wrong relation at one hop and continues from there. Imitating this gives a policy
        that is uncertain after every result: what is left to learn is to continue to the end, with the
        right queries.
        """
        inner: HopsQuestion = self.env
        syntax = inner.syntax
        relations = list(inner.relations)
        if rng.random() < wrong_query:
            hop = rng.randrange(len(relations))
            relations[hop] = rng.choice(others_like(relations[hop]))
        calls = len(relations) + 1
        if rng.random() >= tool_rate:
            calls = 0
        elif rng.random() < stop_short:
            calls = rng.randint(1, len(relations))
        is_whole = calls > len(relations)
        if self.max_uses is not None and calls > self.max_uses:
            calls, is_whole = self.max_uses, False

        trace: Trace = []
        found = inner.person
        for number in range(calls):
            if number < len(relations):
                tool, content = "search", syntax.search(found, relations[number])
                thought = f"I need the {relations[number]} of {found}."
                result = self.tools[tool](content)
                found = inner.town.facts[found, relations[number]]
            else:
                tool, content = "python", syntax.program(found, inner.factor)
                thought = f"Now {found} times {inner.factor}."
                # what the sandbox would print, without starting it
                result = found = str(int(found) * inner.factor)
            style = self.styles[tool]
            call = f"{style.open}{content}{style.close}"
            gap = syntax.gap if trace else ""
            trace.append((Author.POLICY, gap + syntax.step(thought, call)))
            trace.append((Author.ENV, style.render(result)))
        value = found if is_whole else inner.guess(rng)
        answer = syntax.step(f"The answer is {value}.", syntax.answer(value))
        return [*trace, (Author.POLICY, (syntax.gap if trace else "") + answer)]

    def sample_random_action(self) -> str:
        """A search, a product or an answer, each a third of the time."""
        inner: HopsQuestion = self.env
        rng, syntax = inner.action_rng(), inner.syntax
        if (kind := rng.randrange(3)) == 0:
            return syntax.answer(inner.guess(rng))
        name = rng.choice(inner.town.names)
        if kind == 1:
            tool, content = "search", syntax.search(name, rng.choice((*LINKS, *NUMBERS)))
        else:
            tool, content = "python", syntax.program(str(rng.randint(*AMOUNTS)), inner.factor)
        return f"{self.styles[tool].open}{content}{self.styles[tool].close}"


def others_like(relation: str) -> list[str]:
    """ "mentor" -> ["boss", "friend"]: the other relations of the same kind."""
    kind = LINKS if relation in LINKS else NUMBERS
    return [other for other in kind if other != relation]
