"""Countdown: solvable instances, three levels of pay, answers in a tag or bare."""

from __future__ import annotations

import random

import pytest

from graft.envs import make
from graft.envs.countdown import Countdown, draw_solution
from graft.envs.splits import split_of
from graft.tools.calculator import work
from graft.types import Author


def test_instances_are_the_same_on_every_machine():
    env = make("countdown")
    drawn = [(env.reset(seed), env.answer)[1] for seed in (0, 1, 2)]
    assert drawn == [
        {"numbers": [4, 14, 42, 23], "target": 35},
        {"numbers": [21, 39, 17, 42], "target": 836},
        {"numbers": [74, 84, 6, 35], "target": 185},
    ]
    test = make("countdown", split="test")
    test.reset(0)
    assert test.answer == {"numbers": [18, 26, 20], "target": 24}


def test_the_prompt_names_numbers_target_and_tag():
    prompt, _ = make("countdown").reset(0)
    assert "4, 14, 42, 23 into 35" in prompt
    assert "<answer>" in prompt
    assert "<result>" in make("countdown", tag="result").reset(0)[0]
    assert "<" not in make("countdown", tag=None).reset(0)[0]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>4 / (14 / 42) + 23</answer>", 1.0),
        ("hm <answer>1</answer> no: <answer> 4 * 42 / 14 + 23 = 35 </answer>.", 1.0),
        ("<answer>4 * 42 / 14 + 23</answer> or <answer>1</answer>", 0.1),
        ("<answer>12 + 23</answer>", 0.1),
        ("<answer>9**9**9</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("4 * 42 / 14 + 23", 0.0),
        ("<answer>4 * 42 / 14 + 23", 0.0),
        ("", 0.0),
    ],
)
def test_right_well_formed_and_neither_are_paid_apart(text: str, reward: float):
    env = make("countdown")
    env.reset(0)  # 4, 14, 42, 23 into 35
    turn = env.step(text)
    assert (turn.reward, turn.terminated) == (reward, True)
    assert turn.info == {"is_right": reward == 1.0, "has_form": reward > 0.0}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("4*42/14+23", 1.0),
        (" 4*42/14+23 = 35", 1.0),
        ("42-4", 0.25),
        ("so 4*42/14+23", 0.0),
        ("", 0.0),
    ],
)
def test_without_a_tag_the_whole_text_is_the_answer(text: str, reward: float):
    env = make("countdown", tag=None, format_reward=0.25)
    env.reset(0)
    assert env.step(text).reward == reward


def test_every_instance_is_solved_by_its_demonstration():
    for options in ({}, {"tag": None}, {"split": "test"}, {"count": (2, 6), "numbers": (1, 9)}):
        env = make("countdown", **options)
        for seed in range(20):
            env.reset(seed)
            [(author, text)] = env.demonstrate(random.Random(seed))
            assert author is Author.POLICY
            assert env.step(text).reward == 1.0


def test_settings_bound_what_is_drawn_and_splits_follow_the_instance():
    env = Countdown(count=(2, 3), numbers=(5, 9), targets=(10, 20))
    for seed in range(60):
        env.reset(seed)
        numbers, target = env.answer["numbers"], env.answer["target"]
        assert len(numbers) in (2, 3)
        assert all(5 <= number <= 9 for number in numbers)
        assert 10 <= target <= 20
        assert split_of(f"{sorted(numbers)} {target}") == "train"


def test_solutions_use_each_number_once_in_every_shape_and_order():
    rng = random.Random(0)
    drawn = [draw_solution(rng, [1, 2, 3]) for _ in range(2000)]
    assert all(sorted(work(text).numbers) == [1, 2, 3] for text in drawn)
    shapes = {"".join("n" if char.isdigit() else char for char in text) for text in drawn}
    assert len(shapes) == 2 * 4 * 4  # (n . n) . n and n . (n . n), four signs each
    orders = {tuple(char for char in text if char.isdigit()) for text in drawn}
    assert len(orders) == 6
    assert draw_solution(rng, [7]) == "7"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": (1, 3)}, "count"),
        ({"numbers": (9, 1)}, "numbers"),
        ({"targets": (-1, 3)}, "targets"),
        ({"format_reward": 1.0}, "format_reward=1.0"),
        ({"split": "dev"}, "split='dev'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        make("countdown", **options)


def test_a_range_that_cannot_be_met_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("graft.envs.countdown.MAX_TRIES", 100)
    with pytest.raises(ValueError, match="widen"):
        Countdown(numbers=(1, 2), targets=(900, 999)).reset(0)
