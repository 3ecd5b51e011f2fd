"""Rows of a benchmark as questions, from the columns of their publication.

{"Question": "Which ...?", "Final answer": "egalitarian", "Level": 2, "file_name": ""}

question_key="Question|question"       the first of these columns that is there
answer_key="Final answer|answer"
source_key="Level"                     scores are also shown per level
empty_key="file_name"                  rows with a file are left out
cipher_key="canary"                    question and answer are enciphered with this column's text
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import cycle
from typing import Any, NamedTuple

from graft.data.errors import BadField, DataError
from graft.data.pictures import refuse_pictures
from graft.data.tables import RowTable
from graft.envs.dataset.base import DataPlaces, DatasetEnv, open_table
from graft.protocols import Observation
from graft.rewards.answers import final_answers, last_answer, same_words
from graft.types import Message, Turn


class BenchmarkQuestions(DatasetEnv):
    """One question, one answer, in the order of the file. All rows are checked when it is built.

    Its own reward is 1.0 for the text of the answer; benchmarks set another one.
    """

    checks_rows = True
    shared = (*DatasetEnv.shared, "keys", "question")

    def __init__(
        self,
        *,
        question_key: str = "question",
        answer_key: str = "answer",
        source_key: str = "",
        empty_key: str = "",
        cipher_key: str = "",
        data: DataPlaces = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        hub: str | None = None,
        hub_split: str | None = None,
        split: str | None = None,
    ) -> None:
        table, _ = open_table(data, rows, hub, split, hub_split, check=False)
        if not len(table):
            raise DataError(f"{table.source} is empty: it has no rows")
        self.keys = Keys(
            present(table, question_key, "question_key"),
            present(table, answer_key, "answer_key"),
            cipher_key,
        )
        self.source_key = source_key
        self.question = ""
        super().__init__(
            data=data,
            rows=rows,
            hub=hub,
            hub_split=hub_split,
            split=split,
            question_key=self.keys.question,
            evaluation=True,
        )
        good = askable(self.table, self.keys, empty_key)
        kept = set(good)
        self.numbers = [number for number in self.numbers if number in kept]
        if not self.numbers:
            raise DataError(
                f"{self.table.source}: every row has something in {empty_key!r}, so none can be used "
                "as text"
            )

    def reset(
        self, seed: int | None = None, idx: int | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        prompt, info = super().reset(seed, idx)
        source = self.data_source or info.get("data_source", "")
        return prompt, {**info, "data_source": source, "meta": self.describe()}

    def ask(self, row: Mapping[str, Any]) -> list[Message]:
        self.question, self.answer = self.keys.read(row, self.where)
        self.data_source = source_of(row, self.source_key)
        return [{"role": "user", "content": self.question}]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "question": self.question}

    def respond(self, action: str) -> Turn:
        answer = last_answer(action)
        is_right = any(same_words(answer, gold) for gold in final_answers(self.answer))
        return Turn(reward=float(is_right), terminated=True, info={"correct": is_right})

    def sample_random_action(self) -> str:
        return f"<answer>\\boxed{{{self.action_rng().randint(0, 100)}}}</answer>"


class Keys(NamedTuple):
    """The keys of a row's question and answer."""

    question: str
    answer: str
    cipher: str

    def read(self, row: Mapping[str, Any], where: str) -> tuple[str, Any]:
        """The question and the right answer: a text, or a list of accepted texts."""
        question, answer = row.get(self.question), row.get(self.answer)
        if self.cipher and isinstance(secret := row.get(self.cipher), str) and secret:
            question = deciphered(question, secret, where, self.question)
            answer = deciphered(answer, secret, where, self.answer)
        if not isinstance(question, str) or not question.strip():
            raise DataError(
                f"{where}: {self.question!r} holds {_describe_value(question)}, not a question"
            )
        several = answer if isinstance(answer, list) else [answer]
        golds = [_gold(one) for one in several]
        if not golds or not all(golds):
            raise DataError(
                f"{where}: {self.answer!r} holds {_describe_value(answer)}; an answer is a text, "
                "a number, or a "
                "list of them"
            )
        return question, golds if isinstance(answer, list) else golds[0]


def source_of(row: Mapping[str, Any], places: str) -> str:
    """The group of a row: "info.level" is `level` inside the column `info`; "a|b": a, else b.

    >>> source_of({"info": {"level": "hard"}}, "Level|info.level")
    'hard'
    """
    for place in filter(None, places.split("|")):
        found: Any = row
        for name in place.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            return str(found)
    return ""


def present(table: RowTable, names: str, which: str) -> str:
    """The first of the columns "a|b" that a table has."""
    for name in names.split("|"):
        if name in table.columns:
            return name
    raise DataError(
        f"{table.source} has no column {names.replace('|', ' or ')!r} (found: "
        f"{', '.join(table.columns)}); choose one: {which}="
    )


@lru_cache(maxsize=32)
def askable(table: RowTable, keys: Keys, empty_key: str) -> array[int]:
    """The rows without a file; an unreadable row is an error that names its place."""
    found = array("Q")
    for number, row in enumerate(table.scan()):
        where = f"{table.source}, row {number + 1}"
        if isinstance(row, DataError):
            raise row
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is a {type(row).__name__}, not a row of columns")
        if empty_key and not _is_nothing(row.get(empty_key)):
            continue
        try:
            refuse_pictures(row)
        except BadField as error:
            raise DataError(f"{where}: {error}") from error
        keys.read(row, where)
        found.append(number)
    return found


def deciphered(text: Any, secret: str, where: str, key: str) -> str:
    """base64 of the bytes, each xor the next byte of the secret: the encoding of xbench.

    >>> deciphered("Jx0VRQ==", "puzzle", "row 1", "prompt")
    'Who?'
    """
    try:
        data = base64.b64decode(str(text), validate=True)
        return bytes(a ^ b for a, b in zip(data, cycle(secret.encode()), strict=False)).decode()
    except ValueError as error:  # not base64, or not text after decoding
        raise DataError(
            f"{where}: {key!r} is not enciphered as its row says ({error}); of a deciphered file leave "
            "the column with the secret out"
        ) from error


def _gold(value: Any) -> str:
    if value is None or isinstance(value, Mapping | list | bool):
        return ""
    return str(value).strip()


def _is_nothing(value: Any) -> bool:
    return value is None or value == "" or value != value  # NaN is how pandas writes nothing


def _describe_value(value: Any) -> str:
    return "nothing" if value is None or value == "" else repr(value)[:80]
