"""What rollouts give to credits: parts of a reward, a greedy attempt, states, roles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import graft
from graft.algos.credits.baselines import remax
from graft.rewards.weighted import Component, WeightedSum
from graft.rollout.batching import stable_number, to_batch, trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.branches.greedy import greedy_baseline
from graft.rollout.collect import collect
from graft.rollout.outcomes import is_flat, missing_share
from graft.rollout.user_calls import state_of
from graft.train.step_metrics import describe
from graft.types import Episode, Leaf, Span, Status, Task, Turn
from graft_envs.games.guess import GuessTheNumber
from tests.rollout.test_episode_builder import TASKS, Echo, make_setup
from tests.trees import group


def test_parts_of_rewards_have_a_column_for_each_name():
    first, second = group([1], [[2], [3]], [1.2, 0.0]), group([1], [[2]], [4.0])
    first.leaves[0].metrics, first.leaves[0].weights = (
        {"reward/a": 1.0, "reward/b": 2.0},
        {"a": 1, "b": 0.1},
    )
    first.leaves[1].metrics, first.leaves[1].weights = (
        {"reward/a": 0.0, "reward/b": 0.0},
        {"a": 1, "b": 0.1},
    )
    batch = to_batch(trajectories_of([first, second]))
    assert batch.part_rewards is not None and batch.part_weights is not None
    assert batch.part_rewards[:2].tolist() == [[1, 2], [0, 0]]
    assert batch.part_rewards[2].isnan().all()
    torch.testing.assert_close(batch.part_weights, torch.tensor([[1, 0.1], [1, 0.1], [0, 0]]))
    assert to_batch(trajectories_of([second])).part_rewards is None


def test_a_weighted_sum_leaves_its_weights_at_the_leaf_and_in_the_log():
    reward = WeightedSum(
        (Component("long", lambda t, r: 3.0, 0.5), Component("right", lambda t, r: 1.0))
    )
    (episode,) = collect(TASKS[:1], make_setup(Echo, reward=reward), independent(2))
    assert episode.leaves[0].weights == {"long": 0.5, "right": 1.0}
    again = Episode.loads(episode.dumps())
    assert again.leaves[0].weights == {"long": 0.5, "right": 1.0}
    batch = to_batch(trajectories_of([again]))
    assert batch.part_rewards is not None and batch.part_rewards.tolist() == [[3, 1]] * 2


def test_roles_are_the_same_numbers_in_every_process():
    episode = group([1], [[2], [3]], [1.0, 0.0])
    episode.leaves[1].seat, episode.leaves[1].metrics = "O", {"turns": 1.0}
    role = to_batch(trajectories_of([episode])).role
    assert role is not None
    assert role.tolist() == [
        stable_number(f"{episode.task.env}/"),
        stable_number(f"{episode.task.env}/O"),
    ]
    assert stable_number("guess/") == 2058987303384662415


def test_the_greedy_attempt_is_a_baseline_and_nothing_else():
    setup = make_setup(Echo, samples=3)
    episodes = collect(TASKS[:2], setup, greedy_baseline(3))
    plain = collect(TASKS[:2], make_setup(Echo), independent(3))
    for episode, other in zip(episodes, plain, strict=True):
        assert [leaf.status is Status.BASELINE for leaf in episode.leaves] == [False] * 3 + [True]
        *rows, greedy = list(episode.trajectories())
        # the sampled attempts are those that there would be without it
        assert [row.tokens for row in rows] == [row.tokens for row in other.trajectories()]
        again = collect([episode.task], replace(setup, salt=7), greedy_baseline(3))[0]
        assert list(again.trajectories())[-1].tokens == greedy.tokens
    batch = to_batch(trajectories_of(episodes))
    assert batch.num_rows == 6 and batch.greedy_reward is not None
    earned = [episode.leaves[3].reward for episode in episodes]
    assert batch.greedy_reward.tolist() == [earned[0]] * 3 + [earned[1]] * 3
    want = (batch.reward - batch.greedy_reward)[:, None] * batch.mask
    torch.testing.assert_close(remax()(batch.zeros(), batch), want)
    assert missing_share(episodes, 3) == 0 and missing_share(episodes, 4) == 0.25
    assert describe(episodes)["reward"] == describe(plain)["reward"]
    assert describe(episodes)["rollout/failed"] == 0


def test_a_task_whose_greedy_attempt_failed_has_none():
    one, two = group([1], [[2], [3]], [1.0, 0.5]), group([1], [[2], [3]], [1.0, 0.5])
    one.leaves[1].status, two.leaves[1].status = Status.BASELINE, Status.ENV_ERROR
    found = to_batch(trajectories_of([one, two])).greedy_reward
    assert found is not None and found[0] == 0.5 and math.isnan(found[1])
    assert is_flat(one)


def test_a_state_is_the_position_whatever_the_number_of_turns():
    game = graft.make("game:TowerofHanoi-v0")
    game.reset(seed=3)
    keys = [game.state_key()]
    for move in ("A C", "C A"):
        game.step(f"\\boxed{{{move}}}")
        keys.append(game.state_key())
    assert keys[0] == keys[2] != keys[1]
    guess = graft.make("game:GuessTheNumber-v0")
    guess.reset(seed=3)
    before = guess.state_key()
    assert isinstance(guess.unwrapped, GuessTheNumber)
    guess.step("\\boxed{1}")
    assert guess.state_key() != before
    assert graft.make("calculator").state_key() == ""


class Rooms(Echo):
    """Names its state itself."""

    def respond(self, action: str) -> Turn:
        return super().respond(action)._replace(info={"state": ["room", self.count % 2]})


def test_turns_that_begin_in_one_state_have_its_number():
    episodes = collect(TASKS[:2], make_setup(Rooms), independent(3))
    batch = to_batch(trajectories_of(episodes))
    states, turns = batch.states, batch.turns
    assert states is not None
    assert (states[turns <= 0] == -1).all()  # reset names none
    rooms = [set(states[turns == turn].tolist()) for turn in (1, 2)]
    assert all(len(room) == 1 for room in rooms) and rooms[0] != rooms[1]
    # a span that is split for a fork begins in the same state with both its parts
    span = next(s for s in episodes[0].spans if "state" in s.info and len(s) > 1)
    head, tail = span.cut(1)
    assert head.info == {"state": span.info["state"]} == {"state": tail.info["state"]}


@pytest.mark.parametrize(("given", "same"), [({"a": [1]}, {"a": [1]}), ("x", "x"), (3, 3)])
def test_a_state_of_any_json_is_a_hash(given, same):
    env = Echo()
    first = state_of(env, {"state": given})
    assert len(first) == 16 and first == state_of(env, {"state": same})
    assert state_of(env, {}) == state_of(env, {"state": ""}) == ""


def test_a_leaf_of_an_older_log_has_no_weights():
    episode = Episode(Task("t", "env"), [Span(None, "task", [1])], [Leaf((0,))])  # type: ignore[arg-type]
    data = episode.to_json()
    del data["leaves"][0]["weights"]
    assert Episode.from_json(data).leaves[0].weights == {}
