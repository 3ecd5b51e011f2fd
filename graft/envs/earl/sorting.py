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
from graft.envs.earl.efficiency import (
    least_swaps,
    order_efficiency,
    sort_by_comparing,
    sort_efficiency,
)
from graft.envs.earl.sorting_sets import (
    SETS,
    TASK_TOOLS,
    SortingSet,
    compare_question,
    draw_facts,
    sort_question,
    system_text,
)
from graft.envs.splits import check_split, split_of
from graft.protocols import Observation
from graft.registry import resolve
from graft.text.parse import last_tag
from graft.tools import ERROR
from graft.tools.sorting import (
    MAX_ECHO,
    PROPERTIES,
    SYMBOLS,
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

MAX_TRIES = 10_000  # draws until an instance has the wanted split


class Sorting(BaseEnv):
    """0.0 for a wrong order or answer, (1 + efficiency) / 2 for a right one.

    `syntax` is how calls are written: "tags" (`<compare> A, B </compare>`, answered with
    ` <result> A < B </result>`), "words" (`compare A and B`, answered with `: A < B`) or "actions" (a
    turn is a call iff it is a `CallText`; answered with `A < B`, and the actions write the rest). A turn
    that ends with a call is answered inline, any other ends the episode, and so does turn `max_turns`;
    every call counts in every syntax, also one that fails.

    `tools` overrides the tools of the task ("check" is in no set). `held_out=False` draws training
    and test instances from all instances, as the original does. `items=[2, 0, 1]` fixes the hidden
    values, whatever the seed and the split, and `reverse` the direction (True: descending).
    """

    env_id = "sorting"
    data_source = "sorting"
    observe_as = "inline"
    shared = ("sorting_set", "syntax")
    saved = (
        *BaseEnv.saved,
        "kind",
        "items",
        "order",
        "reverse",
        "facts",
        "pair",
        "calls",
        "response",
    )

    def __init__(
        self,
        *,
        name: str = "sort",
        syntax: str = "tags",
        tools: Sequence[str] | None = None,
        max_turns: int = 32,
        held_out: bool = True,
        items: Sequence[int] | None = None,
        reverse: bool | None = None,
        split: str = "train",
    ) -> None:
        super().__init__()
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be 1 or more")
        if items is not None and not 2 <= len(items) == len(set(items)) <= len(SYMBOLS):
            raise ValueError(
                f"items={items!r}: must be 2 to {len(SYMBOLS)} different whole numbers"
            )
        self.split = check_split(split)
        self.sorting_set: SortingSet = resolve(name, SETS, "sorting set")[split]
        self.syntax: SortingSyntax = resolve(syntax, SYNTAXES, "call syntax")
        needed = tuple(
            dict.fromkeys(tool for task in self.sorting_set.tasks for tool in TASK_TOOLS[task])
        )
        self.given_tools = None if tools is None else tuple(tools)
        self.offered = needed if tools is None else tuple(tools)  # all of them work in every task
        if set(needed) - set(self.offered) or set(self.offered) - set(TRANSITIONS):
            raise ValueError(
                f"tools={tools!r}: must be some of {', '.join(TRANSITIONS)}, and {name} cannot be "
                f"done without {', '.join(needed)}"
            )
        self.stop = self.syntax.stops(self.offered)
        self.max_turns = max_turns
        self.held_out = held_out
        self.given_items = None if items is None else list(items)
        self.given_reverse = reverse
        self.kind = "sort"
        self.items: list[int] = []
        self.order: list[str] = []
        self.reverse = False
        self.facts: list[str] = []
        self.pair: list[str] = []
        self.calls = dict.fromkeys(TRANSITIONS, 0)
        self.response = ""

    def pose(self) -> Observation:
        rng = self.rng
        self.kind = rng.choices(
            list(self.sorting_set.tasks), list(self.sorting_set.tasks.values())
        )[0]
        n = rng.choices(list(self.sorting_set.counts), list(self.sorting_set.counts.values()))[0]
        self.reverse = rng.random() < 0.5
        fixed = self.given_items
        if fixed is not None:
            n = len(fixed)
        if self.given_reverse is not None:
            self.reverse = self.given_reverse
        self.order = list(SYMBOLS[:n])
        self.calls = dict.fromkeys(TRANSITIONS, 0)
        self.response = ""
        for _ in range(MAX_TRIES):
            self.items = rng.sample(range(n), n) if fixed is None else [*fixed]
            self.facts = draw_facts(rng, self.items) if self.kind == "order" else []
            self.pair = rng.sample(self.order, 2) if self.kind == "compare" else []
            is_done = self.kind == "order" and self.order == self.target
            is_in_split = fixed is not None or not self.held_out or self._home() == self.split
            if is_in_split and not is_done:
                break
        else:
            if fixed is not None:
                raise ValueError(
                    f"items={fixed}, reverse={self.reverse}: in order already, and the task "
                    "'order' needs items that are not; give others"
                )
            raise ValueError(f"no {self.split} instance of {self.kind} with {n} items")
        if self.kind == "compare":
            self.answer, question = self._relation(), compare_question(self.order, self.pair)
        else:
            can_compare = "compare" in self.tools
            question = sort_question(self.order, self.facts, self.reverse, can_compare)
            self.answer = self.target
        return [
            {"role": "system", "content": system_text(self.tools, self.syntax)},
            {"role": "user", "content": question},
        ]

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
            "symbols": list(SYMBOLS[: len(self.items)]),
            "reverse": self.reverse,
            "conditions": self.facts,
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
    def tools(self) -> tuple[str, ...]:
        """The tools that the prompt explains."""
        return self.given_tools or TASK_TOOLS[self.kind]

    @property
    def hidden(self) -> Hidden:
        return Hidden(tuple(self.items), tuple(self.order))

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

    def _home(self) -> str:
        """The split of this instance, decided where possible by what the policy sees.

        Two items make too few instances for a hash: training names them in the order A, B and test
        in the order B, A. With two or three items to sort the prompt is always the same, and holding
        out some of the hidden orders would teach that they cannot occur; no test set has so few items.
        """
        if pair := self.pair or (self.facts[0].split()[::2] if len(self.facts) == 1 else []):
            return "test" if pair[0] > pair[1] else "train"
        if self.kind == "sort" and len(self.items) < 4:
            return "train"
        return split_of(f"{self.kind} {self.facts or self.items} {self.reverse}")

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
        least = least_swaps(SYMBOLS[:n], self.target)
        match self.kind:
            case "compare":
                answer = "".join((last_tag(self.response, "answer") or "").split())
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
