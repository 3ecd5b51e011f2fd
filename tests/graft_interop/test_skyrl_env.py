"""graft's environments in SkyRL-Gym, with the real package; SkyRL's generator makes these calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graft_interop.skyrl import register, rows

skyrl_gym = pytest.importorskip("skyrl_gym")

pytestmark = pytest.mark.peer
GUESS = "game:GuessTheNumber-v0"


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    known = dict(skyrl_gym.registry)
    yield
    skyrl_gym.registry.clear()
    skyrl_gym.registry.update(known)


def made(row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """An env and its first messages, as SkyRL's generator gets them from a row."""
    extras = {name: one for name, one in row.items() if name not in ("prompt", "env_class")}
    env = skyrl_gym.make(row["env_class"], env_config={}, extras={**extras, "max_turns": 10})
    messages, metadata = env.init(row["prompt"])
    assert metadata == {"seed": row["seed"]}
    return env, messages


def test_a_rollout_is_played_to_its_end():
    register(GUESS)
    row = rows(GUESS, 2, seed=4)[1]
    env, messages = made(row)
    assert messages == row["prompt"] and env.spec.id == GUESS
    hidden = env.dialogue.env.answer
    first = env.step(f"\\boxed{{{hidden - 1}}}")
    assert first["reward"] == 0.0 and first["done"] is False
    assert [one["role"] for one in first["observations"]] == ["user"]
    assert first.get("postprocessed_action") is None
    last = env.step(f"\\boxed{{{hidden}}}")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"turns": 2, "reward": 1.0}
    from skyrl_gym.metrics import aggregate_for_environment

    means = aggregate_for_environment(GUESS, [env.get_metrics(), {"turns": 4, "reward": 0.0}])
    assert means == {"turns": 3.0, "reward": 0.5}
    env.close()


def test_a_group_has_one_task_and_tools_answer():
    args: Any = {"wrappers": {"tools": {"use": "calculator", "format": "gem"}}}
    name = register(GUESS, name="guess-with-tools", **args)
    assert register(GUESS, name=name, **args) == name
    with pytest.raises(ValueError, match="name of its own"):
        register(GUESS, name=name)
    (row,) = rows(GUESS, 1, name=name, **args)
    (env, messages), (_, same) = made(row), made(row)
    assert messages == same == row["prompt"]
    answer = env.step("<calculator>2+3</calculator>")
    assert answer["observations"] == [{"role": "tool", "content": "5"}]
    assert answer["metadata"]["tool_uses"] == 1
    with pytest.raises(ValueError, match=r"sampling_params.stop=\['</calculator>'\]"):
        env.step("<calculator>2+3</calculator> is 5")


def test_what_skyrl_cannot_show_is_refused():
    with pytest.raises(ValueError, match="different tasks"):
        made({"env_class": register(GUESS), "prompt": []} | {"seed": None})
    hermes: Any = {"wrappers": {"tools": {"use": "calculator", "format": "hermes"}}}
    row = rows(GUESS, 1, name=register(GUESS, name="hermes", **hermes), **hermes)[0]
    with pytest.raises(ValueError, match="'format': 'tags'"):
        made(row)
    register(GUESS, name="history", wrappers="concat")
    with pytest.raises(ValueError, match="leave concat"):
        made({"env_class": "history", "prompt": [], "seed": 1})
