"""`graft init`: the folder that it writes passes its own tests and trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from graft.commands.init import CHECKOUT, FILES, create
from tests.command_line import graft

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / create("my-agent")


def test_the_command_writes_the_folder_and_names_the_next_step(tmp_path: Path):
    done = graft("init", "my-agent", cwd=tmp_path)
    assert done.returncode == 0 and "graft train recipe.yaml" in done.stdout
    assert {path.name for path in (tmp_path / "my-agent").iterdir()} == set(FILES)
    again = graft("init", "my-agent", "--json", cwd=tmp_path)
    assert again.returncode == 2 and "exists here already" in again.stderr
    other = graft("init", "second", "--json", cwd=tmp_path)
    assert json.loads(other.stdout) == {"folder": "second", "files": list(FILES)}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/tmp/x", "-x", "1st", "a b", "ä", "a" * 65, "a\n"]
)
def test_a_bad_name_is_refused_and_nothing_is_written(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is not a name"):
        create(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "folder", "broken link"])
def test_what_exists_is_left_alone(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "mine"
    if kind == "file":
        place.write_text("kept")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("nowhere")
    with pytest.raises(ValueError, match="nothing was written"):
        create("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_its_own_tests_pass(folder: Path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout


def test_every_setting_of_the_recipe_is_explained(folder: Path):
    text = (folder / "recipe.yaml").read_text()
    assert "NAME" not in text and yaml.safe_load(text)["run"]["name"] == "my-agent"
    settings = [line for line in text.splitlines() if line.startswith("  ")]
    explained = [line for line in settings if "# " in line]
    assert (
        len(settings) - len(explained) <= 2
    )  # the shape, whose section is explained, and sft.batch


def test_one_step_of_it_trains(folder: Path):
    quick = ("sft.steps=2", "train.steps=1", "run.eval_tasks=2", "rollout.tasks=2")
    done = graft("train", "recipe.yaml", *quick, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "runs/my-agent/summary.json").exists()


@pytest.mark.slow
def test_it_learns_to_open_the_drawers(folder: Path):
    done = graft("train", "recipe.yaml", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["before"]["sampled"] < 0.7 and summary["after"]["sampled"] > 0.85
    assert summary["after"]["tool_rate"] > 0.9


def test_a_wheel_has_the_files():
    assert {path.name for path in CHECKOUT.iterdir() if path.is_file()} == set(FILES)
    assert '"examples/starter" = "graft/starter"' in (ROOT / "pyproject.toml").read_text()
