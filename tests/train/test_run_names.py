"""Runs by name wherever a command takes one, and a finished run that shows its scores."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import graft
from graft import cli
from graft.train.run_dir.names import named, short
from graft.train.session import Session
from tests.test_rollout_command import TINY
from tests.training import train_recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run `runs/a`."""
    where = tmp_path_factory.mktemp("named")
    graft.train("quickstart", *TINY, f"run.dir={where / 'runs'}", "run.name=a")
    return where


@pytest.fixture
def there(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the present folder."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_a_run_unless_something_here_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/a")
    run.mkdir(parents=True)
    assert named("a") == run  # a folder in runs/, and nothing of that name here
    (run / "config.yaml").write_text("")
    Path("a").mkdir()
    assert named("a") == run  # a folder that is neither run nor model does not hide it
    assert short(run) == short(run.absolute()) == "a"
    (Path("a") / "config.json").write_text("{}")
    assert named("a") == Path("a")
    assert short(run) == "runs/a"
    assert named("runs/a") == run and named("nothing") == Path("nothing")
    (run / "checkpoints" / "rl-000001").mkdir(parents=True)
    assert named("x/y") == Path("x/y")
    shutil.rmtree("a")
    assert named("a/checkpoints/rl-000001") == run / "checkpoints" / "rl-000001"
    assert short(Path("runs/two words")) == "'runs/two words'"
    assert short(Path("/elsewhere/b")) == "/elsewhere/b"


@pytest.mark.parametrize(
    "command",
    [
        ["watch", "a"],
        ["report", "a", "--out", "report.html"],
        ["eval", "a", "--tasks", "1"],
        ["eval", "a/checkpoints/rl-000001", "--tasks", "1"],
        ["export", "a", "--out", "exported"],
        ["replay", "a", "--step", "1", "--from", "0"],
        ["generate", "a", "--prompt", "1+1=", "--max-tokens", "2"],
        [
            "data",
            "sample",
            "a",
            "calculator",
            "--n",
            "1",
            "--keep",
            "reward>=0",
            "--out",
            "x.jsonl",
        ],
        ["data", "show", "rows.jsonl", "--model", "a"],
        ["rollout", "a"],
    ],
    ids=lambda arguments: "-".join(arguments[:2]).replace("-a", ""),
)
def test_every_command_that_takes_a_run_takes_its_name(there, command):
    Path("rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    done = CliRunner().invoke(cli.app, [*command, "--json"])
    assert done.exit_code == 0, f"{done.output} {done.exception}"
    assert json.loads(done.stdout.splitlines()[-1])


def test_scale_takes_a_name(there):
    """And refuses this run, which has no cluster."""
    done = CliRunner().invoke(cli.app, ["scale", "a", "1"])
    assert "runs/a samples in its own processes" in str(done.exception)


def test_view_takes_a_name(there):
    from graft.viewer.runs import open_runs

    assert [run.path for run in open_runs(["a"])] == [(there / "runs/a").resolve()]


def test_the_commands_at_the_end_are_short_and_work(there, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/lib/python/graft/__main__.py"])
    arguments = ["train", "quickstart", *TINY, "run.name=a"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    start = lines.index("run folder: runs/a")
    assert lines[start + 1 :] == ["  graft rollout a", "  graft view a"]
    for line in lines[start + 1 : -1]:
        again = CliRunner().invoke(cli.app, line.split()[1:])
        assert again.exit_code == 0, again.output


# a finished run


class NoTraining(Session):
    def _open(self):
        raise AssertionError("a finished run was opened again")


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening the run's model is an error."""
    monkeypatch.setattr(Session, "_open", NoTraining._open)


def test_a_finished_run_shows_its_scores_and_samples_nothing(there, sealed):
    before = {path: path.read_bytes() for path in Path("runs/a").rglob("*.json*")}
    out = io.StringIO()
    summary = train_recipe("quickstart", *TINY, "run.name=a", quiet=False, stream=out)
    assert summary == json.loads(Path("runs/a/summary.json").read_text())
    assert {path: path.read_bytes() for path in before} == before
    output = out.getvalue()
    assert "runs/a is done, with reinforce step 1 as its last" in output
    assert "To train more: train.steps=2. To start anew: another run.name" in output
    assert "graft eval a" in output and "evaluating" not in output


def test_the_command_shows_the_table_and_json_is_the_summary(there, sealed):
    done = CliRunner().invoke(cli.app, ["train", "quickstart", *TINY, "run.name=a", "--json"])
    summary = json.loads(Path("runs/a/summary.json").read_text())
    assert done.exit_code == 0 and json.loads(done.stdout.splitlines()[-1]) == summary
    assert "sampled" in done.stderr and "held out" in done.stderr


def test_settings_that_nothing_was_trained_with_do_not_enter_its_record(there, sealed):
    before = Path("runs/a/config.yaml").read_text()
    out = io.StringIO()
    train_recipe("quickstart", *TINY, "run.name=a", "train.lr=0.5", quiet=False, stream=out)
    assert Path("runs/a/config.yaml").read_text() == before
    assert "no step is left that would use train.lr" in out.getvalue()


def test_more_steps_are_made(there):
    summary = train_recipe("quickstart", *TINY, "run.name=a", "train.steps=2")
    assert Path(summary["checkpoint"]).name == "rl-000002"


@pytest.mark.parametrize(
    "broken", ["", "{", "[]", '{"checkpoint": "runs/a/checkpoints/rl-000000"}']
)
def test_without_a_summary_of_its_last_step_it_is_scored(there, broken):
    Path("runs/a/summary.json").write_text(broken)
    out = io.StringIO()
    summary = train_recipe("quickstart", *TINY, "run.name=a", quiet=False, stream=out)
    assert "evaluating 1 held-out tasks (after)" in out.getvalue()
    assert Path(summary["checkpoint"]).name == "rl-000001"


def test_a_warm_up_alone_is_done_too_and_rl_goes_on_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = train_recipe("quickstart", *TINY, "train.steps=0", "run.name=w")
    out = io.StringIO()
    again = train_recipe(
        "quickstart", *TINY, "train.steps=0", "run.name=w", quiet=False, stream=out
    )
    assert again == first and "warm-up step 2 as its last" in out.getvalue()
    assert "To train more: train.steps=100 (RL)" in out.getvalue()
    summary = train_recipe("quickstart", *TINY, "run.name=w")
    assert Path(summary["checkpoint"]).name == "rl-000001"
