"""`graft rollout`: what a run's policy does with one task, along the path that training takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import graft
from graft.commands.rollout import rollout
from graft.config import ConfigError, load_config
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.train.build import build_run
from graft.train.tasks import held_out_tasks

TINY = (
    "model.shape={family: qwen3, width: 16, layers: 1, heads: 2, kv_heads: 2, head_dim: 8, ff: 16, "
    "tied: false, rope_theta: 100.0, max_positions: 128}",
    "rollout.tasks=2",
    "rollout.samples=2",
    "rollout.max_context=96",
    "sft.steps=2",
    "sft.batch=4",
    "train.steps=1",
    "run.eval_tasks=1",
    "run.trackers=[]",
)
app = typer.Typer()
app.command()(rollout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `runs/a` is."""
    where = tmp_path_factory.mktemp("rollouts")
    graft.train("quickstart", *TINY, f"run.dir={where / 'runs'}", "run.name=a")
    return where


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def invoke(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def as_json(*arguments: str):
    return json.loads(invoke(*arguments, "--json").stdout.splitlines()[-1])


@pytest.mark.slow
def test_an_attempt_is_the_one_that_the_evaluation_makes(folder: Path):
    config = load_config(str(folder / "runs/a/config.yaml"), [])
    components = build_run(config, weights=folder / "runs/a/checkpoints/rl-000001")
    wanted = collect(held_out_tasks("calculator", 3), components.held_out, independent(1))[2]
    found = as_json("a", "--seed", "2")
    [attempt] = found["attempts"]
    walk = [wanted.spans[i] for i in wanted.walk(wanted.leaves[0].tips[-1])]
    assert [span["text"] for span in attempt["spans"]] == [span.text for span in walk]
    assert [span["author"] for span in attempt["spans"]] == [span.author for span in walk]
    assert (found["task"]["id"], attempt["reward"]) == (wanted.task.id, wanted.leaves[0].reward)
    assert Path(found["model"]) == Path("runs/a/checkpoints/rl-000001")


def test_the_conversation_is_printed_turn_by_turn():
    lines = invoke("a", "--seed", "2", "--greedy").stdout.splitlines()
    spans = as_json("a", "--seed", "2", "--greedy")["attempts"][0]["spans"]
    assert [line.split()[0] for line in lines[: len(spans)]] == [span["author"] for span in spans]
    assert lines[0].split() == ["task", spans[0]["text"]]
    assert lines[-1].startswith("reward  0.00 (")


def test_ones_own_task_is_attempted_with_the_tools_and_has_no_reward():
    plain = invoke("a", "--task", "12+34=", "--n", "2")
    assert plain.stdout.count("task    12+34=") == 2
    assert plain.stdout.count("reward  - (") == 2
    assert "tools: calculator" in plain.stderr
    found = as_json("a", "--task", "12+34=", "--n", "2")
    assert [attempt["reward"] for attempt in found["attempts"]] == [None, None]
    assert found["task"]["prompt"] == [{"role": "user", "content": "12+34="}]
    assert found["task"]["answer"] is None
    drawn = [[span["text"] for span in attempt["spans"]] for attempt in found["attempts"]]
    assert drawn[0] != drawn[1]  # each attempt has draws of its own


def test_a_model_takes_the_environment_that_is_named(folder: Path, tmp_path: Path):
    model = tmp_path / "model"
    model.symlink_to(folder / "runs/a/checkpoints/rl-000001")
    with pytest.raises(ConfigError, match=r"environment is unknown; give --env ID"):
        invoke(str(model))
    found = as_json(
        str(model),
        "rollout.max_context=96",
        "rollout.max_tokens=16",
        "--env",
        "calculator",
        "--greedy",
    )
    assert found["env"] == "calculator" and found["temperature"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no run or model at 'nowhere'.*nor a run of that name in runs/"),
        (["a", "--n", "2", "--greedy"], "2 greedy attempts at a task"),
        (["a", "--task", "1+1=", "--seed", "3"], "--task and --seed 3 each choose a task"),
        (["a", "--task", " "], "--task is empty"),
        (["a", "--greedy", "--temperature", "0.5"], "exclude each other"),
        (["a", "--env", "calculater"], "did you mean 'calculator'"),
    ],
)
def test_mistakes_are_errors_with_a_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        invoke(*arguments)


def test_an_attempt_that_breaks_prints_why(folder: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "broken_env.py").write_text(
        "from graft.envs.calculator import CalculatorTask\n"
        "class Broken(CalculatorTask):\n"
        "    def step(self, action):\n"
        "        raise ConnectionError('the server is gone')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = invoke("a", "--env", "broken_env:Broken", code=1)
    assert "the server is gone" in done.stderr and "env_error" in done.stderr
