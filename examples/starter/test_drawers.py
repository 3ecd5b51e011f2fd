"""Tests of the environment, the tool and the reward: `python -m pytest` in this folder, in seconds."""

from reward import found

import graft
from graft.types import Author


def make():
    """An attempt at a task of two drawers: 3, then 7; the letter is c."""
    env = graft.make("drawers:Drawers", hops=(2, 2))
    env.reset(seed=0)
    inner = env.unwrapped
    inner.path, inner.answer = [3, 7], "c"
    return env


def test_notes_lead_to_the_letter():
    env = make()
    assert env.step("[3]").observation == "7;"
    assert env.step("[7]").observation == "c;"
    turn = env.step("c")
    assert turn.terminated and turn.reward == 1.0


def test_a_drawer_is_locked_until_a_note_names_it():
    env = make()
    assert env.step("[7]").observation == "x;"
    assert env.step("[3]").observation == "7;"
    assert env.step("c").info["locked"] == 1


def test_every_attempt_has_drawers_of_its_own():
    env = make()
    twin = env.fork()
    assert env.step("[3]").observation == "7;"
    assert twin.step("[7]").observation == "x;"  # still locked there


def test_no_text_of_the_policy_raises():
    for action in ("", "[", "[]", "[99]", "[a]", "x" * 100):
        make().step(action)


def test_demonstrations_are_right():
    env = graft.make("drawers:Drawers")
    for seed in range(20):
        env.reset(seed=seed)
        trace = env.demonstrate(env.unwrapped.rng, open_rate=1.0)
        turns = [env.step(text) for author, text in trace if author is Author.POLICY]
        assert turns[-1].reward == 1.0 and turns[-1].info["locked"] == 0


class Attempt:
    """What the reward reads of a trajectory."""

    def __init__(self, answer_text, locked):
        self.answer_text, self.info = answer_text, {"locked": locked}


def test_the_reward_counts_locked_drawers():
    task = graft.Task("1", "drawers", answer="c")
    assert found(task, Attempt("c", locked=0)) == 1.0
    assert found(task, Attempt("c", locked=2)) == 0.8
    assert found(task, Attempt("d", locked=0)) == 0.0


def test_the_recipe_is_valid():
    recipe = graft.load_recipe("recipe.yaml")
    assert recipe.task.env == "drawers:Drawers"
