"""Scores of a Policy on held-out tasks, with intervals: what `graft eval` measures, in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.api.collect import RewardLike
from graft.api.engine import PolicyEngine, engine_for, load_if_path
from graft.api.environments import EnvLike, env_maker
from graft.api.policy import Policy
from graft.api.progress import ProgressLine
from graft.api.settings import settings
from graft.config import Config, load_config
from graft.evaluate.estimates import Estimate
from graft.evaluate.task_set import TaskSet
from graft.signatures import explain_arguments
from graft.user_code import UserCodeError, describe_value

if TYPE_CHECKING:
    from graft.evaluate.eval_spec import EvalSpec
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
    from graft.evaluate.eval_spec import make_spec
    from graft.evaluate.evaluator import pose
    from graft.evaluate.options import EvalOptions
    from graft.trust.ownership import settings_from

    if isinstance(k, str) or not isinstance(k, int | Iterable | None):
        raise UserCodeError(
            f"k is {describe_value(k)}; give a whole number from 1, or several: k=(1, 8)"
        )
    named = on if isinstance(on, str) else ""
    labels = [one.partition("=")[0].strip() for one in named.split(",") if data and one.strip()]
    options = EvalOptions(
        on=named,
        args=[f"{label}.data={data}" for label in labels],
        k=[] if k is None else [k] if isinstance(k, int) else [*k],
        tasks=tasks,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        solved=solved,
        prompt=prompt,
        max_tokens=max_tokens,
        max_turns=max_turns,
        max_context=max_context,
        seed=seed,
    )
    policy = load_if_path(policy, "evaluate", trust)
    owner = policy.policy if isinstance(policy, PolicyEngine) else policy
    typed = [named, reward if isinstance(reward, str) else ""]
    with settings_from(owner.settings_file, trust or owner.trust, typed):
        sets = None
        if not isinstance(on, str):
            name, build = env_maker(on, owner.tokenizer)
            sets = [TaskSet(name, name, {}, build=build)]
        spec = make_spec(_recipe(owner), options, sets=sets)
        if reward is not None:
            spec = replace(spec, sets=[replace(one, reward=reward) for one in spec.sets])
        posed = pose(spec, owner.chat)
        total = sum(sum(one.attempts.values()) for one in posed)
        with (
            engine_for(policy, seed) as engine,
            ProgressLine("evaluate", total, "attempts", progress) as line,
        ):
            return _measure(spec, posed, engine, line)


def _recipe(policy: Policy) -> Config:
    """The settings of the run behind a policy, or those of `graft eval` for a model without one."""
    from graft.evaluate.run import PLAIN
    from graft.recipe.admission import NOT_OF_ATTEMPTS

    if policy.recipe is None:
        limits = PLAIN["rollout"]
        window = min(limits["max_context"], policy.model.shape.max_positions)
        rollout = {**limits, "max_context": window}
        return settings(policy.config, rollout=rollout, run={"eval_tasks": 0})
    recipe = load_config(policy.recipe, unused=NOT_OF_ATTEMPTS)
    rollout = recipe.rollout.model_dump(exclude={"staleness", "branch"})
    sections = {name: getattr(recipe, name).model_dump() for name in ("task", "eval", "run")}
    return settings(policy.config, rollout=rollout, **sections)


def _measure(
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
