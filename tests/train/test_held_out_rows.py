"""A run that trains on the rows that it scores as held out says so, and how to keep them apart."""

import json

import pytest

from graft.config import load_config
from graft.envs.table import make
from graft.train.tasks import held_out_check


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ([], 4),
        (["task.args.split=train", "task.eval_args.split=test"], 0),
        (["run.eval_tasks=0"], 0),
    ],
)
def test_trained_rows_among_the_held_out_tasks_are_a_warning(tmp_path, overrides, count):
    rows = [{"prompt": f"{number}?", "answer": str(number)} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = ["task.env=prompts", f"task.args={{data: {tmp_path}/rows.jsonl}}", "task.eval_args={}"]
    config = load_config("quickstart", [*task, "run.eval_tasks=4", *overrides])
    [item] = config.task.envs
    found = held_out_check(
        config,
        lambda task: make(item.env, **(item.args or {})),
        lambda task: make(item.env, **item.held_out_args),
    )
    if not count:
        assert found is None
        return
    assert found is not None and found.verdict == "warn"
    assert found.seen.startswith(f"{count} held-out tasks are rows that this run trains on")
    assert "task.eval_args.split=test" in found.remedy
