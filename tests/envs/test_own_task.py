"""A person's own question in an environment's place for one."""

from __future__ import annotations

import pytest

import graft
from graft.envs.base import BaseEnv
from graft.envs.own_task import own_task, reworded
from graft.types import Turn

ROWS = [{"problem": "What is 2+2?", "answer": "4"}]


def test_tools_answer_and_nothing_is_graded():
    env = own_task(graft.make("calculator"), "12+34*5=")
    observation, info = env.reset(seed=1)
    assert (observation, info["answer"]) == ("12+34*5=", None)
    assert env.step("[34*5]").observation == "170;"
    twin = env.fork()
    turn = twin.step("182")
    assert turn.terminated and turn.reward == 0.0
    assert env.step("[12+170]").observation == "182;"  # the fork's end is not its source's


def test_a_datasets_prompt_keeps_its_request():
    env = own_task(graft.make("math:Math12K", rows=ROWS), "What is 3+3?")
    observation, _ = env.reset(seed=0)
    original, _ = graft.make("math:Math12K", rows=ROWS).reset(seed=0)
    assert "What is 3+3?" in observation and "\\boxed" in observation
    assert observation.replace("3+3", "2+2") == original


def test_wrappers_stay_around_it():
    wrappers = [{"tools": {"use": ["calculator"]}}, "episode_tracking"]
    env = own_task(graft.make("math:Math12K", rows=ROWS, wrappers=wrappers), "What is 3+3?")
    observation, _ = env.reset(seed=0)
    assert "\n\nWhat is 3+3?" in observation and "<calculator>" in observation
    turn = env.step("<calculator>3+3</calculator>")
    assert "6" in turn.observation and not turn.terminated


def test_a_system_message_stays():
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}
    assert reworded([system, user], "", "3+3?") == [system, {"role": "user", "content": "3+3?"}]


def test_an_environment_of_ones_own_with_one_question_takes_another():
    class Mine(BaseEnv):
        def pose(self) -> str:
            return "say a"

        def respond(self, action: str) -> Turn:
            return Turn(reward=1.0, terminated=True)

    env = own_task(Mine(), "say b")
    assert env.reset(seed=0)[0] == "say b"
    assert env.step("b").reward == 0.0


@pytest.mark.parametrize("env_id", ["game:Wordle-v0-easy", "game:GuessTheNumber-v0"])
def test_a_game_is_refused_with_the_way_out(env_id):
    with pytest.raises(ValueError, match=rf"{env_id} cannot ask your own question: .*--seed N"):
        own_task(graft.make(env_id), "play something else")
