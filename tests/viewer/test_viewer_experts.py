"""The loads of experts: what a run records of them, and the picture that the viewer makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.runs import RunRecord
from graft.train.run_dir.expert_loads import FILE, ExpertLoads
from graft.viewer.expert_loads import expert_loads
from graft.viewer.runs import open_runs
from graft.viewer.saved import save_page
from graft.viewer.summary import summary
from tests.training import train_recipe
from tests.viewer.conftest import SETTINGS, watched_page
from tests.viewer.folders import write_run

TINY = {"phase": "rl", "first": 1, "last": 10, "layers": [1, 2], "loads": [[2.0, 0.0], [0.5, 1.5]]}


def test_a_file_has_the_mean_of_the_steps_since_the_last(tmp_path: Path) -> None:
    recorded = ExpertLoads(tmp_path)

    def read() -> dict[str, Any]:
        return json.loads((tmp_path / FILE).read_text())

    for step in range(1, 13):
        recorded.add("rl", step, [0], torch.tensor([[float(step), 0.0]]))
        if step == 9:  # the first step is written at once, the others at the tenth
            assert (read()["last"], read()["loads"]) == (1, [[1.0, 0.0]])
    assert read() == {"phase": "rl", "first": 2, "last": 10, "layers": [0], "loads": [[6.0, 0.0]]}
    recorded.write()  # as at the end of a run
    assert (read()["first"], read()["last"], read()["loads"]) == (11, 12, [[11.5, 0.0]])


def test_a_run_with_experts_records_its_loads(tmp_path: Path) -> None:
    experts = "model.shape.experts={count: 4, top_k: 2, ff: 16}"
    named = (f"run.dir={tmp_path}", "run.name=made", "sft.steps=1", "model.shape.family=qwen3_moe")
    train_recipe("quickstart", *SETTINGS, *named, experts, "train.steps=2", "train.router_z=1e-3")
    found = json.loads((tmp_path / "made" / FILE).read_text())
    assert (found["phase"], found["first"], found["last"]) == ("rl", 1, 2)
    assert [len(row) for row in found["loads"]] == [4]
    assert sum(found["loads"][0]) == pytest.approx(4.0, abs=0.01)
    lines = (tmp_path / "made" / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):  # of the warm-up too
        assert {"experts/max_load", "experts/z_loss"} <= line.keys()
        assert "experts/balance_loss" not in line


def test_the_summary_has_the_picture(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "made")
    assert summary(RunRecord(folder))["experts"] is None
    (folder / FILE).write_text(json.dumps(TINY))
    found = summary(RunRecord(folder))["experts"]
    assert found == {"steps": "RL steps 1 to 10", "layers": [1, 2], "loads": TINY["loads"]}
    page = save_page(open_runs([str(folder)]), tmp_path / "report.html").read_text()
    assert '"loads":[[2.0,0.0],[0.5,1.5]]' in page and "loadPicture" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"loads": [[1.0], [1.0, 2.0]]},
        {"loads": [["<b>", 1.0], [1.0, 1.0]]},
        {"loads": [[1.0, 1.0]]},
        {"loads": 3},
        {"layers": [1, None]},
        {"first": "1"},
        {"loads": [[], []]},
    ],
)
def test_a_file_that_is_not_ours_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "made")
    (folder / FILE).write_text(json.dumps(TINY | changes))
    assert expert_loads(RunRecord(folder)) is None


@pytest.mark.slow
def test_the_picture_has_a_colour_for_each_load(chromium: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "made")
    (folder / FILE).write_text(json.dumps(TINY))
    path = save_page(open_runs([str(folder)]), tmp_path / "report.html")
    with watched_page(chromium, lambda address: address.startswith("file:")) as page:
        page.goto(path.as_uri())
        canvas = page.locator("canvas.loads")
        canvas.wait_for()
        pixels = canvas.evaluate("c => [...c.getContext('2d').getImageData(0, 0, 2, 2).data]")
    red_blue = [pixels[i] - pixels[i + 2] for i in range(0, 16, 4)]
    assert red_blue[0] < 0 < red_blue[1] and red_blue[3] < 0 < red_blue[2]
