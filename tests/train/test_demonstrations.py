"""The demonstrations of a step: those of its tasks, from one environment at a time."""

from __future__ import annotations

import random

import pytest

from graft.envs.base import BaseEnv, Trace
from graft.rollout.demonstration import demonstration
from graft.rollout.setup import draw_key
from graft.train.build import build_run
from graft.train.sft_dataset import demonstrations
from graft.train.tasks import TaskStream
from graft.types import Author, Turn
from tests.train.sft_kit import TINY, recipe

SEED = 1  # of the recipe


class Counted(BaseEnv):
    """Its texts tell how many environments were made, reset and closed before."""

    made, begun, closed = 0, 0, 0
    observe_as = "inline"

    def __init__(self) -> None:
        super().__init__()
        Counted.made += 1

    def pose(self) -> str:
        Counted.begun += 1
        return f"{self.made} {self.begun} {self.closed}"

    def respond(self, action: str) -> Turn:
        return Turn(terminated=True)

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, f"{self.made} {self.begun} {self.closed}")]

    def close(self) -> None:
        Counted.closed += 1


def test_environments_are_made_and_closed_one_after_the_other(tmp_path):
    run = build_run(recipe(tmp_path, {"steps": 2, "batch": 3}, task={"env": f"{__name__}:Counted"}))
    Counted.made = Counted.begun = Counted.closed = 0
    for step in (0, 1):
        for number, episode in enumerate(demonstrations(run)(step + 1), 3 * step):
            text = f"{number + 1} {number + 1} {number}"
            assert episode.task.prompt == ({"role": "user", "content": text},)
            assert episode.spans[1].text == text


@pytest.mark.parametrize(
    ("task", "actions"),
    [
        ({"env": "calculator"}, {}),
        ({"env": "calculator", "args": {"syntax": "actions"}}, {"file": "compact"}),
        ({"env": ["calculator", "graft_envs.games.guess:CompactGuess"], "prefill": "1"}, {}),
    ],
)
def test_a_step_has_the_demonstration_of_each_of_its_tasks(tmp_path, task, actions):
    config = recipe(
        tmp_path, {"steps": 2, "batch": 4}, model={"shape": TINY}, task=task, actions=actions
    )
    run = build_run(config)
    tasks = TaskStream(config.task.envs, SEED, cursor=4)
    assert demonstrations(run)(2) == [
        demonstration(
            one,
            run.setup.make_env(one),
            run.chat,
            draw_key(SEED, one.id, 0),
            run.actions,
            prefill=config.task.prefill,
        )
        for one in (next(tasks) for _ in range(4))
    ]
