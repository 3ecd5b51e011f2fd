"""EARL's sorting tasks, drawn: `earl:sort`, `earl:order`, ...; `hidden_items.py` plays them."""

from __future__ import annotations

from collections.abc import Sequence

from graft.envs.splits import check_split, split_of
from graft.protocols import Observation
from graft.registry import resolve
from graft.tools.sorting import SYMBOLS, TRANSITIONS
from graft_envs.earl.hidden_items import HiddenItems
from graft_envs.earl.sorting_sets import (
    SETS,
    TASK_TOOLS,
    SortingSet,
    compare_question,
    draw_facts,
    sort_question,
    system_text,
)

MAX_TRIES = 10_000  # draws until an instance has the wanted split


class Sorting(HiddenItems):
    """An instance of one of EARL's sets.

    `tools` overrides the tools of the task ("check" is in no set). `held_out=False` draws training
    and test instances from all instances, as the original does. `items=[2, 0, 1]` fixes the hidden
    values, whatever the seed and the split, and `reverse` the direction (True: descending).
    """

    env_id = "sorting"
    shared = (*HiddenItems.shared, "sorting_set")

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
        if items is not None and not 2 <= len(items) == len(set(items)) <= len(SYMBOLS):
            raise ValueError(
                f"items={items!r}: must be 2 to {len(SYMBOLS)} different whole numbers"
            )
        chosen: SortingSet = resolve(name, SETS, "sorting set")[check_split(split)]
        needed = tuple(dict.fromkeys(tool for task in chosen.tasks for tool in TASK_TOOLS[task]))
        offered = needed if tools is None else tuple(tools)
        if set(needed) - set(offered) or set(offered) - set(TRANSITIONS):
            raise ValueError(
                f"tools={tools!r}: must be some of {', '.join(TRANSITIONS)}, and {name} cannot be "
                f"done without {', '.join(needed)}"
            )
        super().__init__(offered, syntax, max_turns)
        self.split = split
        self.sorting_set = chosen
        self.given_tools = None if tools is None else list(tools)
        self.held_out = held_out
        self.given_items = None if items is None else list(items)
        self.given_reverse = reverse

    def pose(self) -> Observation:
        rng = self.rng
        self.kind = rng.choices(
            list(self.sorting_set.tasks), list(self.sorting_set.tasks.values())
        )[0]
        n = rng.choices(list(self.sorting_set.counts), list(self.sorting_set.counts.values()))[0]
        self.reverse = rng.random() < 0.5
        fixed = self.given_items
        n = 2 if self.kind == "compare" else n
        n = n if fixed is None else len(fixed)
        if self.given_reverse is not None:
            self.reverse = self.given_reverse
        self.tools = list(self.given_tools or TASK_TOOLS[self.kind])
        for _ in range(MAX_TRIES):
            self.items = rng.sample(range(n), n) if fixed is None else [*fixed]
            self.symbols = list(SYMBOLS[:n])
            if self.kind == "compare" and fixed is None:  # any two letters, as in the original
                self.symbols = rng.sample(SYMBOLS, n)
            self.facts = draw_facts(rng, self.items) if self.kind == "order" else []
            self.pair = rng.sample(self.symbols, 2) if self.kind == "compare" else []
            self.begin()
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
        question = (
            compare_question(self.order, self.pair)
            if self.kind == "compare"
            else sort_question(self.order, self.facts, self.reverse, "compare" in self.tools)
        )
        return [
            {"role": "system", "content": system_text(self.tools, self.syntax)},
            {"role": "user", "content": question},
        ]

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
