"""`graft eval`: checkpoints against sets, cell by cell, and what a second call makes of the first."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from graft.actions.listing import FILES
from graft.config import ConfigError, TaskSection, load_config
from graft.envs import ENVS, register
from graft.envs.base import BaseEnv
from graft.evaluate.candidates import Candidate
from graft.evaluate.eval_spec import EvalSpec
from graft.evaluate.evaluator import Evaluator
from graft.evaluate.generate import Generator
from graft.evaluate.options import EvalOptions
from graft.evaluate.results import EvalResult, ResultsFile
from graft.evaluate.table import ScoreTable
from graft.evaluate.task_sets import read_sets
from graft.models.io.load import ModelFileError
from graft.registry import UnknownName
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.train.build import build_run
from graft.train.errors import RunStopped
from graft.train.tasks import held_out_tasks
from graft.types import Sampling
from tests.command_line import Completed, graft
from tests.model_calls import evaluate_model
from tests.training import train_recipe

RECIPE = """
run: {{dir: "{folder}", name: run, save_every: 2, keep_last: 9, eval_tasks: 0, trackers: []}}
model:
  shape: {{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 96}}
task: {{env: calculator, eval_args: {{split: test}}}}
rollout: {{tasks: 2, samples: 4, max_tokens: 10, max_turns: 4, max_context: 64}}
algo: {{entropy_coef: 1.0}}
train: {{steps: 2, lr: 3.0e-2}}
sft: {{steps: 2, batch: 8}}
"""
NAMES = ["sft-000002", "rl-000000", "rl-000002"]
TWO = {"on": "calculator,long=calculator", "args": ["long.operands=[3,3]"], "tasks": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A tiny finished run with three checkpoints."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    train_recipe(str(folder / "tiny.yaml"))
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


class Measured(list):
    """The cells that were computed, in order."""


@pytest.fixture
def measured(monkeypatch) -> Measured:
    seen, measure = Measured(), Evaluator.measure

    def watched(self, model, posed, folder, say):
        seen.append((model.name, posed.tasks.label))
        return measure(self, model, posed, folder, say)

    monkeypatch.setattr(Evaluator, "measure", watched)
    return seen


def sum_of_tokens(task, trajectory) -> float:
    """A reward that any change of the sampled text shows in."""
    return float(sum(sum(span.tokens) for span in trajectory.spans[1:]))


def quiet(text: str) -> None:
    pass


def table_of(run: Path, **changes) -> ScoreTable:
    table, folder, _ = evaluate_model(
        str(run), **{"every_checkpoint": True, "say": quiet, **changes}
    )
    assert folder == run / "evaluations"
    return table


def results_of(run: Path) -> list[EvalResult]:
    return ResultsFile(run / "evaluations" / "table.jsonl").results


@pytest.fixture(scope="module")
def trained_with_actions(trained) -> Path:
    """The same, with calls that are head rows beyond the vocabulary."""
    changes = ["run.name=beyond", "actions.file=compact", "task.args={syntax: actions}"]
    train_recipe(str(trained.parent / "tiny.yaml"), *changes)
    return trained.parent / "beyond"


@pytest.mark.parametrize("which", ["trained", "trained_with_actions"])
def test_each_cell_is_what_its_checkpoint_alone_would_score(which, tmp_path, request):
    run = Path(shutil.copytree(request.getfixturevalue(which), tmp_path / "run"))
    overrides = [f"task.reward={__name__}:sum_of_tokens"]
    table = table_of(run, **TWO, samples=2, overrides=overrides)
    assert list(table.rows) == NAMES
    assert all(list(cells) == ["calculator", "long"] for cells in table.rows.values())
    config = load_config(str(run / "config.yaml"), overrides)
    tasks = held_out_tasks("calculator", 3)
    for name in NAMES:  # loaded in place there, assembled from nothing here
        components = build_run(config, weights=run / "checkpoints" / name)
        episodes = collect(tasks, components.held_out, independent(2))
        leaves = [leaf for episode in episodes for leaf in episode.leaves]
        cell = table.rows[name]["calculator"]
        assert cell.tasks == [task.id for task in tasks]
        assert cell.rewards == [
            [x.reward * x.status.is_trainable for x in e.leaves] for e in episodes
        ]
        calls = fmean(leaf.metrics.get("tool_calls", 0.0) for leaf in leaves)
        reward = fmean(leaf.reward * leaf.status.is_trainable for leaf in leaves)
        assert (cell.reward, cell.tool_calls) == pytest.approx((reward, calls))
        components.engine.close()
    first, second, last = (table.rows[name] for name in NAMES)
    assert first["calculator"].rewards == second["calculator"].rewards  # RL starts there
    assert last["calculator"].rewards != second["calculator"].rewards
    assert first["long"].rewards != first["calculator"].rewards


def test_head_rows_beyond_the_vocabulary_come_with_their_checkpoint(trained_with_actions):
    folder = trained_with_actions / "checkpoints"
    rows = load_file(folder / "rl-000002" / "actions.safetensors")["rows"]
    config = load_config(str(trained_with_actions / "config.yaml"))
    bench = Evaluator(EvalSpec(config, [], EvalOptions(samples=1), Sampling(temperature=0.0)))
    for name in ("rl-000000", "rl-000002"):
        assert bench.mount(Candidate(name, folder / name, ""))
    assert bench.components is not None
    shape = bench.components.policy.shape
    held = bench.components.policy.head_weight[shape.vocab_size : shape.vocab_size + shape.extra]
    torch.testing.assert_close(held.detach(), rows, atol=0, rtol=0)
    assert bench.components.engine.version == 1  # nothing that the first one computed is kept
    bench.close()


def test_a_killed_evaluation_goes_on_where_it_stopped(run, measured):
    first = table_of(run, **TWO)
    assert measured == [(name, label) for name in NAMES for label in ("calculator", "long")]
    files = run / "evaluations"
    written = (files / "table.md").read_text(), (files / "table.json").read_text()
    lines = (files / "table.jsonl").read_bytes().splitlines(keepends=True)
    (files / "table.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:60])
    (files / "table.md").unlink()
    measured.clear()
    printed: list[str] = []
    again = table_of(run, **TWO, say=printed.append)
    assert measured == [("rl-000002", "calculator"), ("rl-000002", "long")]
    assert "1 unreadable line" in printed[0]
    assert {n: {k: c.rewards for k, c in row.items()} for n, row in again.rows.items()} == {
        n: {k: c.rewards for k, c in row.items()} for n, row in first.rows.items()
    }
    assert (files / "table.md").read_text() == written[0]
    measured.clear()
    table_of(run, **TWO)  # the half line hides nothing that was written behind it
    assert measured == []


def test_cells_of_other_settings_are_neither_used_nor_lost(run, measured):
    table_of(run, tasks=3)
    for other in (
        {"tasks": 4},
        {"tasks": 3, "samples": 2},
        {"tasks": 3, "temperature": 0.0},
        {"tasks": 3, "overrides": ["rollout.max_tokens=9"]},
        {"tasks": 3, "overrides": ["run.seed=1"]},
        {"tasks": 3, "args": ["calculator.max_uses=1"]},
    ):
        measured.clear()
        table_of(run, **other)
        assert len(measured) == 3, other
    measured.clear()
    table = table_of(run, tasks=3, overrides=["rollout.concurrency=2", "train.lr=1"])
    assert measured == []  # what a score does not depend on
    assert all(len(row["calculator"].rewards) == 3 for row in table.rows.values())


def test_an_action_file_that_was_edited_is_another_setting(
    trained_with_actions, tmp_path, measured
):
    run = Path(shutil.copytree(trained_with_actions, tmp_path / "run"))
    mine = tmp_path / "mine.yaml"
    mine.write_text((FILES / "compact.yaml").read_text())
    arguments = {"every_checkpoint": False, "tasks": 2, "overrides": [f"actions.file={mine}"]}
    for _ in range(2):
        table_of(run, **arguments)
    assert len(measured) == 1
    mine.write_text(mine.read_text().replace("complete: true", "complete: false"))
    table_of(run, **arguments)
    assert len(measured) == 2


def test_generating_with_a_model_that_has_actions_notes_that_it_calls_no_tool(trained_with_actions):
    with_actions = Generator.open(trained_with_actions / "checkpoints" / "rl-000002", device="cpu")
    assert with_actions.note is not None and "calls no tool" in with_actions.note


def test_a_checkpoint_that_appears_is_added_and_one_that_went_stays_in_the_table(run, measured):
    newest = run / "checkpoints" / "rl-000002"
    newest.rename(run / "aside")
    assert list(table_of(run, tasks=2).rows) == NAMES[:2]
    (run / "aside").rename(newest)
    shutil.rmtree(run / "checkpoints" / "sft-000002")
    measured.clear()
    assert list(table_of(run, tasks=2).rows) == NAMES
    assert measured == [("rl-000002", "calculator")]


def test_without_all_checkpoints_only_the_newest_is_computed(run, measured):
    table_of(run, tasks=2, every_checkpoint=False)
    assert measured == [("rl-000002", "calculator")]
    table, _, _ = evaluate_model(str(run / "checkpoints" / "rl-000000"), tasks=2, say=quiet)
    assert measured[1:] == [("rl-000000", "calculator")]
    assert list(table.rows) == NAMES[1:]


def test_a_checkpoint_deleted_while_others_are_measured_is_skipped_with_a_note(run, monkeypatch):
    mount = Evaluator.mount

    def training_goes_on(self, model):
        if model.name == "rl-000000":
            shutil.rmtree(model.path)
        return mount(self, model)

    monkeypatch.setattr(Evaluator, "mount", training_goes_on)
    printed: list[str] = []
    table = table_of(run, tasks=2, say=printed.append)
    assert list(table.rows) == ["sft-000002", "rl-000002"]
    assert "rl-000000 was deleted meanwhile; skipped" in printed


def test_another_model_of_the_same_name_is_measured_anew(run, measured):
    table_of(run, tasks=2)
    state = run / "checkpoints" / "rl-000002" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "seconds": {"rl": 123.0}}))
    measured.clear()
    table_of(run, tasks=2)
    assert measured == [("rl-000002", "calculator")]


@pytest.mark.slow
def test_greedy_attempts_are_the_same_in_every_process(run):
    def greedy() -> Completed:
        arguments = ["eval", str(run), "--tasks", "4", "--greedy", "--all-checkpoints", "--json"]
        return graft(*arguments, "run.seed=5")

    done = greedy()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [row["checkpoint"] for row in report["rows"]] == NAMES
    assert set(report["rows"][0]["scores"]["calculator"]) >= {"reward", "measures", "tool_calls"}
    assert report["sets"]["calculator"]["args"] == {"split": "test"}
    first = {cell.checkpoint: cell.rewards for cell in results_of(run)}
    shutil.rmtree(run / "evaluations")
    table = table_of(run, tasks=4, temperature=0.0)  # another seed: greedy does not draw
    assert {name: row["calculator"].rewards for name, row in table.rows.items()} == first


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"on": "calculater"}, UnknownName, "calculater"),
        ({"on": "earl:srt"}, UnknownName, "did you mean 'earl:sort'"),
        ({"on": "calculator,calculator"}, ConfigError, "twice"),
        ({"on": "a="}, ConfigError, "LABEL=ID"),
        ({"on": " ,"}, ConfigError, "names no set"),
        ({"args": ["other.digits=2"]}, ConfigError, "labels calculator"),
        ({"args": ["calculator.digitz=2"]}, ConfigError, "digitz"),
        ({"on": "arithmetic", "args": ["arithmetic.digits=2"]}, ConfigError, "cannot be posed"),
        ({"temperature": 0.0, "samples": 2}, ConfigError, "2 greedy attempts"),
        ({"overrides": ["rollout.max_tokenz=2"]}, ConfigError, "rollout.max_tokens"),
        ({"name": "../x"}, ConfigError, "without folders"),
    ],
)
def test_a_mistake_is_an_error_before_anything_is_computed(
    run, measured, arguments, error, message
):
    with pytest.raises(error, match=message):
        table_of(run, **arguments)
    assert measured == [] and not (run / "evaluations").exists()


def test_a_checkpoint_that_cannot_be_read_is_named_before_anything_is_computed(run, measured):
    weights = run / "checkpoints" / "rl-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="checkpoint rl-000002 cannot be read"):
        table_of(run)
    assert measured == [] and not (run / "evaluations").exists()


def test_a_run_without_checkpoints_and_a_path_without_a_run_are_errors(run, tmp_path):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="no complete checkpoint yet"):
        table_of(run)
    with pytest.raises(ConfigError, match="no run or model at"):
        evaluate_model(str(tmp_path / "nothing"))


def test_an_untrained_model_is_evaluated_with_a_recipe(trained, tmp_path):
    model = tmp_path / "models" / "small"
    shutil.copytree(trained / "checkpoints" / "rl-000000", model)
    (model / "state.json").unlink()
    shutil.rmtree(model / "trainer")
    with pytest.raises(ConfigError, match="give --recipe"):
        evaluate_model(str(model))
    recipe, where = str(trained.parent / "tiny.yaml"), [f"run.dir={tmp_path}", "run.name=zero"]
    table, folder, _ = evaluate_model(
        str(model), recipe=recipe, overrides=where, tasks=3, say=quiet
    )
    assert folder == tmp_path / "zero" / "evaluations"
    [row] = evaluate_model(
        str(trained / "checkpoints" / "rl-000000"),
        overrides=["run.name=elsewhere"],
        name="beside",
        tasks=3,
        say=quiet,
    )[0].rows.values()
    assert list(table.rows) == ["small"]
    assert table.rows["small"]["calculator"].rewards == row["calculator"].rewards


class Down(BaseEnv):
    """Its server does not answer, and its stops lead to a request soon."""

    stop = tuple("0123456789+-*;[]")

    def __init__(self, split: str = "train") -> None:
        super().__init__()

    def pose(self) -> str:
        return "1+1="

    def respond(self, action):
        raise ConnectionError("the server is down")


def test_an_environment_that_is_down_gives_no_cell(run):
    register("down", Down)
    try:
        with pytest.raises(RunStopped, match="the server is down"):
            table_of(run, on="calculator,down", tasks=2)
    finally:
        del ENVS["down"]
    assert {cell.set for cell in results_of(run)} == {"calculator"}


def test_a_set_takes_the_recipes_arguments_but_what_its_id_fixes():
    recipe = TaskSection(env="earl:calc", args={"tasks": ["calc-count"], "max_uses": 3})
    own, count, order = read_sets(
        "earl:calc,earl:calc-countdown,o=earl:order", ["o.max_uses=1"], recipe
    )
    assert own.args == {"tasks": ["calc-count"], "max_uses": 3}  # as its run poses it
    assert count.args == {"max_uses": 3, "split": "test"}
    assert (order.label, order.env, order.args["max_uses"]) == ("o", "earl:order", 1)


def cell_of(checkpoint: str, **changes) -> EvalResult:
    """Two tasks of two sources: rewards 1 0 and 0 0, answers 7 8 and 9 9."""
    values = {
        "checkpoint": checkpoint,
        "set": "a",
        "settings": {"env": "e"},
        "weights": "w",
        "tasks": ["t0", "t1"],
        "sources": ["x", "y"],
        "rewards": [[1.0, 0.0], [0.0, 0.0]],
        "votes": [[0, 1], [0, 0]],
        "tool_calls": 1.5,
        "tool_rate": 0.5,
        "failed": 0.0,
        "overlong": 0,
        "tokens": 9.0,
        "seconds": 2.0,
    }
    return EvalResult(**{**values, **changes})


def test_a_table_shows_every_measure_with_its_interval_and_each_data_source():
    table = ScoreTable(
        ["a"], {"rl-000020": {"a": cell_of("rl-000020")}}, "How.", samples=2, k=(1, 2)
    )
    # task means 0.5 and 0: a bootstrap mean of two tasks is 0, 0.25 or 0.5
    assert table.markdown() == (
        "| checkpoint | set | tasks | avg@2 | pass@1 | pass@2 | maj@2 | calls |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| rl-000020 | a | 2 | 0.250 [0.000, 0.500] | 0.250 [0.000, 0.500] | 0.500 [0.000, 1.000] "
        "| 0.500 [0.000, 1.000] | 1.5 |\n"
        "\n"
        "| checkpoint | set | data source | tasks | avg@2 | pass@1 | pass@2 | maj@2 |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| rl-000020 | a | x | 1 | 0.500 | 0.500 | 1.000 | 1.000 |\n"
        "| rl-000020 | a | y | 1 | 0.000 | 0.000 | 0.000 | 0.000 |\n"
        "\nHow.\n"
    )
    scores = table.to_json()["rows"][0]["scores"]["a"]
    assert scores["measures"]["pass@2"] == {"value": 0.5, "interval": (0.0, 1.0)}
    assert scores["sources"]["x"]["maj@2"]["value"] == 1.0
    assert scores["attempts"]["t0"] == {"rewards": [1.0, 0.0], "votes": [0, 1]}
    assert "attempts" not in table.to_json(with_tasks=False)["rows"][0]["scores"]["a"]


def test_a_table_shows_what_failed_what_was_too_long_and_what_is_missing():
    odd = cell_of("x", failed=0.1, overlong=3, missing=2, sources=["x", "x"])
    shown = ScoreTable(["a"], {"x": {"a": odd}}, "How.", problems=["the server is down"]).markdown()
    assert "| 1.5 (10% failed, 3 prompts too long, 2 attempts missing) |" in shown
    assert shown.endswith("How.\n\nNot complete: the server is down\n")
    assert "pass@" not in shown and "data source" not in shown
