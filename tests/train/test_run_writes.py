"""Every file of a run is written through `graft.files`, and is on the disk when a checkpoint has its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graft import files
from graft.files import Change
from graft.train.run_dir import journal as journal_module
from graft.train.run_dir.folder import RunFolder
from graft.train.run_dir.journal import Journal
from graft.types import Author, Episode, Span, Task
from tests.training import train_recipe
from trust.moments import WriteCache
from trust.tiny_runs import recipe_of


class Watch:
    """What the file layer wrote, under the names that the files have now, and what a cut would take."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, WriteCache()
        self.written: set[Path] = set()
        self.lost: list[str] = []

    def __call__(self, when: str, change: Change) -> None:
        self.cache.note(when, change)
        if when == "before":
            return
        if change.kind == "write":
            self.written.add(change.path)
        if change.target is not None:
            moved = {path for path in self.written if path.is_relative_to(change.path)}
            self.written -= moved
            self.written |= {change.target / path.relative_to(change.path) for path in moved}
        if change.kind == "sync" and change.path.name == "checkpoints":
            self.lost += map(str, self.cache.at_risk())


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> tuple[Path, Watch]:
    """A run of SFT and RL that samples ahead, and what was seen of it."""
    folder = tmp_path_factory.mktemp("watched")
    watch = Watch(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "watch", watch)
        train_recipe(*recipe_of("async", folder, folder), "sft.steps=1", "sft.batch=4")
    return folder, watch


def test_every_file_of_a_run_is_written_by_the_file_layer(watched):
    folder, watch = watched
    found = {path for path in (folder / "run").rglob("*") if path.is_file()}
    assert {str(path.relative_to(folder)) for path in found - watch.written} == {"run/.lock"}


def test_records_of_a_step_are_on_the_disk_when_its_checkpoint_has_its_name(watched):
    _, watch = watched
    assert watch.lost == []


def test_a_run_that_died_after_its_last_checkpoint_removes_the_old_one(watched, tmp_path):
    shutil.copytree(watched[0], tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    (run / "summary.json").unlink()
    shutil.copytree(run / "checkpoints" / "rl-000001", run / "checkpoints" / "rl-000000")
    (run / ".summary.json.partial").touch()
    train_recipe(*recipe_of("async", tmp_path, tmp_path), "sft.steps=1", "sft.batch=4")
    assert sorted(one.name for one in (run / "checkpoints").iterdir()) == ["rl-000001", "rl-000002"]
    assert not list(run.rglob(".*.partial")) and (run / "summary.json").exists()


def test_a_resumed_run_learns_from_the_episodes_that_were_sampled_ahead(watched, tmp_path):
    """They are of weights that the resumed process does not have."""
    shutil.copytree(watched[0], tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    episodes = run / "episodes" / "step_000002.jsonl"
    expected = episodes.read_text()
    shutil.rmtree(run / "checkpoints" / "rl-000002")
    (run / "summary.json").unlink()
    train_recipe(*recipe_of("async", tmp_path, tmp_path), "sft.steps=1", "sft.batch=4")
    assert episodes.read_text() == expected
    assert '"version": 0' in expected and (run / "checkpoints" / "rl-000002").exists()


def test_errors_log_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_TRACES", 2)
    journal = Journal.__new__(Journal)
    journal.is_first, journal._traces = True, set()
    journal.folder = RunFolder.__new__(RunFolder)
    journal.folder.path = tmp_path
    episode = Episode(Task("t", "env"))
    for number in range(5):
        info = {"traceback": f"trace {number}", "error": "ValueError"}
        episode.spans.append(Span(None, Author.ENV, [], info=info))
    journal.failures("step 1", [episode])
    text = (tmp_path / "errors.log").read_text()
    assert "trace 1" in text and "trace 2" not in text
    assert text.endswith("these are 2 different ones; further ones are not written\n")
