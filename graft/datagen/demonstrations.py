"""Tasks and demonstrations of an environment as rows of a file: `graft data make`.

    graft data make countdown --n 2 --seed 0 --out rows.jsonl               a row of the form "chats"

    {"messages": [{"role": "user", "content": "Combine the numbers 3, 7, 12 into 33. ..."}],
     "spans": [{"author": "policy", "text": "<answer>12 + 7 * 3</answer>"}],
     "data_source": "countdown", "extra_info": {"index": 0, "seed": 0, "split": "train"}}

    the same with --form tasks: prompt and right answer, in verl's columns

    {"data_source": "countdown", "prompt": [...], "ability": "countdown",
     "reward_model": {"style": "rule", "ground_truth": {"numbers": [3, 7, 12], "target": 33}},
     "extra_info": {"index": 0, "seed": 0, "split": "train"}}

Rows are made one by one and depend on the seed alone. They are the tasks and demonstrations that a run with
this `run.seed` would see; the test split with seed 0 has its held-out tasks.
"""

from __future__ import annotations

import inspect
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from graft.config import ConfigError, read_arguments
from graft.data.errors import DataError
from graft.datagen.row_file import new_rows
from graft.envs import find
from graft.envs.base import as_messages
from graft.envs.entry import family_of
from graft.envs.splits import check_split
from graft.rollout.recorded import spans_of_trace
from graft.rollout.setup import draw_key
from graft.train.tasks import HELD_OUT_SEEDS, TRAIN_SEEDS

FORMS = ("chats", "tasks")
OF_TEACHER = "demo_args."
"""Begins the arguments of a teacher, as sft.demo_args does in a recipe."""
PATIENCE = 2_000
"""Consecutive repeated tasks after which the environment counts as exhausted."""
SECONDS_BETWEEN_NEWS = 10.0

Row = dict[str, Any]


