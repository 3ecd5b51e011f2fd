"""Runs that differ in the seed alone as one curve: the numbers, and the page that draws them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from graft.runs import RunRecord
from graft.runs.curves import SeedSpread, metric_over, spread
from graft.viewer.answers import Answers
from graft.viewer.curves import band
from graft.viewer.runs import open_runs
from tests.viewer.conftest import viewing
from tests.viewer.folders import until, write_run
from tests.viewer.test_viewer_page import BLUE, painted

REWARDS = {"a0": [0.2, 0.4, 0.6], "a1": [0.7, 0.8], "a2": [0.0, 0.0]}
"""Three seeds of one recipe, of unequal length."""


def runs_of(folder: Path) -> list[Path]:
    """The three seeds, and a fourth run with another learning rate."""
    found: list[Path] = []
    for name, rewards in {**REWARDS, "other": [1.0]}.items():
        lines = [
            {"phase": "rl", "step": i + 1, "reward": reward, "step_time": 2.0}
            for i, reward in enumerate(rewards)
        ]
        run = write_run(folder / name, metrics=lines, bytes_tokenizer=False)
        lr = 0.1 if name == "other" else 0.001
        text = f"run: {{name: {name}, seed: {len(found)}}}\ntrain: {{lr: {lr}}}\n"
        (run / "config.yaml").write_text(text, encoding="utf-8")
        found.append(run)
    return found


def records(folder: Path) -> list[RunRecord]:
    found = [RunRecord(path) for path in runs_of(folder)[:3]]
    for record in found:
        record.refresh()
    return found


# numbers


def test_the_mean_and_its_spread_at_each_step_are_of_the_runs_that_have_it(tmp_path):
    found = metric_over([record.curves["rl"] for record in records(tmp_path)], "reward")
    assert found.steps == [1, 2, 3]
    assert found.mean == pytest.approx([0.3, 0.4, 0.6])
    assert (found.low, found.high) == ([0.0, 0.0, 0.6], [0.7, 0.8, 0.6])
    # of 0.2 0.7 0.0, squares 0.01 + 0.16 + 0.09 over 2; of 0.4 0.8 0.0; of 0.6 alone
    assert found.std == pytest.approx([math.sqrt(0.13), 0.4, 0.0])
    assert found.count == [3, 3, 1]


def test_numbers_that_are_not_finite_count_as_missing():
    nan, inf = math.nan, math.inf
    found = spread([([1, 2, 3], [1.0, nan, nan]), ([1, 3], [3.0, inf])])
    assert found == SeedSpread([1], [2.0], [1.0], [3.0], [pytest.approx(math.sqrt(2))], [2])
    assert spread([]) == SeedSpread([], [], [], [], [], [])


def test_steps_that_only_some_runs_wrote_meet_by_number():
    found = spread([([2, 4], [1.0, 2.0]), ([1, 2, 3], [5.0, 3.0, 7.0])])
    assert (found.steps, found.mean) == ([1, 2, 3, 4], [5.0, 2.0, 7.0, 2.0])
    assert found.count == [1, 2, 1, 1]


def test_a_long_band_is_thinned_as_curves_are(tmp_path):
    lines = [{"phase": "rl", "step": i + 1, "reward": float(i)} for i in range(10)]
    made = [
        RunRecord(write_run(tmp_path / name, metrics=lines, bytes_tokenizer=False)) for name in "ab"
    ]
    for record in made:
        record.refresh()
    found = band(made, "rl", ["reward", "nothing"], most=5)
    assert set(found) == {"reward"}
    assert found["reward"]["step"] == [2, 4, 6, 8, 10]
    assert found["reward"]["mean"] == found["reward"]["low"] == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert found["reward"]["std"] == [0.0] * 5 and found["reward"]["count"] == [2] * 5


def test_the_server_groups_runs_that_are_seeds_of_one_recipe_and_answers_their_band(tmp_path):
    answers = Answers(open_runs([str(path) for path in runs_of(tmp_path)]))
    runs = answers.about({})["runs"]
    assert [run["seeds"] for run in runs] == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [3]]
    found = answers.band({"runs": "0,1", "phase": "rl", "metrics": "reward"})["reward"]
    assert found["mean"] == pytest.approx([0.45, 0.6, 0.6])
    assert found["seconds"] == [2.0, 4.0, 6.0]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


# the page


@pytest.mark.slow
def test_the_page_draws_seeds_as_a_mean_with_a_band(page, go, tmp_path):
    with viewing(*runs_of(tmp_path)) as url:
        go(page, url)
        canvas = page.locator('.chart[data-metric="reward"] canvas')
        canvas.wait_for()
        until(lambda: canvas.get_attribute("data-points") == "8")  # every run for itself
        assert painted(page, "reward", BLUE) > 10
        page.locator('select[name="seeds"]').select_option("range")
        until(lambda: canvas.get_attribute("data-points") == "4")  # three means, and the fourth run
        label = canvas.get_attribute("aria-label")
        assert "a0, mean of 3 seeds 0.6" in label and "other 1" in label
        assert shaded(page) > 200
        box = canvas.bounding_box()
        page.mouse.move(box["x"] + 56, box["y"] + 80)
        tip = " ".join(page.locator("#tip").inner_text().split())
        assert "a0, mean of 3 seeds 0.3 [0, 0.7]" in tip
        page.mouse.move(box["x"] + box["width"] - 16, box["y"] + 80)
        tip = " ".join(page.locator("#tip").inner_text().split())
        assert "0.6 [0.6, 0.6], 1 of 3" in tip
        page.locator('select[name="seeds"]').select_option("std")
        page.mouse.move(box["x"] + 56, box["y"] + 80)
        until(lambda: "[-0.06056, 0.6606]" in page.locator("#tip").inner_text())


@pytest.mark.slow
def test_a_hidden_seed_is_not_in_the_mean_and_wall_time_keeps_runs_apart(page, go, tmp_path):
    with viewing(*runs_of(tmp_path)) as url:
        go(page, url)
        canvas = page.locator('.chart[data-metric="reward"] canvas')
        canvas.wait_for()
        page.locator('select[name="seeds"]').select_option("range")
        page.locator('.run[data-run="2"]').click()
        until(lambda: "mean of 2 seeds" in canvas.get_attribute("aria-label"))
        box = canvas.bounding_box()
        page.mouse.move(box["x"] + 56, box["y"] + 80)
        until(lambda: "0.45 [0.2, 0.7]" in page.locator("#tip").inner_text())
        page.locator('select[name="axis"]').select_option("wall")
        until(lambda: "mean of" not in canvas.get_attribute("aria-label"))
        assert page.locator('select[name="seeds"]').is_disabled()


@pytest.mark.slow
def test_without_two_seeds_there_is_nothing_to_choose(page, go, tmp_path):
    with viewing(runs_of(tmp_path)[3]) as url:
        go(page, url)
        page.locator('.chart[data-metric="reward"] canvas').wait_for()
        assert not page.locator('select[name="seeds"]').is_visible()


def shaded(page) -> int:
    """Pixels of the reward's chart that are a pale blue: the band's."""
    return page.evaluate(
        """() => {
            const canvas = document.querySelector('.chart[data-metric="reward"] canvas');
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let many = 0;
            for (let i = 0; i < pixels.length; i += 4) many += pixels[i + 3] > 35 && pixels[i + 3] < 60;
            return many;
        }"""
    )
