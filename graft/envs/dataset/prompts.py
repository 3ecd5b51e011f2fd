r"""Your own prompts, in the column layouts of verl, EasyRL, TRL and others.

{"data_source": "hotpotqa", "ability": "qa",
 "prompt": [{"role": "system", "content": "Search where you must."},
            {"role": "user", "content": "Where is the Louvre?"}],
 "reward_model": {"ground_truth": ["Paris"], "style": "rule"},
 "extra_info": {"index": 7, "split": "train"}}

    observation   both messages, unchanged
    task          answer ["Paris"], data_source "hotpotqa", meta {"ability": "qa", "index": 7, ...}
    the policy    "<think>...</think><answer>\boxed{paris}</answer>"  ->  1.0
"""

from __future__ import annotations

import math
import random
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from graft.data.check import SPARED, Verdict, check
from graft.data.errors import BadField, DataError
from graft.data.fields import named_tools, parse_literal
from graft.data.layouts import RowLayout, by_keys, detect_layout
from graft.data.tables import RowTable
from graft.envs.base import Trace
from graft.envs.dataset.base import DataPlaces, DatasetEnv, open_table
from graft.protocols import Observation
from graft.rewards.answers import (
    accepted_answers,
    countdown_score,
    last_answer,
    same_text,
    text_of_content,
    word_f1,
)
from graft.rewards.maths.grading import grade
from graft.rewards.sources import grade_by_source
from graft.text.parse import last_boxed
from graft.types import Author, Turn

_FORMULA = re.compile(r"[0-9\\^=+*/<>]")
"""Characters of formulas: words are not compared as products, or "evil" would equal "live"."""

VERL = ("prompt", "reward_model.ground_truth")


