"""Everything that a score depends on except the model: sets, attempts, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError
from graft.evaluate.task_set import TaskSet
from graft.rollout.branches.branch import PASS_AT
from graft.trust.masking import masked
from graft.types import Sampling

NOT_OF_A_SCORE: dict[str, Any] = {
    "run": True,  # its seed aside
    "model": {"path", "shape", "alphabet", "device"},  # the result records its weights
    "task": True,  # the set records it
    "eval": True,  # recorded as its effect: draws, lengths, sets
    "rollout": {
        "tasks", "samples", "branch", "temperature", "top_p", "top_k", "min_p", "dynamic_rounds",
        "concurrency", "deadline",
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
    """With the lengths of evaluation (`Config.as_evaluated`)."""
    sets: list[TaskSet]
    tasks: int | None
    """Tasks per set; None: all of a benchmark, else run.eval_tasks."""
    samples: int | None
    """Attempts per task; None: as many as its row asks for, else one."""
    sampling: Sampling
    k: Sequence[int] = (1,)
    """Of pass@k and maj@k; empty: the numbers of attempts that rows ask for."""
    solved: float = 1.0
    endpoint: EndpointSpec | None = None

    def draws(self, tasks: TaskSet) -> dict[str, Any]:
        """Everything that one attempt of a given model on this set depends on."""
        values = {
            **tasks.depends_on,
            "temperature": self.sampling.temperature,
            **{name: getattr(self.sampling, name) for name in self._truncation},
            "seed": self.config.run.seed,
            "api": "" if self.endpoint is None else self.endpoint.api,
            **self.config.model_dump(mode="json", exclude=NOT_OF_A_SCORE),
            "task": {"prefill": tasks.prefill},
        }
        mine = Path(self.config.actions.file)
        if mine.is_file():  # not a bundled file, so it may have been edited
            values["actions_digest"] = blake2b(mine.read_bytes(), digest_size=8).hexdigest()
        return json.loads(
            json.dumps(masked(values), default=str)
        )  # as it reads back: tuples are lists

    @property
    def _truncation(self) -> list[str]:
        """The settings of sampling, besides the temperature, that change a distribution."""
        plain = Sampling()
        names = ("top_p", "top_k", "min_p", "repetition_penalty")
        return [name for name in names if getattr(self.sampling, name) != getattr(plain, name)]

    def settings(self, tasks: TaskSet, attempts: Sequence[int]) -> dict[str, Any]:
        """Everything that the score of a given model depends on, with `attempts` at each task."""
        same = set(attempts)
        samples = same.pop() if len(same) == 1 else PASS_AT
        return {**self.draws(tasks), "tasks": len(attempts), "samples": samples}

    def caption(self, samples: int, not_held_out: Mapping[str, str]) -> str:
        """The caption of a table of results with at most `samples` attempts at a task.

        not_held_out   the sets with trained tasks, and why; see `graft.evaluate.trained_rows`
        """
        attempts = "one attempt each" if samples == 1 else f"{samples} attempts each"
        if self.samples is None and samples > 1:
            attempts = f"as many attempts as their rows ask for ({PASS_AT}, at most {samples})"
        temperature = self.sampling.temperature
        how = f"at temperature {temperature:g}" if temperature else "greedy"
        for name in self._truncation:
            word = name.replace("_", " " if "penalty" in name else "-")
            how += f", {word} {getattr(self.sampling, name):g}"
        right = "" if samples == 1 else f"; right means a reward of at least {self.solved:g}"
        tools = "" if all(one.has_tools for one in self.sets) else ", without tools"
        what = "Held-out tasks" if self.config.task.env and not not_held_out else "Tasks"
        trained = "; ".join(f"{label}: {why}" for label, why in not_held_out.items())
        memory = f" Not held out, so that scores measure memory too: {trained}." if trained else ""
        return (
            f"{what}, {attempts}, {how}{tools}{right}. Mean over tasks [95% bootstrap "
            f"interval]; tool calls per attempt.{memory}"
        )


def read_k(text: str, samples: int | None) -> tuple[tuple[int, ...], int | None]:
    """`--k 1,8` and `--samples`: the ks in order, and the attempts per task; neither: the rows decide.

    >>> read_k("8", None), read_k("", None), read_k("4,1", 16)
    (((8,), 8), ((), None), ((1, 4), 16))
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--k {text!r}: give whole numbers of 1 or more, such as 8 or 1,4,8")
    if not parts and samples is None:
        return (), None
    ks = tuple(sorted({int(part) for part in parts})) or (samples or 1,)
    samples = samples or ks[-1]
    if ks[-1] > samples:
        raise ConfigError(
            f"--k {ks[-1]} needs as many attempts per task; --samples says {samples}: leave it out"
        )
    return ks, samples
