"""Many episodes at once, without a barrier: each goes on as soon as its own answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from inspect import isawaitable

from graft.rollout.branches.branch import Branch
from graft.rollout.episode_builder import EpisodeBuilder, RolloutSetup
from graft.rollout.event_loop import run
from graft.rollout.failure import RolloutFailure, together
from graft.types import Episode, Status, Task
from graft.user_code import Giver, UserCodeError, naming, refusal, source_of


async def grow(task: Task, setup: RolloutSetup, branch: Branch, place: int = 0) -> Episode:
    """One episode, from its prompt to its last leaf; `place` is the task's among its neighbours."""
    async with EpisodeBuilder(task, setup, place) as builder:
        try:
            await builder.open()
            await _grown(builder, branch)
            check_grown(builder, branch)
        except RolloutFailure as failure:
            builder.settle()
            builder.fail(failure)
        else:
            builder.settle()
        return builder.episode


async def _grown(builder: EpisodeBuilder, branch: Branch) -> None:
    growing = branch(builder)
    if not isawaitable(growing):
        raise refusal(Giver(branch, "branch"), growing, "an awaitable: write `async def`")
    is_ours = getattr(source_of(branch), "__module__", "").startswith("graft.")
    with nullcontext() if is_ours else naming(branch, "branch", RolloutFailure):
        await growing


def check_grown(builder: EpisodeBuilder, branch: Branch) -> None:
    """Refuse a branch that leaves attempts unfinished, or grows another number than was asked for."""
    live = [path for path in builder.paths if path.is_live]
    if live:
        raise UserCodeError(
            f"{Giver(branch, 'branch')} returned while {len(live)} of its {len(builder.paths)} attempts were "
            "not over; `await path.finish()` for each, or asyncio.gather them"
        )
    own = sum(path.twin_of is None for path in builder.paths)
    wanted = builder.setup.samples
    if wanted is not None and own != wanted and not getattr(branch, "any_number", False):
        raise UserCodeError(
            f"{Giver(branch, 'branch')} grew {own} attempts, and rollout.samples={wanted}; take `samples` as "
            "a parameter of the function that makes the branch and begin so many. "
            "branch.any_number = True says that the number may differ"
        )


def collect(
    tasks: Sequence[Task],
    setup: RolloutSetup,
    branch: Branch,
    *,
    concurrency: int = 256,
    on_episode: Callable[[Episode], None] | None = None,
    places: Sequence[int] | None = None,
) -> list[Episode]:
    """Episodes of all tasks, in the order of the tasks; at most `concurrency` grow at a time.

    `places` are the tasks' numbers among their neighbours, where these are not all of them.
    """
    return run(
        lambda: collect_async(
            tasks, setup, branch, concurrency=concurrency, on_episode=on_episode, places=places
        )
    )


async def collect_async(
    tasks: Sequence[Task],
    setup: RolloutSetup,
    branch: Branch,
    *,
    concurrency: int = 256,
    on_episode: Callable[[Episode], None] | None = None,
    places: Sequence[int] | None = None,
) -> list[Episode]:
    """`collect` on the event loop that is running."""
    places = range(len(tasks)) if places is None else places
    gate = asyncio.Semaphore(concurrency)

    async def one(place: int, task: Task) -> Episode:
        async with gate:
            episode = await grow(task, setup, branch, place)
        if on_episode is not None:
            on_episode(episode)
        return episode

    async with together() as group:
        requests = [
            group.create_task(one(place, task)) for place, task in zip(places, tasks, strict=True)
        ]
    return [request.result() for request in requests]


def is_flat(episode: Episode) -> bool:
    """True if every attempt of the policy's own earned the same: its group-relative advantage is 0.

    Counterfactual attempts are not its own; one that such a twin replaces in training still is.
    """
    rewards = {
        leaf.reward
        for leaf in episode.leaves
        if leaf.twin is None and (leaf.status.is_trainable or leaf.status is Status.REPLACED)
    }
    return len(rewards) < 2


def collect_informative(
    tasks: Iterator[Task],
    wanted: int,
    collect_some: Callable[[Sequence[Task]], list[Episode]],
    max_rounds: int,
) -> tuple[list[Episode], list[Episode]]:
    """DAPO's dynamic sampling: draw tasks until `wanted` groups have some variance in reward.

    Returns (kept, set aside). After `max_rounds` draws the step goes on with what there is; flat
    groups then fill the places that are left, so that a step never trains on nothing.
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