class PromptsEnv(DatasetEnv):
    r"""One answer to a chat: 1.0 if it is one of the golds, as words or as mathematics, else 0.0.

    gold ["0.5"]      "<answer>\boxed{\frac{1}{2}}</answer>"   ->  1.0
    gold ["Paris"]    "#### the Paris!"                        ->  1.0

    What counts is the last <answer>, else the last box, else what follows ####, else the whole text;
    a box inside <answer> is opened. info["f1"] is how far the words overlap with the nearest gold.

    Numbers and a target are graded as countdown, rows of EARL's sources by EARL's rules
    (`graft.rewards.sources`). A row without an answer earns 0.0 here; a recipe's reward grades it.

    The layout is recognised from the first rows (`graft.data.layouts`), or given: `layout="verl"`. For
    other columns give `prompt_key` (a list of {role, content}, or a text) and `answer_key` (a text, a
    number, a list of them, or {"target": any of these}); a dot reaches into a column. All rows are checked
    when the first env is built: bad ones are left out up to the share `skip_bad` (1%); more of them, or
    any with skip_bad=False, are an error.

    `template` is a user message in place of the row's prompt, with columns in braces ("Combine {nums} into
    {target}."); `system` a system message in place of the row's.
    """

    checks_rows = True
    shared = (*DatasetEnv.shared, "meta", "tools", "layouts")

    question = ""
    """Of the row, for `grade`; a subclass that asks in its own words may leave it out."""

    def __init__(
        self,
        *,
        data: DataPlaces = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        hub: str | None = None,
        hub_split: str | None = None,
        split: str | None = None,
        layout: str = "auto",
        prompt_key: str | None = None,
        answer_key: str | None = None,
        template: str = "",
        system: str = "",
        skip_bad: bool | float = SPARED,
        evaluation: bool = False,
        timeout: float = 1.0,
    ) -> None:
        if not 0 < timeout < math.inf:
            raise ValueError(f"{timeout=}: must be above 0, the seconds that a grade may take")
        self.timeout, self.template, self.system = timeout, template, system
        self.meta: Mapping[str, Any] = {}
        self.tools: list[dict[str, Any]] | None = None
        self.tool_names: list[str] = []
        """Tools of the run that the current row lists."""
        table, _ = open_table(data, rows, hub, split, hub_split, check=False)  # reads a file once
        keys = prompt_key, answer_key
        self.layouts = [layout_of(part, layout, *keys) for part in table.parts]
        """Of each file."""
        super().__init__(
            data=data,
            rows=rows,
            hub=hub,
            hub_split=hub_split,
            split=split,
            question_key=[
                question_column(part, one)
                for part, one in zip(table.parts, self.layouts, strict=True)
            ],
            evaluation=evaluation,
        )
        unanswered = 0
        for index, (part, one) in enumerate(zip(table.parts, self.layouts, strict=True)):
            verdict = check(part, one, "task", skip_bad)
            self.numbers = good_rows(self.table, index, verdict, self.numbers)
            unanswered += verdict.unanswered
        self.ungraded = unanswered / len(table)
        """Share of the rows that have no answer."""
        if not self.numbers:
            raise DataError(f"{self.table.source} has no good row for split={self.split!r}")
        if template and not placeholders(template, table):
            raise ValueError(
                f"template={template[:80]!r} names no column in braces; the rows have "
                f"{', '.join(table.columns)}"
            )

    @property
    def layout(self) -> RowLayout:
        """The layout of the current row's file."""
        return self.layouts[self.place[0]]

    def reset(
        self, seed: int | None = None, idx: int | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        prompt, info = super().reset(seed, idx)
        # a recipe's reward may grade by the source of a row; verl's rewards do
        source = self.data_source or info.get("data_source", "")
        info |= {"data_source": source, "meta": self.describe()}
        if self.tool_names:
            info["tool_names"] = self.tool_names
        return prompt, {**info, "tools": self.tools} if self.tools else info

    def attempts_at(self, idx: int) -> int:
        """The attempts that row `idx` asks for in an evaluation (EasyRL's extra_info["pass@k"]), else 1."""
        number = self.numbers[idx]
        read = self.layouts[self.table.part_of(number)[0]].task
        assert read is not None, "recognised as tasks"
        return read(self.table[number]).meta.get("pass@k", 1)

    def ask(self, row: Mapping[str, Any]) -> Observation:
        assert self.layout.task is not None, "recognised as tasks"
        try:
            task = self.layout.task(row)
        except BadField as error:
            raise DataError(f"{self.where}: {error}") from error
        self.answer, self.data_source = task.answer, task.data_source
        self.meta, self.tools, self.tool_names = task.meta, task.tools, named_tools(row)
        messages = task.messages
        if self.template:
            messages = [{"role": "user", "content": self._filled(row)}]
        if self.system:
            others = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": self.system}, *others]
        asked = [message["content"] for message in messages if message["role"] == "user"]
        self.question = text_of_content(asked[-1]) if asked else ""
        return messages

    def _filled(self, row: Mapping[str, Any]) -> str:
        """The template with the columns of a row, in which braces are text."""
        names = placeholders(self.template, self.table)
        if lacking := [name for name in names if name not in row]:
            raise DataError(f"{self.where} has no column {lacking[0]!r}, which template= names")
        pattern = "|".join(re.escape(f"{{{name}}}") for name in names)
        return re.sub(pattern, lambda found: str(row[found[0][1:-1]]), self.template)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self.meta}

    def respond(self, action: str) -> Turn:
        if self.answer is None:
            return Turn(reward=0.0, terminated=True, info={"is_graded": False})
        ruled = grade_by_source(self.data_source, action, self.answer, self.meta)
        if ruled is not None:
            return Turn(reward=ruled, terminated=True, info={"correct": ruled == 1.0})
        if isinstance(self.answer, Mapping):
            given, target = self.answer["numbers"], self.answer["target"]
            score = countdown_score(opened(action), given, target)
            return Turn(reward=score, terminated=True, info={"correct": score == 1.0})
        answer, golds = opened(action), [opened(gold) for gold in golds_of(self.answer)]
        info = {
            "correct": self._is_right(answer, golds),
            "has_answer": answer != action.strip(),
            "f1": max(word_f1(answer, gold) for gold in golds),
        }
        return Turn(reward=float(info["correct"]), terminated=True, info=info)

    def _is_right(self, answer: str, golds: list[str]) -> bool:
        if any(same_text(answer, gold) for gold in golds):
            return True
        formulas = [gold for gold in golds if _FORMULA.search(gold)]
        return grade(answer, formulas, question=self.question, timeout=self.timeout)

    def demonstrate(self, rng: random.Random) -> Trace:
        if self.answer is None or isinstance(self.answer, Mapping):
            raise DataError(
                f"{self.where}: {self.layout.name} rows have no text answer for a teacher to "
                "write; warm up from recorded chats (sft.data)"
            )
        gold = accepted_answers(self.answer)[0]
        solution = self.meta.get("expr", gold)
        tries = (f"#### {gold}", f"#### {solution}", f"<answer> {solution} </answer>")
        ruled = {t: grade_by_source(self.data_source, t, self.answer, self.meta) for t in tries}
        if None in ruled.values():  # graded like any other row
            return [(Author.POLICY, written(opened(gold)))]
        if right := [text for text, score in ruled.items() if score == 1.0]:
            return [(Author.POLICY, right[0])]
        raise DataError(f"{self.where}: the row has no solution for a teacher to write")

    def sample_random_action(self) -> str:
        rng = self.action_rng()
        return written(rng.choice(("Paris", "yes", "no", str(rng.randint(0, 100)))))


