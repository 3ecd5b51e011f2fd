"""`--against`: an evaluation beside an earlier one, over the tasks that both have."""

import json

import pytest

from graft.config import ConfigError
from graft.evaluate.comparison import read_earlier, set_beside
from graft.evaluate.results import EvalResult
from graft.evaluate.table import ScoreTable


def cell(checkpoint: str, rewards: dict[str, list[float]], **settings) -> EvalResult:
    return EvalResult(
        checkpoint=checkpoint,
        set="a",
        settings={"env": "e", "args": {}, **settings},
        weights="w",
        tasks=list(rewards),
        sources=["s"] * len(rewards),
        rewards=list(rewards.values()),
        votes=[[0] * len(group) for group in rewards.values()],
        tool_calls=0.0,
        tool_rate=0.0,
        failed=0.0,
        overlong=0,
        tokens=1.0,
        seconds=1.0,
    )


def table_of(*cells: EvalResult, samples: int = 2) -> ScoreTable:
    rows = {one.checkpoint: {"a": one} for one in cells}
    return ScoreTable(["a"], rows, "How.", samples=samples, k=(1, samples))


def stored(table: ScoreTable, folder) -> str:
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "table.json").write_text(json.dumps(table.to_json()))
    return str(folder)


BEFORE = {"t0": [0.0, 0.0], "t1": [1.0, 0.0], "t2": [0.0, 0.0], "gone": [1.0, 1.0]}
AFTER = {"t0": [1.0, 1.0], "t1": [1.0, 1.0], "t2": [1.0, 0.0], "new": [0.0, 0.0]}


def test_differences_are_paired_over_the_common_tasks(tmp_path):
    earlier = read_earlier(stored(table_of(cell("base", BEFORE)), tmp_path))
    found = set_beside(table_of(cell("rl-000020", AFTER)), earlier)
    average, _, passed, majority = found.rows
    # t0 +1, t1 +0.5, t2 +0.5; all eight flips: only +++ and --- reach a sum of 2
    assert (average.measure, average.difference.tasks) == ("avg", 3)
    assert average.difference.value == pytest.approx(2 / 3) and average.difference.p == 0.25
    assert average.difference.ours == pytest.approx(5 / 6)
    assert average.difference.interval[0] >= 0.5
    assert (passed.measure, passed.difference.value) == ("pass@2", pytest.approx(2 / 3))
    assert majority.measure == "maj@2"
    assert found.notes == []
    assert "| a | avg | 3 | rl-000020 0.833 | base 0.167 | +0.667 [" in found.markdown()
    assert found.to_json()["rows"][0]["scores"]["p"] == 0.25


def test_the_checkpoint_of_the_same_name_is_taken_else_the_last(tmp_path):
    rows = [
        cell(name, {"t0": [reward] * 2}) for name, reward in (("x", 0.0), ("y", 0.5), ("z", 1.0))
    ]
    earlier = read_earlier(stored(table_of(*rows), tmp_path))
    assert earlier.beside("y", "a").checkpoint == "y"
    assert earlier.beside("w", "a").checkpoint == "z"
    assert earlier.beside("y", "b") is None


def test_tasks_that_were_posed_otherwise_have_a_note(tmp_path):
    earlier = read_earlier(stored(table_of(cell("base", BEFORE, reward="f1")), tmp_path))
    found = set_beside(table_of(cell("base", AFTER, reward="")), earlier)
    assert "reward 'f1' then, '' now" in found.notes[0]
    disjoint = set_beside(table_of(cell("base", {"other": [1.0, 1.0]})), earlier)
    assert disjoint.rows == [] and disjoint.notes == ["a: no task is in both evaluations."]


def test_fewer_attempts_then_leave_out_the_measures_of_more(tmp_path):
    once = {task: rewards[:1] for task, rewards in BEFORE.items()}
    earlier = read_earlier(stored(table_of(cell("base", once), samples=1), tmp_path))
    found = set_beside(table_of(cell("now", AFTER)), earlier)
    assert [row.measure for row in found.rows] == ["avg", "pass@1"]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{"checkpoint": "x", "scores": {"a": {}}}]}'])
def test_a_file_that_is_no_evaluation_is_refused(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="not the JSON file of a `graft eval`"):
        read_earlier(str(file))
    with pytest.raises(ConfigError, match=r"has no table\.json"):
        read_earlier(str(tmp_path))
