"""A branch decides where the tree forks: an async function that builds one episode to its leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from graft.plugins import Table
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.failure import concurrently
from graft.types import Task
from graft.user_code import UserCodeError

Branch = Callable[[EpisodeBuilder], Awaitable[None]]


PASS_AT = "pass@k"
"""The field of a row's extra_info with the attempts that an evaluation makes at it (EasyRL)."""


def independent(samples: int | None) -> Branch:
    """`samples` independent trajectories from the prompt: a plain GRPO group.

    None: as many as the task's row asks for, else one.
    """

    async def branch(builder: EpisodeBuilder) -> None:
        count = attempts_of(builder.episode.task) if samples is None else samples
        attempts = [await builder.attempt() for _ in range(count)]
        await concurrently(lambda one: one.finish(), attempts)

    branch.plays_matches = branch.runs_programs = True  # pyright: ignore[reportFunctionMemberAccess]
    return branch


def attempts_of(task: Task) -> int:
    """The attempts that a task's row asks for, else 1."""
    wanted = task.meta.get(PASS_AT, 1)
    if not isinstance(wanted, int) or wanted < 1:
        raise UserCodeError(
            f"task {task.id!r} has {PASS_AT!r}: {wanted!r} in its meta, the number of attempts at it in an "
            "evaluation; give a whole number from 1, or leave it out"
        )
    return wanted


BRANCHES = Table(
    "graft.branches",
    {
        "independent": independent,
        "arpo": "graft.rollout.branches.entropy:arpo",
        "aepo": "graft.rollout.branches.entropy:aepo",
        "greedy_baseline": "graft.rollout.branches.greedy:greedy_baseline",
        "counterfactual": "graft.rollout.branches.counterfactual:Counterfactual",
    },
)
