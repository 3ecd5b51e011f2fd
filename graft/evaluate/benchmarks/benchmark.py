"""One benchmark: everything but the model that its score depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.data.hub import locate
from graft.envs.wrappers import listed_wrappers
from graft.evaluate.task_set import TaskSet

QUESTIONS = "graft.evaluate.benchmarks.questions:BenchmarkQuestions"
SYSTEM = "graft.evaluate.benchmarks.prompt:SystemPrompt"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Rows, prompt, tools and scorer under one name.

    BENCHMARKS["gsm8k"].task_set("data/gsm8k")     the split "test" of data/gsm8k/main
    """

    name: str
    title: str
    hub: str
    """The dataset of the hub that its rows are in; empty: they come with a package."""
    split: str
    question_key: str
    """The column; names separated by | are tried in order."""
    answer_key: str
    reward: str | dict[str, Any]
    """The reward, as in task.reward; empty: the environment's own."""
    published: str
    """How the published numbers were measured."""
    rows: int | None = None
    """The published number of rows; None if not known."""
    hub_rows: int | None = None
    """The number of rows of the hub's dataset, if it differs."""
    part: str = ""
    """The file or folder within the dataset, where it has several."""
    env: str = QUESTIONS
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the environment."""
    wrappers: Sequence[str | dict[str, Any]] = ()
    unconfirmed: str = ""
    """What was not checked against the dataset itself."""

    @property
    def scorer(self) -> str:
        """The name of the reward."""
        return self.reward if isinstance(self.reward, str) else next(iter(self.reward))

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools: ("python", "search")."""
        return tools_of(self.wrappers)

    def task_set(self, data: str | None = None) -> TaskSet:
        """The task set; `data` is a file, a folder or a dataset in place of the hub's."""
        where = self._part_of(data)
        rows = {} if where is None else {"data": where}
        if self.env == QUESTIONS:  # other environments have their own rows
            rows |= {
                "hub": self.hub,
                "hub_split": self.split,
                "question_key": self.question_key,
                "answer_key": self.answer_key,
            }
        return TaskSet(
            self.name,
            self.env,
            {**rows, **self.args},
            self.wrappers,
            self.reward,
            is_whole=True,
            shows_answers=SYSTEM in self.wrappers,
        )

    def _part_of(self, data: str | None) -> str | None:
        """The file or folder of the benchmark within a copy of the whole dataset; else `data` as it is."""
        if not self.part:
            return data
        root = locate(self.hub) if data is None else Path(data).expanduser()
        is_here = root is not None and (root / self.part).exists()
        return str(root / self.part) if root is not None and is_here else data


def tools_of(wrappers: Sequence[str | dict[str, Any]]) -> tuple[str, ...]:
    """Names of the tools that wrappers add: ("python", "search")."""
    found: list[str] = []
    for name, options in listed_wrappers(wrappers):
        if name == "tools":
            names = (one if isinstance(one, str) else next(iter(one)) for one in options["use"])
            found += (
                "search" if one == "browse" else one for one in names
            )  # in the tags of search
        elif isinstance(name, str) and "_tool" in name:
            found.append(name.partition("_tool")[0])
    return tuple(found)


def with_tool_options(
    wrappers: Sequence[str | dict[str, Any]], tool: str, options: Mapping[str, Any]
) -> list[str | dict[str, Any]]:
    """The wrappers with further options of one tool; a search with a `summariser` reads its pages.

    search, {"topk": 3}    [{"tools": {"use": [{"search": {"topk": 10, ...}}], ...}}] has topk 3 then
    """
    changed: list[str | dict[str, Any]] = []
    for one in wrappers:
        if isinstance(one, dict) and "tools" in one and tools_of([one]) == (tool,):
            [(name, before)] = one["tools"]["use"][0].items()
            name = "browse" if name == "search" and "summariser" in options else name
            one = {"tools": {**one["tools"], "use": [{name: {**before, **options}}]}}
        changed.append(one)
    return changed
