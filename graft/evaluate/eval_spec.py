"""Everything that a score depends on except the model: sets, attempts, settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError
from graft.evaluate.task_set import TaskSet

NOT_OF_A_SCORE: dict[str, Any] = {
    "run": True,  # its seed aside
    "model": {"path", "shape", "alphabet", "device"},  # the result records its weights
    "task": {"env", "args", "eval_args", "wrappers", "reward"},  # the set records them
    "rollout": {
        "tasks", "samples", "branch", "temperature", "dynamic_rounds", "concurrency", "deadline",
    },
    "engine": {"kv_tokens", "page_size"},
    "algo": True, "train": True, "sft": True, "lora": True,
}  # fmt: skip
"""Keys of a recipe that held-out scores do not depend on; a change of any other key makes another result."""


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """The servers that hold the model."""

    urls: tuple[str, ...]
    model: str
    api: str
    """completions or chat; see `graft.engine.remote.openai`."""


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """Everything that a score depends on except the model."""

    config: Config
    sets: list[TaskSet]
    tasks: int | None
    """Tasks per set; None: all of a benchmark, else run.eval_tasks."""
    samples: int
    temperature: float
    top_p: float = 1.0
    k: Sequence[int] = (1,)
    solved: float = 1.0
    endpoint: EndpointSpec | None = None

    def draws(self, tasks: TaskSet) -> dict[str, Any]:
        """Everything that one attempt of a given model on this set depends on."""
        values = {
            **tasks.depends_on,
            "temperature": self.temperature,
            **({"top_p": self.top_p} if self.top_p < 1 else {}),
            "seed": self.config.run.seed,
            "api": "" if self.endpoint is None else self.endpoint.api,
            **self.config.model_dump(mode="json", exclude=NOT_OF_A_SCORE),
        }
        mine = Path(self.config.actions.file)
        if mine.is_file():  # not a bundled file, so it may have been edited
            values["actions_digest"] = blake2b(mine.read_bytes(), digest_size=8).hexdigest()
        return json.loads(json.dumps(values, default=str))  # as it reads back: tuples are lists

    def settings(self, tasks: TaskSet, count: int) -> dict[str, Any]:
        """Everything that the score of a given model on `count` tasks of this set depends on."""
        return {**self.draws(tasks), "tasks": count, "samples": self.samples}

    @property
    def caption(self) -> str:
        attempts = "one attempt" if self.samples == 1 else f"{self.samples} attempts"
        how = f"at temperature {self.temperature:g}" if self.temperature else "greedy"
        how += f" and top-p {self.top_p:g}" if self.top_p < 1 else ""
        right = "" if self.samples == 1 else f"; right means a reward of at least {self.solved:g}"
        tools = "" if all(one.has_tools for one in self.sets) else ", without tools"
        return (
            f"Held-out tasks, {attempts} each, {how}{tools}{right}. Mean over tasks [95% bootstrap "
            "interval]; tool calls per attempt."
        )


def read_k(text: str, samples: int | None) -> tuple[tuple[int, ...], int]:
    """`--k 1,8` and `--samples`: the ks in order, and the attempts per task.

    >>> read_k("8", None), read_k("", None), read_k("4,1", 16)
    (((8,), 8), ((1,), 1), ((1, 4), 16))
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--k {text!r}: give whole numbers of 1 or more, such as 8 or 1,4,8")
    ks = tuple(sorted({int(part) for part in parts})) or (samples or 1,)
    samples = samples or ks[-1]
    if ks[-1] > samples:
        raise ConfigError(
            f"--k {ks[-1]} needs as many attempts per task; --samples says {samples}: leave it out"
        )
    return ks, samples
