"""Scores of a Policy on held-out tasks, with intervals: what `graft eval` measures, in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.api.collect import RewardLike
from graft.api.engine import PolicyEngine, engine_for
from graft.api.environments import EnvLike, env_maker
from graft.api.policy import Policy, load
from graft.api.progress import ProgressLine
from graft.api.settings import settings
from graft.config import Config, ConfigError, load_config
from graft.evaluate.estimates import Estimate
from graft.evaluate.eval_spec import EvalSpec
from graft.evaluate.task_set import TaskSet
from graft.evaluate.task_sets import read_sets
from graft.signatures import explain_arguments
from graft.user_code import UserCodeError, describe_value

if TYPE_CHECKING:
    from graft.evaluate.table import ScoreTable


class Scores(Mapping[str, Mapping[str, Estimate]]):
    """Scores by set and measure; printed, and shown by a notebook, as a table.

    >>> scores = graft.evaluate(policy, on="math500", k=(1, 8))
    >>> scores["math500"]["pass@8"]
    Estimate(value=0.612, interval=(0.570, 0.655))

    reward  mean reward of an attempt, over all sets
    table   every number behind it: rewards of each attempt, data sources, failures
    """

    @explain_arguments
    def __init__(self, table: ScoreTable) -> None:
        self.table = table
        [self._results] = table.rows.values()

    @property
    def reward(self) -> float:
        rewards = [result.reward for result in self._results.values()]
        return sum(rewards) / len(rewards)

    def __getitem__(self, name: str) -> Mapping[str, Estimate]:
        if name not in self._results:
            raise KeyError(f"no set {name!r}; there is {', '.join(self._results)}")
        return self._results[name].estimates(self.table.measures, self.table.solved)

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        return self.table.markdown()

    def _repr_markdown_(self) -> str:
        return self.table.markdown()


@explain_arguments
def evaluate(
    policy: Policy | PolicyEngine | str | PathLike[str],
    on: str | EnvLike = "",
    *,
    k: int | Sequence[int] | None = None,
    tasks: int | None = None,
    samples: int | None = None,
    reward: RewardLike | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    solved: float = 1.0,
    data: str = "",
    prompt: str = "",
    max_tokens: int | None = None,
    max_turns: int | None = None,
    max_context: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    trust: bool = False,
) -> Scores:
    """Score a policy on held-out tasks: means over tasks with 95% intervals.

    >>> scores = graft.evaluate(policy, on="math500", k=(1, 8))
    >>> print(scores)                              # a table
    >>> scores["math500"]["pass@8"].interval
    (0.570, 0.655)

    policy       a Policy, an Engine, or what `graft.load` takes
    on           benchmarks or environment ids with commas ("math500,gsm8k"), or an environment of your
                 own: class or instance; empty: that of the run the policy was loaded from
    k            pass@k and maj@k for these numbers of attempts; None: the attempts that are made
    tasks        per set; None: all of a benchmark, else 200 or what the run says
    samples      attempts per task; None: the largest k, else what the run says, or a row's pass@k, or 1
    reward       instead of the environment's own
    temperature  None: 1, or the run's; 0 is greedy
    top_p        below 1: only the likeliest tokens that together have this probability
    top_k        above 0: only this number of likeliest tokens
    min_p        above 0: only tokens with this share of the largest probability
    repetition_penalty  above 1: tokens that the context has are less likely
    solved       the reward from which on an attempt is right, for pass@k
    data         rows of a benchmark, a file or folder, where they are not taken from the hub
    prompt       a system prompt for all sets: code_search, search, math, base or code_search_cn, which ARPO's
                 checkpoints were trained with, or a file; the tools are those that a named one describes
    max_tokens   sampled tokens per turn; None: 4096, or the run's
    max_turns    turns per attempt; None: 16, or the run's
    max_context  tokens of a whole attempt; None: 16384 or the model's window, or the run's
    seed         of the draws
    progress     None: a line in a terminal or a notebook; True or False: always, never
    trust        run code that the settings of a stranger's run name
    """
    from graft.evaluate.evaluator import pose, temperature_of
    from graft.evaluate.run import prompted, refuse_actions, with_given
    from graft.train.build import sampling_of
    from graft.trust.ownership import settings_from

    if isinstance(k, str) or not isinstance(k, int | Iterable | None):
        raise UserCodeError(
            f"k is {describe_value(k)}; give a whole number from 1, or several: k=(1, 8)"
        )
    ks = [] if k is None else sorted({k} if isinstance(k, int) else set(k))
    for name, value in {"k": ks[0] if ks else k, "samples": samples, "tasks": tasks}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserCodeError(f"{name} is {describe_value(value)}; give a whole number from 1")
    samples = ks[-1] if samples is None and ks else samples
    if samples is not None and ks and ks[-1] > samples:
        raise UserCodeError(f"k={ks[-1]} needs as many attempts per task, and samples={samples}")
    if isinstance(policy, str | PathLike):
        policy = load(policy, trust=trust)
    if not isinstance(policy, Policy | PolicyEngine):
        raise UserCodeError(
            f"evaluate() takes a Policy, an Engine or a path, not {describe_value(policy)}"
        )
    owner = policy.policy if isinstance(policy, PolicyEngine) else policy
    typed = [on if isinstance(on, str) else "", reward if isinstance(reward, str) else ""]
    with settings_from(owner.settings_file, trust or owner.trust, typed):
        limits = {"max_tokens": max_tokens, "max_turns": max_turns, "max_context": max_context}
        config = _config(
            owner, {name: value for name, value in limits.items() if value is not None}
        )
        config = settings(config, run={"seed": seed})
        given = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        config = with_given(config, given)
        sampling = sampling_of(config, held_out=True)
        samples = samples or (config.eval.samples if sampling.temperature else 0) or None
        temperature_of(sampling.temperature, None, samples, "samples=1")
        refuse_actions(config, True, None, prompt)
        spec = EvalSpec(
            config=config,
            sets=prompted(_sets(owner, on, config, data, reward), prompt),
            tasks=tasks,
            samples=samples,
            sampling=sampling,
            k=ks or ([samples] if samples else []),
            solved=solved,
        )
        posed = pose(spec, owner.chat)
        total = sum(sum(one.attempts.values()) for one in posed)
        with (
            engine_for(policy, seed) as engine,
            ProgressLine("evaluate", total, "attempts", progress) as line,
        ):
            return _measured(spec, posed, engine, line)


def _config(policy: Policy, limits: Mapping[str, Any]) -> Config:
    """The settings of the run behind a policy, or those of `graft eval` for a model without one."""
    from graft.evaluate.run import PLAIN
    from graft.recipe.admission import NOT_OF_ATTEMPTS

    recipe = policy.recipe
    if recipe is not None:
        recipe = load_config(recipe, unused=NOT_OF_ATTEMPTS).as_evaluated()
        base = settings(policy.config, task=recipe.task.model_dump(), eval=recipe.eval.model_dump())
        kept = recipe.rollout.model_dump(exclude={"staleness", "branch"})
        return settings(base, rollout={**kept, **limits}, run=recipe.run.model_dump())
    window = policy.model.shape.max_positions
    plain = {**PLAIN["rollout"], "max_context": min(PLAIN["rollout"]["max_context"], window)}
    return settings(policy.config, rollout={**plain, **limits}, run={"eval_tasks": 0})


def _sets(
    policy: Policy, on: Any, config: Config, data: str, reward: RewardLike | None
) -> list[TaskSet]:
    if isinstance(on, str):
        if not on and not config.task.env:
            raise ConfigError(
                "nothing says what to evaluate on; give on='math500', an environment's id or class, or "
                "load the policy from a run"
            )
        named = [one.partition("=")[0].strip() for one in on.split(",") if data and one.strip()]
        arguments = [f"{label}.data={data}" for label in named]
        sets = read_sets(on, arguments, config.task, config.held_out_envs)
    else:
        name, build = env_maker(on, policy.tokenizer)
        sets = [TaskSet(name, name, {}, build=build)]
    return sets if reward is None else [replace(one, reward=reward) for one in sets]


def _measured(
    spec: EvalSpec, posed: Sequence[Any], engine: PolicyEngine, line: ProgressLine
) -> Scores:
    from graft.evaluate.candidates import Candidate
    from graft.evaluate.evaluator import Evaluator, no_env, trained_sets
    from graft.evaluate.table import ScoreTable
    from graft.train.build import make_setup

    policy = engine.policy
    config = spec.config.model_copy(update={"task": type(spec.config.task)()})
    setup = make_setup(config, engine.sampler, policy.chat, no_env, policy.actions)
    name = policy.path.name if policy.path is not None else "policy"
    name += f" +{policy.updates}" if policy.updates else ""
    who = Candidate(name, policy.path or Path(), f"version {policy.version}")
    problems: list[str] = []
    evaluator = Evaluator(spec, setup, on_sample=lambda _: line.advance())
    with tempfile.TemporaryDirectory(prefix="graft-evaluate-") as folder, engine.sampling(object()):
        try:
            results = {
                one.tasks.label: evaluator.measure(who, one, Path(folder), problems.append)
                for one in posed
            }
        finally:
            evaluator.close()
    return Scores(ScoreTable.of(spec, {name: results}, problems, trained_sets(posed)))