def placeholders(template: str, table: RowTable) -> list[str]:
    """The columns that a template names in braces; other braces are text."""
    return [name for name in table.columns if f"{{{name}}}" in template]


def golds_of(answer: Any) -> list[str]:
    """The texts that are right; of a gold that is a list of texts (csv), also each of them.

    >>> golds_of('["Paris", "Paris, France"]')
    ['["Paris", "Paris, France"]', 'Paris', 'Paris, France']
    """
    found: list[str] = []
    for gold in accepted_answers(answer):
        several = parse_literal(gold) if gold.startswith(('["', "['")) else []
        are_texts = isinstance(several, list) and all(isinstance(one, str) for one in several)
        found += [gold, *(several if are_texts else [])]
    return found


def written(answer: str) -> str:
    return f"<think>The answer is {answer}.</think><answer>\\boxed{{{answer}}}</answer>"


def opened(text: str) -> str:
    r"""The last answer, without its box: "<answer>It is \boxed{7}.</answer>" -> "7"."""
    answer = last_answer(text)
    box = last_boxed(answer)
    return (answer if box is None else box).strip()


def layout_of(
    table: RowTable, layout: str, prompt_key: str | None, answer_key: str | None
) -> RowLayout:
    """The layout of a file: recognised, or of the columns that the user names."""
    if not len(table):
        raise DataError(f"{table.source} is empty: it has no rows")
    if prompt_key is None and answer_key is None:
        found = detect_layout(table.scan(), table.source, layout, "task")
        if found.name == "earl-sorting":
            raise DataError(
                f"{table.source} has EARL's sorting tasks, which are graded by the order that tool calls "
                "produce, not by a text; use task.env=earl:rows, which has the tools"
            )
        return found
    if layout != "auto":
        raise ValueError(f"layout={layout!r} and prompt_key= or answer_key=: give one")
    return named(table, prompt_key or VERL[0], answer_key or VERL[1])


def question_column(table: RowTable, layout: RowLayout) -> str:
    known = (key for key in layout.prompt_columns if key in table.columns)
    return next(known, layout.prompt_columns[0])


def good_rows(
    table: RowTable, part: int, verdict: Verdict, numbers: Sequence[int]
) -> Sequence[int]:
    """The numbers without the bad rows of one part of the table."""
    if len(table.parts) == 1:
        return verdict.good(numbers)
    bad = set(verdict.bad)
    places = ((number, *table.part_of(number)) for number in numbers)
    good = (number for number, index, row in places if index != part or row not in bad)
    return array("Q", good) if bad else numbers


def named(table: RowTable, prompt_key: str, answer_key: str) -> RowLayout:
    """The layout of columns that the user names, if the table has them."""
    for name, key in (("prompt_key", prompt_key), ("answer_key", answer_key)):
        if not {key, key.partition(".")[0]} & set(table.columns):
            raise DataError(
                f"{table.source} has no column {key.partition('.')[0]!r} (found: "
                f"{', '.join(table.columns)}); name the one to use: {name}="
            )
    return by_keys(prompt_key, answer_key)
