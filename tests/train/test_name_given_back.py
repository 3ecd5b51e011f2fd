"""A run that took no step gives its name back; one that took a step keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graft
from graft.train.run_dir.folder import RunFolder

RECIPE: dict[str, Any] = {
    "model": {"shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ff": 32}},
    "task": {"env": "calculator"},
    "rollout": {"tasks": 2, "samples": 2, "max_tokens": 4, "max_context": 64},
    "train": {"steps": 1},
}


def settings(folder: Path, **task: Any) -> dict[str, Any]:
    run = {"name": "run", "dir": str(folder), "eval_tasks": 0}
    return {**RECIPE, "run": run, "task": {**RECIPE["task"], **task}}


def test_a_run_that_took_no_step_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="colour"):
        graft.train(settings(tmp_path, args={"colour": 1}), progress=False)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="colour"):
        graft.train(settings(tmp_path, args={"colour": 1}), progress=False)
    assert (tmp_path / "run" / "notes.txt").exists()  # graft did not make this folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/rl-1/state.json", "errors.log"])
def test_a_run_with_results_keeps_its_name(tmp_path: Path, name: str) -> None:
    folder = RunFolder(graft.load_recipe(settings(tmp_path)))
    folder.claim()
    folder.begin()
    file = folder.path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    file.write_text("{}\n")
    folder.stopped("the tool is gone")
    folder.release()
    assert (folder.path / "stopped.json").exists() and file.exists()
