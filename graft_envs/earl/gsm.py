r"""Grade-school word problems with large numbers, from a file.

EARL trains on GSM8K questions rewritten so that mental arithmetic fails. The rewritten questions are
not public, so the user provides the rows; one line of such a file:

    {"extra_info": {"question_rewrite": "Ann has 48210 clips ...",
                    "answer_rewrite": "48210/2 = ...\n#### 72315", "rewrite_tag": "yes",
                    "question": "Ann has 48 clips ...", "answer": "48/2 = ...\n#### 72"}}

The columns may also be at the top level. Of such a file only rows with the tag "yes" are used, as in the
original. A file of plain GSM8K rows (`question`, `answer`) works too.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from graft.data.errors import DataError
from graft.data.fields import as_object, without_none
from graft.data.hub import locate
from graft.data.tables import RowTable
from graft.envs.base import BaseEnv, Trace
from graft.envs.dataset.base import open_table
from graft.envs.splits import check_split, split_of
from graft.rewards.answers import last_marked
from graft.rewards.numbers import parse_number
from graft.types import Author
from graft_envs.earl.marked import MarkedNumber

log = logging.getLogger(__name__)

DATA = "gsm_8k_rewrite"


class Problem(NamedTuple):
    question: str
    solution: str
    answer: str


class GsmRewrite(MarkedNumber):
    """The answer is the problem's.

    `data` is a file, of which one question in ten is a test question, or a folder with the files train
    and test. Of a file with rewritten questions, rows without `rewrite_tag` "yes" are skipped, and the
    answer is `answer_rewrite`: `answer` belongs to the question before rewriting.
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

    @property
    def expression(self) -> str:
        """The working, without the answer."""
        return self.problem.solution.rpartition("####")[0].rstrip()

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, self.problem.solution)]

    def describe(self) -> dict[str, Any]:
        return {"index": self.index}

    def sample_random_action(self) -> str:
        return f"#### {self.action_rng().randint(1, 10**6)}"

    @property
    def problem(self) -> Problem:
        return self.problems[self.index]


def open_problems(data: str | None, split: str) -> tuple[Problem, ...]:
    """The problems of one split, from `data` or from the folder of local data."""
    place = data or locate(DATA)
    if place is None:
        raise DataError(
            f"the rewritten GSM8K questions ({DATA}) are not on this machine and cannot be "
            'downloaded; give your copy: make("earl:calc-gsm8k", data="path/to/rows.jsonl"), a jsonl '
            "or parquet file with question_rewrite, answer_rewrite and rewrite_tag, or with question and "
            "answer (a folder "
            f"{DATA} under $GRAFT_DATA is found without data=)"
        )
    table, divided = open_table(str(place), None, None, split, None)
    chosen = _chosen(table, split if any(divided) else None)
    if not chosen:
        raise DataError(
            f"{table.source}, {len(table)} rows, has no problem for split={split!r}; one in ten is a "
            "test problem: use a larger file, or a folder with train.jsonl and test.jsonl"
        )
    return chosen


@lru_cache(maxsize=8)  # a vector of envs reads the rows once
def _chosen(table: RowTable, split: str | None) -> tuple[Problem, ...]:
    """The problems of a split; all of them with None."""
    return tuple(p for p in _problems(table) if split is None or split_of(p.question) == split)


def _problems(table: RowTable) -> Iterator[Problem]:
    marks = {"question_rewrite", "answer_rewrite", "rewrite_tag"}
    is_rewritten = any(_columns(row).keys() & marks for row in table)
    suffix = "_rewrite" if is_rewritten else ""
    question_key, answer_key = f"question{suffix}", f"answer{suffix}"
    num_skipped = 0
    for number, row in enumerate(table, 1):
        columns = _columns(row)
        if is_rewritten and columns.get("rewrite_tag") != "yes":
            num_skipped += 1
            continue
        question, solution = columns.get(question_key), columns.get(answer_key)
        if not isinstance(question, str) or not isinstance(solution, str):
            raise DataError(
                f"{table.source}, row {number}: needs the texts {question_key} and {answer_key}; found: "
                f"{', '.join(map(str, columns))}"
            )
        answer = (last_marked(solution) or "").replace(",", "")
        if parse_number(answer) is None:
            raise DataError(
                f"{table.source}, row {number}: {answer_key} must end with '#### ' and a number, not "
                f"{solution[-40:]!r}"
            )
        yield Problem(question.strip(), solution.strip(), answer)
    if num_skipped:
        log.warning(
            "%s: %s of %s rows are skipped because their rewrite_tag is not 'yes'",
            table.source,
            f"{num_skipped:,}",
            f"{len(table):,}",
        )


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row and of its `extra_info` that hold something."""
    extra = as_object(row.get("extra_info"))
    return without_none({**extra, **row} if isinstance(extra, Mapping) else row)
