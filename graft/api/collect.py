"""Tasks -> episodes, with the collector that a run uses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeGuard

from graft.api.engine import PolicyEngine, engine_of
from graft.api.environments import EnvLike, as_task, check_tasks, env_maker
from graft.api.progress import ProgressLine
from graft.api.settings import settings
from graft.api.speakers import frozen_samplers
from graft.recipe.attempt_keys import EnvItem
from graft.rollout.options import RolloutOptions
from graft.signatures import explain_arguments
from graft.types import Episode, Task
from graft.user_code import UserCodeError, describe_value

if TYPE_CHECKING:
    from graft.config import Config
    from graft.gateway.attempts import AgentAttempts
    from graft.protocols import Stateful
    from graft.rollout.branches.branch import Branch

RewardLike = str | Mapping[str, Any] | Sequence[Any] | Callable[..., Any]
"""A function (task, trajectory) -> number, a name such as "f1", {name: {keyword: value}}, or a list."""

AgentLike = str | Sequence[str] | Callable[..., Any]
"""A function (task, client) -> reward, "module:function", or a command: a text or a list of words."""

BranchLike = str | Mapping[str, Any] | Callable[..., Any]
"""independent, arpo, aepo, counterfactual, {name: {keyword: value}}, or a function."""

TEMPERATURE = "temperature"
"""In the info of an episode's first span: the temperature of its samples, which the learner needs."""
TRUNCATION = "truncation"
"""Likewise: their top-k and top-p."""


@explain_arguments
def collect(
    engine: PolicyEngine,
    env: EnvLike | None = None,
    tasks: int | Sequence[Task | str] = 16,
    samples: int = 8,
    *,
    agent: AgentLike | None = None,
    reward: RewardLike | None = None,
    branch: BranchLike = "independent",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 256,
    max_turns: int = 8,
    max_context: int | None = None,
    seed: int | None = None,
    concurrency: int = 256,
    deadline: float = 600.0,
    progress: bool | None = None,
) -> list[Episode]:
    """Let the policy attempt tasks, several times each; one Episode per task, its attempts are leaves.

    >>> env = graft.make("game:GuessTheNumber-v0", wrappers="python_tool")
    >>> episodes = graft.collect(engine, env, tasks=16, samples=8, reward=my_reward)
    >>> [leaf.reward for leaf in episodes[0].leaves]
    [1.0, 0.0, ...]

    Works in a script and in a notebook (on a thread of its own, where an event loop runs already).
    Ctrl-C gives up what is under way and leaves the engine ready for the next call.

    engine       a graft.Engine
    env          an id, a class, a function that builds one, or an instance, of which copies are made;
                 None: each task is a prompt, and its first answer ends it
    tasks        how many (the next ones of the engine's stream), or a list of Tasks or prompts
    samples      attempts per task; they share the computation of its prompt
    agent        a program that attempts the tasks: what `graft.rollout` makes, a function, a command or
                 "module:function"; the environment then only poses them. None: the policy acts in it
    reward       instead of the environment's own: a function (task, trajectory) -> number, or a name
    branch       where attempts fork: independent, arpo, aepo, counterfactual, or a function
    temperature  of sampling; 0 is greedy (with samples=1, to look at; there is nothing to learn from)
    top_p        below 1: only the likeliest tokens that together have this probability; the learner's
                 log-probs are then those of this truncated distribution
    top_k        likewise: only this number of the likeliest tokens; 0: all
    max_tokens   sampled tokens per turn
    max_turns    turns per attempt
    max_context  tokens of a whole attempt, prompt included; None: 4096, or the model's window
    seed         these tasks and draws, whatever was collected before; None: the engine's, going on
    concurrency  tasks under way at a time
    deadline     seconds any single wait may take: a completion, a tool, an environment
    progress     None: a line in a terminal or a notebook; True or False: always, never
    """
    from graft.rollout.event_loop import run

    arguments = {name: value for name, value in locals().items() if name != "run"}
    return run(lambda: acollect(**arguments))


