"""Many episodes at once, without a barrier: each continues as soon as its own answer is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from inspect import isawaitable

from graft.ours import is_ours
from graft.rollout.branches.branch import Branch
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.event_loop import run
from graft.rollout.failure import CommonMistake, RolloutFailure, concurrently
from graft.rollout.outcomes import is_flat
from graft.rollout.setup import RolloutSetup
from graft.types import Episode, Task
from graft.user_code import UserCodeError, UserObject, naming, refusal, source_of


async def build_episode(
    task: Task,
    setup: RolloutSetup,
    branch: Branch,
    index: int = 0,
    on_failure: Callable[[RolloutFailure], None] = lambda failure: None,
) -> Episode:
    """One episode, from its prompt to its last leaf.

    `index` is the position of the task among those that are attempted together; `on_failure` is called
    with the failure of each attempt.
    """
    async with EpisodeBuilder(task, setup, index) as builder:
        builder.on_failure = on_failure
        try:
            await builder.open()
            await _run_branch(builder, branch)
            check_complete(builder, branch)
        except RolloutFailure as failure:
            builder.settle()
            builder.fail(failure)
            on_failure(failure)
        else:
            builder.settle()
        return builder.episode


async def _run_branch(builder: EpisodeBuilder, branch: Branch) -> None:
    if builder.is_match and not getattr(branch, "plays_matches", False):
        raise UserCodeError(
            f"{UserObject(branch, 'branch')} forks single trajectories, and env "
            f"{builder.episode.task.env!r} is played by several seats; use rollout.branch=independent, or "
            "self_play=False in task.args"
        )
    if builder.setup.agent is not None and not getattr(branch, "runs_programs", False):
        raise UserCodeError(
            f"{UserObject(branch, 'branch')} forks attempts inside the engine, and those of task.agent are "
            "made by programs; use rollout.branch=independent"
        )
    running = branch(builder)
    if not isawaitable(running):
        raise refusal(UserObject(branch, "branch"), running, "an awaitable: write `async def`")
    with nullcontext() if is_ours(source_of(branch)) else naming(branch, "branch", RolloutFailure):
        await running


def check_complete(builder: EpisodeBuilder, branch: Branch) -> None:
    """Refuse a branch that leaves attempts unfinished, or makes another number than required."""
    made = builder.trajectories
    live = [trajectory for trajectory in made if trajectory.is_live]
    if live:
        raise UserCodeError(
            f"{UserObject(branch, 'branch')} returned while {len(live)} of its {len(made)} attempts were "
            "not over; `await trajectory.finish()` for each, or asyncio.gather them"
        )
    count = builder.num_attempts
    required = builder.setup.samples
    if required is not None and count != required and not getattr(branch, "any_number", False):
        raise UserCodeError(
            f"{UserObject(branch, 'branch')} made {count} attempts, and rollout.samples={required}; take "
            "`samples` as a parameter of the function that makes the branch, and start that many. "
            "branch.any_number = True allows another number"
        )


def collect(
    tasks: Sequence[Task],
    setup: RolloutSetup,
    branch: Branch,
    *,
    concurrency: int = 256,
    indices: Sequence[int] | None = None,
) -> list[Episode]:
    """Episodes of all tasks, in the order of the tasks; at most `concurrency` at a time.

    `indices` are the positions of the tasks, where these are only some of those attempted together.
    """
    return run(
        lambda: collect_async(tasks, setup, branch, concurrency=concurrency, indices=indices)
    )


async def collect_async(
    tasks: Sequence[Task],
    setup: RolloutSetup,
    branch: Branch,
    *,
    concurrency: int = 256,
    on_episode: Callable[[Episode], None] | None = None,
    indices: Sequence[int] | None = None,
) -> list[Episode]:
    """`collect` on the running event loop."""
    indices = range(len(tasks)) if indices is None else indices
    mistakes = CommonMistake()

    async def build(numbered: tuple[int, Task]) -> Episode:
        index, task = numbered
        episode = await build_episode(task, setup, branch, index, mistakes.note)
        if on_episode is not None:
            on_episode(episode)
        return episode

    episodes = await concurrently(build, zip(indices, tasks, strict=True), concurrency)
    mistakes.check(leaf.status for episode in episodes for leaf in episode.leaves)
    return episodes


def collect_informative(
    tasks: Iterator[Task],
    wanted: int,
    collect_some: Callable[[Sequence[Task]], list[Episode]],
    max_rounds: int,
) -> tuple[list[Episode], list[Episode]]:
    """DAPO's dynamic sampling: draw tasks until `wanted` groups have some variance in reward.

    Returns (kept, set aside). After `max_rounds` draws the step takes the groups that there are; flat
    groups fill the places that are left, so that a step never trains on nothing.
    """
    kept: list[Episode] = []
    flat: list[Episode] = []
    for _ in range(max_rounds):
        drawn = collect_some([next(tasks) for _ in range(wanted - len(kept))])
        kept += [episode for episode in drawn if not is_flat(episode)]
        flat += [episode for episode in drawn if is_flat(episode)]
        if len(kept) == wanted:
            return kept, flat
    missing = wanted - len(kept)
    return [*kept, *flat[:missing]], flat[missing:]
