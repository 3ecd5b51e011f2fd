"""Everything that a score depends on except the model: sets, attempts, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError
from graft.evaluate.benchmarks.arpo import with_prompt
from graft.evaluate.benchmarks.arpo_prompts import read_prompt
from graft.evaluate.model_source import EndpointSpec
from graft.evaluate.options import EvalOptions
from graft.evaluate.task_set import TaskSet
from graft.evaluate.task_sets import read_sets
from graft.rollout.branches.branch import PASS_AT
from graft.train.build import sampling_of
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
class EvalSpec:
    """Everything that a score depends on except the model."""

    config: Config
    """With the lengths of evaluation (`Config.as_evaluated`)."""
    sets: list[TaskSet]
    options: EvalOptions
    """Its `tasks` None: all of a benchmark, else run.eval_tasks; `samples` None, `k` empty: rows decide."""
    sampling: Sampling
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
        if self.options.samples is None and samples > 1:
            attempts = f"as many attempts as their rows ask for ({PASS_AT}, at most {samples})"
        temperature = self.sampling.temperature
        how = f"at temperature {temperature:g}" if temperature else "greedy"
        for name in self._truncation:
            word = name.replace("_", " " if "penalty" in name else "-")
            how += f", {word} {getattr(self.sampling, name):g}"
        right = (
            "" if samples == 1 else f"; right means a reward of at least {self.options.solved:g}"
        )
        tools = "" if all(one.has_tools for one in self.sets) else ", without tools"
        what = "Held-out tasks" if self.config.task.env and not not_held_out else "Tasks"
        trained = "; ".join(f"{label}: {why}" for label, why in not_held_out.items())
        memory = f" Not held out, so that scores measure memory too: {trained}." if trained else ""
        return (
            f"{what}, {attempts}, {how}{tools}{right}. Mean over tasks [95% bootstrap "
            f"interval]; tool calls per attempt.{memory}"
        )


def make_spec(
    config: Config,
    options: EvalOptions,
    endpoint: EndpointSpec | None = None,
    sets: list[TaskSet] | None = None,
) -> EvalSpec:
    """The evaluation that the options ask for, with the recipe's section `eval` for the rest.

    sets   None: those that the options name
    """
    changes = {f"eval.{name}": value for name, value in (options.draws | options.limits).items()}
    changes |= {f"run.{name}": value for name, value in options.select("seed").items()}
    config = config.changed(changes).as_evaluated()
    sampling = sampling_of(config, held_out=True)
    options = options.choose_samples(config.eval.samples if sampling.temperature else 0)
    options.choose_temperature(sampling.temperature)
    refuse_actions(config, options, endpoint)
    if sets is None:
        sets = read_sets(
            options.on, options.args, config.task, config.held_out_envs, has_tools=options.tools
        )
    if options.prompt:
        sets = [with_prompt(one, read_prompt(options.prompt)) for one in sets]
    return EvalSpec(config, sets, options, sampling, endpoint)


def refuse_actions(config: Config, options: EvalOptions, endpoint: EndpointSpec | None) -> None:
    """Refuse what calls made by actions exclude, and an agent's tools that cannot be taken away."""
    if config.task.agent and not options.tools:
        raise ConfigError("--no-tools: the tools are those of task.agent, which brings its own")
    file = config.actions.file
    if not file:
        return
    if not options.tools:
        raise ConfigError(f"--no-tools, and actions.file={file} makes calls; add actions.file=")
    if endpoint is not None:
        raise ConfigError(
            f"actions.file={file} makes calls by a grammar, which no server can apply; add "
            "actions.file= to let the model write its calls as plain text (task.args.syntax=tags)"
        )
    if options.prompt:
        raise ConfigError(
            f"--prompt describes calls in tags, and actions.file={file} makes calls by actions; leave one out"
        )
