r"""Prompts that are chats already, in the columns that verl reads and that ARPO's data is published in.

{"data_source": "hotpotqa", "ability": "qa",
 "prompt": [{"role": "system", "content": "Search where you must."},
            {"role": "user", "content": "Where is the Louvre?"}],
 "reward_model": {"ground_truth": ["Paris"], "style": "rule"},
 "extra_info": {"index": 7, "split": "train"}}

    observation   both messages as they stand: nothing is added
    task          answer ["Paris"], data_source "hotpotqa", meta {"ability": "qa", "index": 7, ...}
    the policy    "<think>...</think><answer>\boxed{paris}</answer>"  ->  1.0
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from graft.data.conversations import listed, read_messages, shown
from graft.data.rows import DataError
from graft.envs.base import Trace
from graft.envs.dataset.base import DatasetEnv, open_table
from graft.protocols import Observation
from graft.rewards.answers import accepted_answers, last_answer, same_text, word_f1
from graft.rewards.grading import grade
from graft.text.parse import last_boxed
from graft.types import Author, Turn

_FORMULA = re.compile(r"[0-9\\^=+*/<>]")
"""What mathematics has and words have not: "evil" is not "live", though v*i*l*e is commutative."""


class PromptsEnv(DatasetEnv):
    r"""One answer to a chat: 1.0 if it is one of the golds, as words or as mathematics, else 0.0.

    gold ["0.5"]      "<answer>\boxed{\frac{1}{2}}</answer>"   ->  1.0
    gold ["Paris"]    "#### the Paris!"                        ->  1.0

    What counts is the last <answer>, else the last box, else what follows ####, else the whole text;
    a box inside <answer> is opened. info["f1"] is how far the words overlap with the nearest gold.

    `prompt_key` holds a list of {role, content}, or a text, which is one user message. `answer_key`
    holds a text, a number, a list of them, or {"target": any of these}; a point leads into a column:
    "reward_model.ground_truth". `data_source`, `ability` and `extra_info` may be missing.
    """

    shared = (*DatasetEnv.shared, "meta")

    def __init__(
        self,
        *,
        data: str | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        hub: str | None = None,
        hub_split: str | None = None,
        split: str | None = None,
        prompt_key: str = "prompt",
        answer_key: str = "reward_model.ground_truth",
        evaluation: bool = False,
        timeout: float = 1.0,
    ) -> None:
        self.prompt_key = prompt_key
        self.answer_key = answer_key
        self.timeout = timeout
        self.meta: dict[str, Any] = {}
        table, _ = open_table(data, rows, hub, split, hub_split)  # files are read once
        for name, key in (("prompt_key", prompt_key), ("answer_key", answer_key)):
            if len(table) and not {key, key.partition(".")[0]} & set(table.columns):
                raise DataError(
                    f"{table.source} has no column {key.partition('.')[0]!r} (found: "
                    f"{', '.join(table.columns)}); say which one to use: {name}="
                )
        super().__init__(
            data=data,
            rows=rows,
            hub=hub,
            hub_split=hub_split,
            split=split,
            question_key=prompt_key,
            evaluation=evaluation,
        )

    def reset(
        self, seed: int | None = None, idx: int | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        prompt, info = super().reset(seed, idx)
        # a reward from outside may grade by the source of a row, and verl's ones do
        return prompt, {**info, "data_source": self.data_source, "meta": self.describe()}

    def ask(self, row: Mapping[str, Any]) -> Observation:
        prompt = row.get(self.prompt_key)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        try:
            messages = read_messages(prompt)
            if not any(str(message.get("content") or "").strip() for message in messages):
                raise ValueError("there is not a word in it; there must be something to answer")
        except ValueError as error:
            raise DataError(f"{self.where}: {self.prompt_key!r}: {error}") from error
        self.answer = self._golds(row)
        self.data_source = str(row.get("data_source") or "")
        self.meta = meta_of(row)
        return messages

    def _golds(self, row: Mapping[str, Any]) -> Any:
        value = listed(found_at(row, self.answer_key))
        if isinstance(value, Mapping) and "target" in value:  # as Search-R1 writes it
            value = listed(value["target"])
        several = [listed(one) for one in (value if isinstance(value, list) else [value])]
        if not several or not all(is_gold(one) for one in several):
            raise DataError(
                f"{self.where}: {self.answer_key!r} holds {shown(value)}; the right answer is a "
                "text, a number, a list of them, or {target: one of these}. Take the row out, or say "
                "where its answer stands: answer_key="
            )
        golds = [plain(one) for one in several]
        return golds if isinstance(value, list) else golds[0]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self.meta}

    def respond(self, action: str) -> Turn:
        answer, golds = opened(action), [opened(gold) for gold in accepted_answers(self.answer)]
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
        return grade(answer, formulas, timeout=self.timeout)

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, written(opened(accepted_answers(self.answer)[0])))]

    def sample_random_action(self) -> str:
        whim = self.whim()
        return written(whim.choice(("Paris", "yes", "no", str(whim.randint(0, 100)))))


def written(answer: str) -> str:
    return f"<think>The answer is {answer}.</think><answer>\\boxed{{{answer}}}</answer>"


def opened(text: str) -> str:
    r"""The last answer, out of its box: "<answer>It is \boxed{7}.</answer>" -> "7"."""
    answer = last_answer(text)
    box = last_boxed(answer)
    return (answer if box is None else box).strip()


def found_at(row: Mapping[str, Any], path: str) -> Any:
    """What stands at "reward_model.ground_truth"; None if it leads nowhere."""
    if path in row:  # a file that was made flat has columns with a point in their name
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def is_gold(value: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):  # NaN is how pandas says nothing
        return False
    return bool(value.strip()) if isinstance(value, str) else isinstance(value, Number)


def meta_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """`ability` and what is in `extra_info`, side by side: what verl hands to a reward."""
    extra = row.get("extra_info")
    named = extra if isinstance(extra, Mapping) else {"extra_info": extra}
    return plain({"ability": row.get("ability"), **named})


def plain(value: Any) -> Any:
    """As JSON knows it: no arrays, no dates, no NaN, and no key whose value is None."""
    value = listed(value)
    if isinstance(value, Mapping):
        inner = {str(key): plain(one) for key, one in value.items()}
        return {key: one for key, one in inner.items() if one is not None}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)
