"""Turns that the limit of tokens cuts off: the end of the attempt, or a step that the environment answers."""

from __future__ import annotations

from typing import Any

import pytest

from graft.config import load_config
from graft.envs import make
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.live_trajectory import INVALID_ACTION
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.train.build import make_setup
from graft.types import Author, Leaf, Sampling, Status, Task, Turn
from tests.rollout.test_rollout_tool_faults import BYTES, Question, Scripted

LONG = "so I think of \\boxed{5} and then of " + "nothing " * 20


def attempt(env: Any, *texts: str, **changes: Any) -> tuple[Leaf, list[float]]:
    """The leaf of an attempt that writes these texts in turns of 60 tokens, and the rewards of its turns."""
    engine: Any = Scripted([texts])
    sampling = Sampling(max_tokens=60)
    where = RolloutSetup(engine, Chat(BYTES), lambda task: env(), sampling, **changes)
    (episode,) = collect([Task("t", "toy", seed=1)], where, independent(1))
    (leaf,) = episode.leaves
    return leaf, [span.reward for span in episode.spans if span.author is Author.POLICY]


@pytest.mark.parametrize(
    ("env", "reward"),
    [
        ("game:GuessTheNumber-v0", -0.1),  # a format error of the game
        ("code:Taco8k", -0.1),  # no block
        ("math:Math12K", 0.0),
        ("rg:chain_sum", 0.0),
    ],
)
def test_a_cut_response_costs_what_gems_environments_say(env: str, reward: float):
    row = {"problem": "?", "answer": "5", "tests": {"inputs": ["1"], "outputs": ["1"]}}
    rows = {} if env.startswith(("game", "rg")) else {"rows": [row]}
    leaf, turns = attempt(lambda: make(env, **rows), LONG, cut_turns="step")
    assert (leaf.reward, turns, leaf.status) == (reward, [reward], Status.DONE)
    leaf, _ = attempt(lambda: make(env, **rows), LONG)
    assert (leaf.reward, leaf.status) == (0.0, Status.TRUNCATED)


class Patient(Question):
    """Counts invalid actions, and goes on until an answer comes."""

    max_turns = None
    given: list[str] = []

    def respond(self, action: str) -> Turn:
        self.given.append(action)
        is_valid = action != INVALID_ACTION
        return Turn("again", reward=1.0 if is_valid else -0.5, terminated=is_valid)


def test_an_environment_that_goes_on_is_answered_in_the_next_turn():
    Patient.given.clear()
    leaf, turns = attempt(Patient, LONG, LONG, "42", cut_turns="step")
    assert (turns, leaf.reward, leaf.status) == ([-0.5, -0.5, 1.0], 0.0, Status.DONE)
    assert Patient.given == [INVALID_ACTION, INVALID_ACTION, "42"]
    leaf, turns = attempt(Patient, LONG, LONG, cut_turns="step", max_turns=2)
    assert (turns, leaf.status) == ([-0.5, -0.5], Status.TRUNCATED)


def test_gems_recipes_step_with_cut_turns_and_others_end_there():
    for name in ("math12k", "math12k-python", "hotpotqa-search", "guess-the-number", "arc-1d"):
        assert load_config(f"gem/{name}").rollout.cut_turns == "step"
    config = load_config("quickstart")
    assert config.rollout.cut_turns == "end"
    stepping = config.changed({"rollout.cut_turns": "step"})
    setup = make_setup(stepping, Scripted([]), Chat(BYTES), lambda task: Question())  # type: ignore
    assert setup.cut_turns == "step"
