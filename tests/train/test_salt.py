"""task.salt: training tasks that cannot be generated again from the seed of the run."""

from __future__ import annotations

import pytest

from graft.config import ConfigError, load_config
from graft.envs import make
from graft.envs.base import salted
from graft.train.build import env_factory
from graft.train.model import load_tokenizer, source_of
from graft.train.tasks import TaskStream, held_out_tasks


def posed(*overrides: str, held_out: bool = False) -> list[str]:
    config = load_config("quickstart", list(overrides))
    make = env_factory(config, load_tokenizer(config, source_of(config)), held_out)
    stream = TaskStream(config.task.envs, config.run.seed)
    tasks = held_out_tasks(config.task.envs[0], 4) if held_out else [next(stream) for _ in range(4)]
    return [str(make(task).reset(task.seed)[0]) for task in tasks]


def test_a_salt_changes_training_tasks_and_leaves_held_out_ones():
    plain, salty = posed(), posed("task.salt=one")
    assert posed("task.salt=one") == salty != plain
    assert posed("task.salt=two") not in (plain, salty)
    assert posed("task.salt=one", held_out=True) == posed(held_out=True)
    assert posed("task.salt=") == plain
    assert salted(7, "") == 7 and 0 <= salted(7, "a") < 2**53


def test_a_game_with_several_seats_is_salted_too():
    games = []
    for salt in ("", "one", "one"):
        env = make("selfplay:split")
        env.unwrapped.task_salt = salt
        env.reset(3)
        games.append(env.unwrapped.game.rng.state)
    assert games[0] != games[1] == games[2]


class Foreign:
    """An environment that is not derived from graft's."""

    blocking, forkable, stop, observe_as = False, True, (), "user"

    def reset(self, seed=None):
        return "2+3=", {"answer": "5"}

    def step(self, action): ...

    def fork(self):
        return self

    def close(self): ...


def test_an_environment_that_cannot_be_salted_is_refused():
    with pytest.raises(ConfigError, match="draws its tasks itself"):
        posed(
            "task.salt=one", f"task.env={__name__}:Foreign", "task.args={}", "model.alphabet=bytes"
        )
