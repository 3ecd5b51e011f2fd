"""What a reward sees of an environment, and several rewards added up, in whole episodes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from graft.rewards import make_reward
from graft.rewards.weighted import Component, WeightedSum
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.rollout.user_calls import last_info
from graft.text.chat import Chat
from graft.train.step_metrics import describe
from graft.types import Episode, Sampling, Task, Trajectory, Turn
from tests.rollout.test_rollout_tool_faults import BYTES, Question, Scripted


class Counting(Question):
    """Two turns; the info beside its answers is no JSON."""

    max_turns = None

    def pose(self) -> str:
        self.turn = 0
        return super().pose()

    def reset(self, seed: int | None = None) -> Any:
        observation, info = super().reset(seed)
        return observation, {**info, "lives": 3}

    def respond(self, action: str) -> Turn:
        self.turn += 1
        info = {"turn": np.int64(self.turn), "score": np.float32(0.5), "board": np.zeros((2, 2))}
        return Turn("more", reward=1.0, terminated=self.turn == 2, info=info)


def make_setup(*scripts: list[str], env: type = Counting, **changes: Any) -> RolloutSetup:
    engine: Any = Scripted(scripts)
    changes = {"sampling": Sampling(max_tokens=64), **changes}
    return RolloutSetup(engine=engine, chat=Chat(BYTES), make_env=lambda task: env(), **changes)


def grown(where: RolloutSetup) -> Episode:
    (episode,) = collect([Task("t", "counting")], where, independent(1))
    return episode


def by_info(task: Task, trajectory: Trajectory) -> float:
    return trajectory.info["score"] + 10 * trajectory.info["turn"]


def test_a_reward_reads_the_environments_last_info_and_the_log_keeps_it():
    episode = grown(make_setup(["1", "42"], reward=by_info))
    (leaf,) = episode.leaves
    assert leaf.reward == 20.5
    assert leaf.info == {"turn": 2, "score": 0.5, "board": [[0.0, 0.0], [0.0, 0.0]]}
    assert Episode.loads(episode.dumps()) == episode
    (row,) = Episode.loads(episode.dumps()).trajectories()
    assert by_info(episode.task, row) == 20.5  # graded again from the log: the same


def test_before_any_answer_the_last_info_is_that_of_the_reset_without_the_tasks_own():
    episode = grown(make_setup(["1" * 70], reward=lambda task, row: row.info["lives"]))
    assert episode.leaves[0].reward == 3
    assert "answer" not in episode.leaves[0].info


def test_functions_of_verl_and_trl_find_it_too(monkeypatch):
    def verl(data_source, solution_str, ground_truth, extra_info=None):
        return extra_info["env_info"]["turn"]

    def trl(completions, env_info, **columns):
        return [info["score"] for info in env_info]

    monkeypatch.setattr(f"{__name__}.by_info", verl)
    assert (
        grown(make_setup(["1", "42"], reward=make_reward(f"{__name__}:by_info"))).leaves[0].reward
        == 2
    )
    monkeypatch.setattr(f"{__name__}.by_info", trl)
    assert (
        grown(make_setup(["1", "42"], reward=make_reward(f"{__name__}:by_info"))).leaves[0].reward
        == 0.5
    )


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("info", "kept"),
    [
        ({"a": 1, "b": "x" * 5000}, {"a": 1, "left_out": ["b"]}),
        ({"a": float("nan"), "b": {3, 4}}, {"a": None, "b": [3, 4]}),
        ({"a": Rude(), "b": 2}, {"b": 2, "left_out": ["a"]}),
        ({"a": "\ud800", "b": 2}, {"b": 2, "left_out": ["a"]}),
        (None, {}),
    ],
)
def test_an_info_is_kept_as_json_of_bounded_size(info, kept):
    assert last_info(info) == kept


def test_many_entries_are_bounded_too():
    kept = last_info({f"k{i}": "x" * 4000 for i in range(9)})
    assert len(kept) == 5 and kept["left_out"] == [f"k{i}" for i in range(4, 9)]


def test_rewards_are_added_up_by_weight_and_each_is_a_metric():
    def right(task, trajectory):
        return float(task.answer in trajectory.text)

    def length(task, trajectory):
        return float(len(trajectory.text))

    total = WeightedSum((Component("right", right), Component("length", length, -0.25)))
    where = make_setup(["42"], ["7"], env=Question, reward=total)
    (episode,) = collect([Task("t", "question")], where, independent(2))
    assert [leaf.reward for leaf in episode.leaves] == [0.5, -0.25]
    parts = [(x.metrics["reward/right"], x.metrics["reward/length"]) for x in episode.leaves]
    assert parts == [(1.0, 2.0), (0.0, 1.0)]
    metrics = describe([episode])
    assert (metrics["reward"], metrics["reward/right"], metrics["reward/length"]) == (
        0.125,
        0.5,
        1.5,
    )


def test_of_several_rewards_only_those_that_wait_run_in_threads_and_side_by_side():
    """Two judges meet at a barrier, which one alone would wait at for ever; a grader that sets
    alarms has to stay in the rollout's own thread."""
    barrier, threads = threading.Barrier(2, timeout=10), dict[str, threading.Thread]()

    class Judge:
        blocking = True

        def __call__(self, task, trajectory):
            barrier.wait()
            return 1.0

    class Noting(Counting):
        def respond(self, action: str) -> Turn:
            threads["env"] = threading.current_thread()
            return super().respond(action)

    def grader(task, trajectory):
        threads["grader"] = threading.current_thread()
        return 1.0

    total = WeightedSum((Component("a", Judge()), Component("g", grader), Component("b", Judge())))
    assert total.blocking
    (leaf,) = grown(make_setup(["1", "42"], env=Noting, reward=total)).leaves
    assert leaf.reward == 3.0
    assert threads["grader"] is threads["env"]


def test_a_component_that_is_no_number_is_named():
    def bad(task, trajectory):
        return "much"

    total = WeightedSum((Component("fine", lambda *_: 1.0), Component("bad", bad)))
    with pytest.raises(ValueError, match=r"reward .*bad .*returned the text 'much'"):
        grown(make_setup(["1", "42"], reward=total))
    with pytest.raises(ValueError, match=r"reward .*bad .*returned the text 'much'"):
        total(*one_attempt())


def one_attempt() -> tuple[Task, Trajectory]:
    episode = grown(make_setup(["1", "42"]))
    return episode.task, next(episode.trajectories())