@dataclass(slots=True)
class MadeRows:
    """The result of making rows."""

    out: str
    rows: int = 0
    duplicates: int = 0
    """Repeated tasks, left out."""
    unsolved: int = 0
    """Tasks without a demonstration, left out."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        left_out = ((self.duplicates, "repeated"), (self.unsolved, "not solved"))
        rest = [f"{number:,} {why} left out" for number, why in left_out if number]
        return ", ".join([f"{self.rows:,} rows in {self.out}", *rest])


def make_rows(
    env_id: str,
    env: Any,
    out: str,
    *,
    rows: int,
    seed: int = 0,
    split: str = "train",
    form: str = "chats",
    duplicates: bool = False,
    teacher: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> MadeRows:
    """Write `rows` rows of tasks of `env`, which is built for this split.

    teacher     arguments of the environment's demonstrate()
    duplicates  keep repeated tasks
    """
    if form not in FORMS:
        raise ConfigError(f"--form {form!r} is none of {', '.join(FORMS)}")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: must be 0 or more")
    pose = TaskPoser(env_id, env, split, seed, form, dict(teacher or {}))
    made = MadeRows(out)
    news = time.monotonic() + SECONDS_BETWEEN_NEWS
    seen: set[bytes] = set()
    with new_rows(Path(out)) as file:
        idle = 0
        for row, identity in pose.rows():
            is_new = duplicates or identity not in seen
            if row is None:
                made.unsolved += 1
            elif not is_new:
                made.duplicates += 1
            else:
                row["extra_info"]["index"] = made.rows
                file.append(row)
                made.rows += 1
                if not duplicates:
                    seen.add(identity)
            idle = 0 if row is not None and is_new else idle + 1
            if made.rows == rows:
                break
            if idle > PATIENCE:
                raise DataError(_why_no_more(env_id, made, rows))
            if time.monotonic() > news:
                say(f"{made.rows:,} of {rows:,} rows")
                news = time.monotonic() + SECONDS_BETWEEN_NEWS
    return made


def share_out(
    env_id: str, given: Sequence[str], split: str, say: Callable[[str], None]
) -> tuple[list[str], dict[str, Any]]:
    """Typed key=value: arguments of the environment with its split, and of its teacher.

    ["digits=[2,2]", "demo_args.tool_rate=1"] -> ["digits=[2,2]", "split=train"], {"tool_rate": 1}
    """
    check_split(split)
    of_env = [text for text in given if not text.startswith(OF_TEACHER)]
    if any(text.startswith("split=") for text in of_env):
        raise ConfigError("split=... is an option here: --split train or --split test")
    of_teacher = [text.removeprefix(OF_TEACHER) for text in given if text.startswith(OF_TEACHER)]
    teacher = read_arguments(of_teacher)
    if "split" in find(env_id).parameters():
        return [*of_env, f"split={split}"], teacher
    if split == "test":
        say(
            f"{env_id} has no splits: test rows have seeds that no training row has, but a task "
            "that is drawn from few may come up in both"
        )
    return of_env, teacher


class TaskPoser:
    """Draws tasks and makes their rows."""

    def __init__(
        self, env_id: str, env: Any, split: str, seed: int, form: str, teacher: dict[str, Any]
    ) -> None:
        self.env_id, self.env = env_id, env
        self.split, self.seed = split, seed
        self.form, self.teacher = form, teacher
        if form == "chats":
            self._check_teacher()

    def rows(self) -> Iterator[tuple[Row | None, bytes]]:
        """Endless rows, each with the identity of its task; None if there is no demonstration."""
        start = self.seed * TRAIN_SEEDS + (HELD_OUT_SEEDS if self.split == "test" else 0)
        for number in count(start):
            observation, info = self.env.reset(number)
            messages = list(as_messages(observation))
            answer = plain(info.get("answer"))
            row: Row | None
            if self.form == "tasks":
                row = self._task_row(messages, answer, info, number)
            else:
                row = self._chat_row(messages, info, number, is_first=number == start)
            shown: list[Any] = [messages, answer]
            if answer is None and row is not None:  # a hidden board: prompts are identical
                shown.append(row.get("spans"))
            text = json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace")
            yield row, blake2b(text, digest_size=8).digest()

    def _task_row(
        self, messages: list[Any], answer: Any, info: Mapping[str, Any], seed: int
    ) -> Row:
        inner = getattr(self.env, "unwrapped", self.env)
        own: Row = self.env.row_columns() if hasattr(self.env, "row_columns") else {}
        if not own and (answer is None or getattr(inner, "max_turns", 1) != 1):
            raise ConfigError(
                f"{self.env_id} has no answer to compare a text with, so its tasks "
                "cannot be rows of a file: name the environment in the recipe (task.env), or write its "
                "teacher's games with --form chats"
            )
        family = family_of(self.env_id)
        return {
            "data_source": self._source(info),
            "prompt": messages,
            "ability": self.env_id if family == "graft" else family,
            "reward_model": {"style": "rule", "ground_truth": answer},
            **own,
            "extra_info": {**own.get("extra_info", {}), **self._extra(seed)},
        }

    def _chat_row(
        self, messages: list[Any], info: Mapping[str, Any], seed: int, is_first: bool
    ) -> Row | None:
        # the key of a run's warm-up: the same seed gives the same demonstrations
        key = draw_key(self.seed, f"{self.env_id}:{self.split}:{seed}", 0)
        try:
            trace = self.env.demonstrate(random.Random(key), **self.teacher)
        except NotImplementedError as error:
            if not is_first:
                return None
            raise ConfigError(
                f"{self.env_id} has no demonstration ({error}); --form tasks writes its tasks "
                "without a solution, and `graft data sample` a model's attempts at them"
            ) from error
        row: Row = {
            "messages": messages,
            "spans": spans_of_trace(trace, self.env.observe_as, self.env.stop),
        }
        if info.get("tools"):
            row["tools"] = plain(info["tools"])
        return {**row, "data_source": self._source(info), "extra_info": self._extra(seed)}

    def _extra(self, seed: int) -> Row:
        return {"index": 0, "seed": seed, "split": self.split}

    def _source(self, info: Mapping[str, Any]) -> str:
        named = info.get("data_source") or getattr(self.env, "data_source", "")
        return str(named or self.env_id)

    def _check_teacher(self) -> None:
        if self.env.observe_as in ("prompt", "raw"):
            raise ConfigError(
                f"{self.env_id} has a wrapper that rewrites the history, so its teacher's turns are no "
                "single conversation; leave that wrapper out"
            )
        demonstrate = getattr(self.env, "demonstrate", None)
        if demonstrate is None:
            raise ConfigError(f"{self.env_id} has no demonstrate(); --form tasks needs none")
        try:
            inspect.signature(demonstrate).bind(random.Random(0), **self.teacher)
        except TypeError as error:
            known = list(inspect.signature(demonstrate).parameters)[1:]
            raise ConfigError(
                f"the teacher of {self.env_id}: {error}; it takes {', '.join(known) or 'nothing'}"
            ) from error


def plain(value: Any) -> Any:
    """The value as JSON reads it back: tuples are lists."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


def _why_no_more(env_id: str, made: MadeRows, wanted: int) -> str:
    if made.unsolved > made.duplicates:
        return (
            f"the teacher of {env_id} solved {made.rows} tasks and failed at {made.unsolved}; "
            f"{wanted} rows are out of reach. Make the tasks easier, or --n {max(made.rows, 1)}"
        )
    return (
        f"{env_id} posed {made.rows} different tasks, and then {PATIENCE:,} repeated ones in a row. "
        f"Give --n {made.rows}, other arguments, or --duplicates"
    )
