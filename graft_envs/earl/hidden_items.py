"""Put hidden items in order with as few comparisons and swaps as possible.

    sort, ascending    A, B hide 1, 0
    policy             <compare> A, B </compare>     env  <result> A > B </result>
    policy             <swap> A, B </swap>           env  <result> B, A </result>
    policy             Done.                         1 comparison, 1 swap: reward 1.0

Three tasks: "sort" (nothing is known), "order" (facts are given, only swaps are needed), "compare"
(state how two items relate). The order of the items when the policy stops is graded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from graft.envs.base import BaseEnv, Trace
from graft.registry import resolve
from graft.text.parse import first_answer
from graft.tools import ERROR
from graft.tools.sorting import (
    MAX_ECHO,
    PROPERTIES,
    SYNTAXES,
    TRANSITIONS,
    Hidden,
    SortingCall,
    SortingSyntax,
    carry_out,
    find_made,
    is_carried_out,
)
from graft.types import Author, Turn
from graft_envs.earl.efficiency import (
    least_swaps,
    order_efficiency,
    sort_by_comparing,
    sort_efficiency,
)


class HiddenItems(BaseEnv):
    """0.0 for a wrong order or answer, (1 + efficiency) / 2 for a right one.

    A subclass writes `pose`, which sets the instance: `kind`, `items`, `symbols`, `order`, `reverse`,
    `facts`, `pair` and `tools`.

    `syntax` is how calls are written: "tags" (`<compare> A, B </compare>`, answered with
    ` <result> A < B </result>`), "words" (`compare A and B`, answered with `: A < B`) or "actions" (a
    turn is a call iff it is a `CallText`; answered with `A < B`, and the actions write the rest). A turn
    that ends with a call is answered inline, any other ends the episode, and so does turn `max_turns`;
    every call counts in every syntax, also one that fails.
    """

    data_source = "sorting"
    observe_as = "inline"
    shared = ("syntax",)
    saved = (
        *BaseEnv.saved,
        "kind",
        "items",
        "symbols",
        "order",
        "reverse",
        "facts",
        "pair",
        "tools",
        "calls",
        "response",
    )

    def __init__(self, offered: Sequence[str], syntax: str, max_turns: int) -> None:
        super().__init__()
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be 1 or more")
        self.syntax: SortingSyntax = resolve(syntax, SYNTAXES, "call syntax")
        self.offered = tuple(offered)  # all of them work in every task
        self.stop = self.syntax.stops(self.offered)
        self.max_turns = max_turns
        self.kind = "sort"
        self.items: list[int] = []
        self.symbols: list[str] = []
        self.order: list[str] = []
        self.reverse = False
        self.facts: list[str] = []
        self.pair: list[str] = []
        self.tools: list[str] = []
        """The tools that the prompt explains."""
        self.calls = dict.fromkeys(TRANSITIONS, 0)
        self.response = ""

    def begin(self) -> None:
        """Start the episode of a new instance: nothing is called, the items stand as posed."""
        self.order = list(self.symbols)
        self.calls = dict.fromkeys(TRANSITIONS, 0)
        self.response = ""
        self.answer = self._relation() if self.kind == "compare" else self.target

    @property
    def action_tools(self) -> tuple[str, ...] | None:
        """Tools that are called by actions; None: calls are found in the text."""
        return self.offered if self.syntax.is_bare else None

    def respond(self, action: str) -> Turn:
        if self.kind == "compare":  # its answer may be anywhere in the response
            self.response += action
        call = self.syntax.find(action, self.offered) or find_made(action, self.offered)
        if call is None:
            score, details = self._score()
            return Turn(reward=score, terminated=True, info={**self._counts(), **details})
        is_ok, result = self._carry_out(call)
        self.calls[call.tool] = self.calls.get(call.tool, 0) + 1
        info = {"tool": call.tool, "tool_ok": is_ok, **self._counts()}
        text = self.syntax.render(call.tool, result)
        if self.turns + 1 != self.max_turns:
            return Turn(text, info=info)
        score, details = self._score()  # the last turn: graded as it is now
        return Turn(text, reward=score, truncated=True, info={**info, **details})

    def demonstrate(self, rng: random.Random) -> Trace:
        """The fewest comparisons that always suffice, then the fewest swaps: reward 1.0."""
        state = self.hidden
        trace: Trace = []

        def use(tool: str, a: str, b: str) -> str:
            nonlocal state
            state, result = carry_out(state, SortingCall(tool, (a, b)))
            lead = self.syntax.gap if trace else ""
            trace.append((Author.POLICY, self.syntax.write(tool, a, b, lead)))
            trace.append((Author.ENV, self.syntax.render(tool, result)))
            return result

        if self.kind == "compare":
            answer = use("compare", *self.pair)
            return [*trace, (Author.POLICY, f"{self.syntax.gap}<answer> {answer} </answer>")]
        if self.kind == "sort":
            found = sort_by_comparing(self.order, lambda a, b: use("compare", a, b)[2] == "<")
            target = found[::-1] if self.reverse else found
        else:
            target = self.target
        for place, symbol in enumerate(target):
            if state.order[place] != symbol:
                use("swap", state.order[place], symbol)
        return [*trace, (Author.POLICY, f"{self.syntax.gap}Done.")]

    def describe(self) -> dict[str, Any]:
        """What the original stores with a row, under its names."""
        return {
            "task": self.kind,
            "tools": list(self.tools),
            "items": self.items,
            "symbols": list(self.symbols),
            "reverse": self.reverse,
            "conditions": self.facts,
        }

    def row_columns(self) -> dict[str, Any]:
        """The original's columns for the current instance, except the prompt."""
        gold = self._relation() if self.kind == "compare" else ",".join(self.target)
        drawn = {
            **self.describe(),
            "conditions": [before(fact, self.reverse) for fact in self.facts],
        }
        return {
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {"task": self.kind, "interaction_kwargs": drawn},
        }

    def sample_random_action(self) -> str:
        """A call, or with probability 0.2 the end."""
        rng = self.action_rng()
        if rng.random() < 0.2:
            return f"<answer> {' < '.join(self.pair)} </answer>" if self.pair else "Done."
        tool = rng.choice(self.tools)
        a, b = rng.sample(self.order, 2)
        return self.syntax.write(tool, a, rng.choice(list(PROPERTIES)) if tool == "check" else b)

    @property
    def hidden(self) -> Hidden:
        return Hidden(tuple(self.items), tuple(self.order), tuple(self.symbols))

    @property
    def target(self) -> list[str]:
        """The symbols in the right order."""
        value_of = self.hidden.value_of
        return sorted(value_of, key=value_of.__getitem__, reverse=self.reverse)

    def _carry_out(self, call: SortingCall) -> tuple[bool, str]:
        """Whether the call was valid, and its result; applies it to the order."""
        if call.tool not in self.offered:  # an action file may have more tools
            known = ", ".join(self.offered)
            return False, f"{ERROR}there is no tool {call.tool[:MAX_ECHO]!r}; known: {known}"
        is_ok = is_carried_out(self.hidden, call)
        hidden, result = carry_out(self.hidden, call)
        self.order = list(hidden.order)
        return is_ok, result

    def _counts(self) -> dict[str, int]:
        return {
            **{
                f"tools/{tool}/calls": count
                for tool, count in self.calls.items()
                if tool in self.offered
            },
            "tool_uses": sum(self.calls.values()),
            "compares": self.calls["compare"],
            "swaps": self.calls["swap"],
        }

    def _score(self) -> tuple[float, dict[str, Any]]:
        n, compares, swaps = len(self.items), self.calls["compare"], self.calls["swap"]
        least = least_swaps(self.symbols, self.target)
        match self.kind:
            case "compare":
                answer = "".join((first_answer(self.response) or "").split())
                relations = self._relation(), self._relation(is_reversed=True)
                is_right = answer in [relation.replace(" ", "") for relation in relations]
                efficiency = float(sum(self.calls.values()) == 1)
            case "order":
                is_right = self.order == self.target
                efficiency = order_efficiency(n, swaps, least)
            case _:
                is_right = self.order == self.target
                efficiency = sort_efficiency(n, compares, swaps, least)
        details = {"is_right": is_right, "efficiency": efficiency}
        return (1.0 + efficiency) / 2 if is_right else 0.0, details

    def _relation(self, is_reversed: bool = False) -> str:
        """ "A < B" for the two symbols of the question, or "B > A"."""
        pair = self.pair[::-1] if is_reversed else self.pair
        return carry_out(self.hidden, SortingCall("compare", (pair[0], pair[1])))[1]


def before(fact: str, is_descending: bool) -> list[str]:
    """The two symbols of a fact in the order in which they have to stand: "A > B" -> ["B", "A"]."""
    left, sign, right = fact.split()
    return [left, right] if (sign == "<") != is_descending else [right, left]