@explain_arguments
async def acollect(
    engine: PolicyEngine,
    env: EnvLike | None = None,
    tasks: int | Sequence[Task | str] = 16,
    samples: int = 8,
    *,
    agent: AgentLike | None = None,
    reward: RewardLike | None = None,
    branch: BranchLike = "independent",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 256,
    max_turns: int = 8,
    max_context: int | None = None,
    seed: int | None = None,
    concurrency: int = 256,
    deadline: float = 600.0,
    progress: bool | None = None,
) -> list[Episode]:
    """`collect` on the running event loop: two of them share the engine's batches.

    >>> easy, hard = await asyncio.gather(
    ...     graft.acollect(engine, "arithmetic"), graft.acollect(engine, "countdown")
    ... )
    """
    from graft.rollout.collect import collect_async
    from graft.train.actions import check_calls
    from graft.train.build import make_setup
    from graft.train.rollouts.truncation import refuse_truncation
    from graft.train.step_metrics import explain_dead
    from graft.train.tasks import TRAIN_SEEDS

    engine = engine_of(engine, "collect")
    policy = engine.policy
    options = RolloutOptions(
        tasks=tasks if _is_number(tasks) else None,
        samples=samples,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        max_turns=max_turns,
        max_context=min(4096, policy.model.shape.max_positions)
        if max_context is None
        else max_context,
    )
    rollout = {
        **options.select("tasks", "samples", "top_p", "top_k", *options.LIMITS),
        "temperature": options.choose_temperature(1.0) or 1.0,  # a recipe's is never greedy
        "min_p": 0.0,
        "branch": branch,
        "concurrency": concurrency,
        "deadline": deadline,
    }
    config = settings(policy.config, rollout=rollout, task={"reward": reward or "", "agent": ""})
    refuse_truncation(config, next(iter(branch), "") if isinstance(branch, Mapping) else branch)
    name, make_env = env_maker(env, policy.tokenizer)
    check_calls(config, policy.actions, make_env, [EnvItem(env=name)])
    grows, learns = _branch_of(engine, config, branch)
    with (
        engine.sampling() as sampler,
        _drawn(engine, name, tasks, seed) as (listed, step),
        ProgressLine(f"collect {name}", len(listed), "tasks", progress) as line,
        ExitStack() as opened,
    ):
        check_tasks(listed, env, reward is not None or agent is not None)
        setup = make_setup(config, sampler, policy.chat, make_env, policy.actions)
        agents = None if agent is None else opened.enter_context(_agents_of(agent, engine))
        setup = replace(
            setup,
            sampling=options.make_sampling(),
            salt=(engine.seed if seed is None else seed) * TRAIN_SEEDS + step,
            samples=config.rollout.samples,
            self_play=True,
            agent=agents,
        )
        if learns is not None:
            learns.begin(step)
        rewards: list[float] = []

        def note(episode: Episode) -> None:
            rewards.extend(leaf.reward for leaf in episode.leaves if leaf.status.is_trainable)
            line.advance(f"reward {fmean(rewards):.3f}" if rewards else "")

        async with line.ticking():
            episodes = await collect_async(
                listed, setup, grows, concurrency=concurrency, on_episode=note
            )
    if learns is not None:
        learns.settle(episodes)
    for episode in episodes:
        episode.spans[0].info |= {TEMPERATURE: temperature, TRUNCATION: [top_k, top_p]}
    if reason := explain_dead(episodes):
        warnings.warn(f"collect: {reason}; learner.step() refuses these episodes", stacklevel=2)
    return episodes


@contextmanager
def _agents_of(agent: AgentLike, engine: PolicyEngine) -> Iterator[AgentAttempts]:
    """The agent behind an address of its own, for one collection."""
    from graft.gateway.address import GatewayAddress
    from graft.gateway.attempts import AgentAttempts
    from graft.gateway.programs import make_program

    with frozen_samplers(engine, getattr(agent, "options", {})) as options:
        agents = AgentAttempts(make_program(agent), GatewayAddress(), **options)
        try:
            yield agents
        finally:
            agents.close()


def _is_number(tasks: Any) -> TypeGuard[int]:
    if isinstance(tasks, int) and not isinstance(tasks, bool):
        return True
    if isinstance(tasks, Sequence) and not isinstance(tasks, str):
        return False
    raise UserCodeError(
        f"tasks is {describe_value(tasks)}; give a number, or a list of Tasks or prompts"
    )


@contextmanager
def _drawn(
    engine: PolicyEngine, env: str, tasks: int | Sequence[Task | str], seed: int | None
) -> Iterator[tuple[list[Task], int]]:
    """The tasks of a collection and its number; where it fails, the next one draws them again."""
    from graft.train.tasks import TaskStream

    if seed is not None:
        stream, step = TaskStream(env, seed), 1
    else:
        stream = engine.streams.setdefault(env, TaskStream(env, engine.seed))
        step = engine.calls[env] = engine.calls.get(env, 0) + 1
    first = stream.cursor
    if isinstance(tasks, int):
        listed = [next(stream) for _ in range(tasks)]
    else:
        listed = [as_task(given, number, env) for number, given in enumerate(tasks)]
    last = stream.cursor
    try:
        yield listed, step
    except BaseException:
        if seed is None and stream.cursor == last and engine.calls[env] == step:
            stream.cursor, engine.calls[env] = first, step - 1
        raise


def _branch_of(
    engine: PolicyEngine, config: Config, branch: BranchLike
) -> tuple[Branch, Stateful | None]:
    """The branch by its description, twice where it learns from one collection to the next."""
    from graft.algos.presets import PRESETS
    from graft.protocols import Stateful
    from graft.train.algorithm import branch_of

    key = f"{branch!r} {config.rollout.samples}"
    if key not in engine.branches:
        made = branch_of(config, PRESETS["grpo"], engine.policy.actions)
        if not isinstance(made, Stateful):
            return made, None
        engine.branches[key] = made
    return engine.branches[key], engine.branches[key]
