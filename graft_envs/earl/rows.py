"""Tasks from the files that EARL's own scripts write, with the tools that their prompts explain.

    make("earl:rows", data="data/arithmetic_earl_lang2", split="test", syntax="actions")

reads data/arithmetic_earl_lang2/test.parquet. Prompts are those of the rows, the assistant's begun answer
included. Rows of `calc_bench`, `countdown` and `basic_calculator_tutorial` get the calculator and are graded
by `graft.rewards.sources`; rows of `sorting` get the tools for hidden items. Folders named "_earl" explain
calls by actions, those named "_baseline" calls in tags: `syntax` must be that of the file.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from graft.data.check import SPARED, check
from graft.data.errors import DataError
from graft.data.fields import value_at
from graft.data.layouts import LAYOUTS
from graft.data.readers import is_sorting
from graft.data.tables import RowTable
from graft.envs.arithmetic import value_of
from graft.envs.calculator import CalculatorSyntax
from graft.envs.dataset.base import DataPlaces, open_table
from graft.envs.dataset.prompts import PromptsEnv
from graft.protocols import Observation
from graft.registry import resolve
from graft.rewards.sources import SOURCES
from graft.tools.sorting import TRANSITIONS
from graft_envs.earl.calc import MAX_USES
from graft_envs.earl.calc_chat import GradedResponse
from graft_envs.earl.hidden_items import HiddenItems
from graft_envs.earl.syntax import SYNTAXES

SAMPLE_ROWS = 20  # rows whose prompts are compared with the syntax
EXPLAINED = {
    "tags": ("<calculator>", "<compare>", "<swap>"),
    "actions": ("calculate (12 + 6) / 3 = 6", "compare A and B", "swap A and B"),
}
"""What a prompt contains that explains calls in each syntax."""


def earl_rows(
    *,
    data: DataPlaces = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    hub: str | None = None,
    split: str | None = None,
    syntax: str = "tags",
    tool: bool = True,
    max_uses: int | None = MAX_USES,
    max_turns: int = 32,
    skip_bad: bool | float = SPARED,
) -> CalcRows | SortingRows:
    """Rows of a file, or of a folder with train.parquet and test.parquet: `split`, by default train.

    `tool`, `max_uses` are the calculator's, `max_turns` limits the calls that sort.
    """
    table, divided = open_table(data, rows, hub, split, "train", check=False)
    sample = [
        row for row in itertools.islice(table.scan(), SAMPLE_ROWS) if isinstance(row, Mapping)
    ]
    if not sample:
        raise DataError(f"{table.source} is empty: it has no rows")
    if any(divided):
        check_split_of(sample, table.source, split)
    if is_sorting(sample[0]):
        check_syntax(sample, table.source, syntax)
        env = SortingRows(table, syntax, max_turns, skip_bad)
    else:
        source = str(sample[0].get("data_source"))
        if source not in SOURCES:
            raise DataError(
                f"{table.source}: its data_source is {source!r}; earl:rows reads {', '.join(SOURCES)} and "
                "sorting. Other rows: task.env=prompts"
            )
        if tool:
            check_syntax(sample, table.source, syntax)
        chosen = resolve(syntax, SYNTAXES, "call syntax")
        prompts = PromptsEnv(
            data=data,
            rows=rows,
            hub=hub,
            hub_split="train",
            split=None if any(divided) else split,
            skip_bad=skip_bad,
        )
        env = CalcRows(prompts, tool, chosen, max_uses)
    env.unwrapped.split = split or "train"
    return env


def check_split_of(sample: Sequence[Mapping[str, Any]], source: str, split: str | None) -> None:
    """Refuse a single file whose rows have another split: part of them would be in both."""
    found = {str(value_at(row, "extra_info.split")) for row in sample}
    if found != {split}:
        raise DataError(
            f"{source}: extra_info.split of its rows is {', '.join(sorted(found))}, not {split}; give the "
            "file of that split (in a recipe task.eval_args.data=.../test.parquet), the folder with both, or "
            "leave split out"
        )


def check_syntax(sample: Sequence[Mapping[str, Any]], source: str, syntax: str) -> None:
    """Refuse a syntax of calls if the prompts explain the other one."""
    texts = [str(row.get("prompt")) for row in sample]
    shown = [
        name
        for name, marks in EXPLAINED.items()
        if any(mark in text for text in texts for mark in marks)
    ]
    if len(shown) == 1 and (syntax == "tags") != (shown == ["tags"]):
        raise DataError(
            f"{source}: its prompts explain calls in the syntax {shown[0]!r}, not {syntax!r}; "
            f"set task.args.syntax={shown[0]} and an actions.file of that kind, or give the other file "
            "(EARL names them _earl for actions and _baseline for tags)"
        )


class CalcRows(GradedResponse):
    """A row with a calculator; the rule of its `data_source` grades the whole response."""

    env: PromptsEnv

    def __init__(
        self, env: PromptsEnv, tool: bool, syntax: CalculatorSyntax, max_uses: int | None
    ) -> None:
        super().__init__(env, tool, syntax, max_uses)

    def calculations(self, rng: random.Random, tries: int) -> list[str]:
        """The row's expression, where it is one; `tries` needs generated tasks."""
        return [self._expression] if value_of(self._expression) is not None else []

    @property
    def given_numbers(self) -> list[int]:
        is_countdown = self.env.data_source.startswith("countdown")
        if not is_countdown and self.env.meta.get("task") != "countdown":
            return []
        given = self.env.meta.get("nums") or re.findall(r"\d+", self._expression)
        return [int(number) for number in given]

    @property
    def _expression(self) -> str:
        return str(self.env.meta.get("expr", "")).partition("\n####")[0].strip()


class SortingRows(HiddenItems):
    """A row of hidden items."""

    env_id = "sorting-rows"
    shared = (*HiddenItems.shared, "table", "numbers")
    blocking = True

    def __init__(
        self, table: RowTable, syntax: str, max_turns: int, skip_bad: bool | float
    ) -> None:
        super().__init__(tuple(TRANSITIONS), syntax, max_turns)
        self.table = table
        verdict = check(table, LAYOUT, "task", skip_bad)
        self.numbers: Sequence[int] = verdict.good(range(len(table)))
        if not self.numbers:
            raise DataError(f"{table.source} has no good row")

    def pose(self) -> Observation:
        assert LAYOUT.task is not None
        task = LAYOUT.task(self.table[self.numbers[self.seed % len(self.numbers)]])
        drawn = task.meta["interaction_kwargs"]
        self.kind = drawn["task"]
        self.items, self.symbols, self.tools = drawn["items"], drawn["symbols"], drawn["tools"]
        self.reverse = bool(drawn.get("reverse"))
        signs = (">", "<") if self.reverse else ("<", ">")
        self.facts = [f"{a} {signs[0]} {b}" for a, b in drawn.get("conditions", [])]
        self.pair = list(self.symbols) if self.kind == "compare" else []
        self.begin()
        return task.messages


LAYOUT = LAYOUTS["earl-sorting"]
