r"""Grade-school word problems with large numbers, from a file.

EARL trains on GSM8K questions rewritten so that mental arithmetic fails. How they were rewritten is
not public, so the rows have to be brought along; one line of such a file:

    {"question_rewrite": "Ann has 48210 clips ...", "answer": "48210/2 = ...\n#### 72315",
     "extra_info": {"rewrite_tag": "yes"}}

Plain GSM8K rows (`question`, `answer`) are read too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from graft.data.hub import locate
from graft.data.rows import DataError
from graft.data.tables import Table, data_files, read_table
from graft.envs.base import BaseEnv, Trace, check_split, split_of
from graft.envs.wording import marked_number
from graft.rewards.answers import last_marked, parse_number, same_number
from graft.types import Author, Turn

DATA = "gsm_8k_rewrite"


class Problem(NamedTuple):
    question: str
    solution: str
    answer: str


class GsmRewrite(BaseEnv):
    """One turn: 1.0 if the number after the last "####" is the problem's, else 0.0.

    `data` is a file, then one question in ten is a test question; or a folder in which the files
    train and test hold the splits. Rows with a `rewrite_tag` other than "yes" are passed over.
    """

    env_id = "gsm"
    shared = ("problems",)
    saved = (*BaseEnv.saved, "index")

    def __init__(self, *, data: str | None = None, split: str = "train") -> None:
        super().__init__()
        self.split = check_split(split)
        self.problems = open_problems(data, split)
        self.index = 0

    def pose(self) -> str:
        self.index = self.rng.randrange(len(self.problems))
        self.answer = self.problem.answer
        return f"{self.problem.question}\nWrite the final answer after ####, for example: #### 42"

    def respond(self, action: str) -> Turn:
        is_right = same_number(marked_number(action) or "", self.answer)
        return Turn(reward=float(is_right), terminated=True, info={"is_right": is_right})

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, self.problem.solution)]

    def describe(self) -> dict[str, Any]:
        return {"index": self.index}

    def sample_random_action(self) -> str:
        return f"#### {self.whim().randint(1, 10**6)}"

    @property
    def problem(self) -> Problem:
        return self.problems[self.index]


def open_problems(data: str | None, split: str) -> tuple[Problem, ...]:
    """The problems of one split, from what the user named or from the folder of local data."""
    place = locate(DATA) if data is None else Path(data).expanduser()
    if place is None:
        raise DataError(
            f"the rewritten GSM8K questions ({DATA}) are not on this machine and nowhere to be "
            'downloaded; name your copy: make("earl:calc-gsm8k", data="path/to/rows.jsonl"), a jsonl '
            "or parquet file with question_rewrite and answer, or with question and answer (a folder "
            f"{DATA} under $GRAFT_DATA is found without data=)"
        )
    names = list(data_files(place)) if place.is_dir() else []
    is_split = len(names) > 1 or names == ["test"]
    table = read_table(place, split if is_split else None)
    chosen = _chosen(table, None if is_split else split)
    if not chosen:
        raise DataError(
            f"{table.source}, {len(table)} rows, has no problem for split={split!r}; one in ten is a "
            "test problem: use a larger file, or a folder with train.jsonl and test.jsonl"
        )
    return chosen


@lru_cache(maxsize=8)  # a vector of envs reads the rows once
def _chosen(table: Table, split: str | None) -> tuple[Problem, ...]:
    """The problems of a split; all of them with None."""
    return tuple(p for p in _problems(table) if split is None or split_of(p.question) == split)


def _problems(table: Table) -> Iterator[Problem]:
    for number, row in enumerate(table, 1):
        extra = row.get("extra_info")
        columns = {**extra, **row} if isinstance(extra, Mapping) else dict(row)
        if columns.get("rewrite_tag") not in (None, "yes"):  # parquet writes None for an absent one
            continue
        question = columns.get("question_rewrite") or columns.get("question")
        solution = columns.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise DataError(
                f"{table.source}, row {number}: needs the texts question_rewrite (or question) and "
                f"answer; found: {', '.join(map(str, columns))}"
            )
        answer = (last_marked(solution) or "").replace(",", "")
        if parse_number(answer) is None:
            raise DataError(
                f"{table.source}, row {number}: the answer must end with '#### ' and a number, "
                f"not {solution[-40:]!r}"
            )
        yield Problem(question.strip(), solution.strip(), answer)
