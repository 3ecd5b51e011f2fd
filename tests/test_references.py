"""References to environment variables: resolved in memory, unresolved in whatever is written."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graft.config import Config, ConfigError, dump_config, load_config, unpacked
from graft.train.run_dir.folder import RunFolder, RunStopped, differences
from graft.trust.masking import mask

RECIPE: dict[str, Any] = {
    "model": {"shape": {"layers": 1}},
    "task": {
        "env": "calculator",
        "args": {
            "token": "${oc.env:MCP_CANARY}",
            "headers": {"X-Key": "Bearer ${oc.env:MCP_CANARY}"},
            "place": "${oc.env:PLACE}",
            "again": "${task.args.token}",
            "nested": "${oc.decode:${oc.env:NUMBER}}",
        },
    },
    "train": {"lr": "${oc.env:RATE}", "steps": 2},
}


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MCP_CANARY": "canary-8812",
        "PLACE": "abc",
        "NUMBER": "7",
        "RATE": "0.5",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_reference_is_resolved_in_memory_and_written_as_it_is():
    config = load_config(RECIPE)
    args = config.task.args
    assert args["token"] == args["again"] == "canary-8812" and args["nested"] == 7
    assert args["headers"] == {"X-Key": "Bearer canary-8812"}
    written = config.written()["task"]["args"]
    assert written["token"] == written["again"] == "${oc.env:MCP_CANARY}"
    assert written["headers"] == {"X-Key": "Bearer ${oc.env:MCP_CANARY}"}
    assert written["place"] == "${oc.env:PLACE}"
    assert (
        config.written()["train"]["lr"] == 0.5
    )  # a number is no secret, and belongs to the record
    assert "canary" not in dump_config(config)
    assert mask("it said canary-8812") == "it said ${oc.env:MCP_CANARY}"
    assert mask("abc") == "abc"


def test_what_was_written_reads_the_variable_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.yaml").write_text(dump_config(load_config(RECIPE)))
    monkeypatch.setenv("MCP_CANARY", "canary-new-99")
    again = load_config(tmp_path / "config.yaml")
    assert again.task.args["headers"] == {"X-Key": "Bearer canary-new-99"}
    monkeypatch.delenv("MCP_CANARY")
    with pytest.raises(ConfigError, match="MCP_CANARY"):
        load_config(tmp_path / "config.yaml")
    looked_at = load_config(tmp_path / "config.yaml", is_resolved=False)
    assert looked_at.task.args["token"] == "${oc.env:MCP_CANARY}"
    monkeypatch.setenv("MCP_CANARY", "canary-later")
    assert load_config(looked_at).task.args["token"] == "canary-later"


def test_copies_and_other_processes_keep_references(monkeypatch: pytest.MonkeyPatch):
    config = load_config(RECIPE).changed({"train.steps": 3})
    for copy in (config, load_config(config), *config.of_each_env()):
        assert "canary" not in dump_config(copy) and copy.task.args["token"] == "canary-8812"
    packed = config.packed()
    monkeypatch.delenv("MCP_CANARY")  # another machine has no such variable
    there = unpacked(packed)
    assert there.task.args["token"] == "canary-8812"
    assert there.written() == config.written()


def test_a_secret_in_clear_is_masked_and_has_to_be_given_again(tmp_path: Path):
    recipe = {**RECIPE, "task": {"env": "calculator", "args": {"token": "canary-in-clear"}}}
    config = load_config(recipe)
    assert config.task.args["token"] == "canary-in-clear"
    assert mask("at canary-in-clear") == "at ***"
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert "canary" not in (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"task.args.token='\*\*\*'.*oc.env:NAME"):
        load_config(tmp_path / "config.yaml")
    given = load_config(tmp_path / "config.yaml", ["task.args.token='${oc.env:MCP_CANARY}'"])
    assert given.task.args["token"] == "canary-8812"


@pytest.mark.parametrize(
    "override", ["task.args.token=", "task.args={token: hf_0123456789abcdefghij"]
)
def test_errors_about_a_recipe_have_no_secret(override: str):
    with pytest.raises(ConfigError) as error:
        load_config(RECIPE, [f"{override}canary-77", "train.lr=x", "run.nme={password: canary-78}"])
    assert "canary-7" not in str(error.value) and "hf_0" not in str(error.value)


def claim(config: Config) -> RunFolder:
    folder = RunFolder(config)
    with closing(SimpleNamespace(close=folder.release)):
        folder.claim()
        folder.begin()
        state = folder.checkpoints / "rl-000001" / "state.json"
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text("{}")
    return folder


def test_a_run_folder_is_for_its_user_and_resumes_with_another_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = {**RECIPE, "run": {"dir": str(tmp_path / "runs"), "name": "a"}}
    path = claim(load_config(recipe)).path
    assert path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("MCP_CANARY", "canary-rotated")
    assert claim(load_config(recipe)).changed == {}
    path.chmod(0o755)  # opened up on purpose
    claim(load_config(recipe))
    assert path.stat().st_mode & 0o777 == 0o755
    monkeypatch.setenv("OTHER", "canary-other")
    with pytest.raises(RunStopped, match=r"oc\.env:OTHER") as error:
        claim(load_config(recipe, ["task.args.token='${oc.env:OTHER}'"]))
    assert "canary" not in str(error.value)


def test_a_run_of_an_older_version_resumes(tmp_path: Path):
    """Its config.yaml has what the references stand for, and secrets in clear."""
    config = load_config(RECIPE)
    assert differences(config.model_dump(mode="json"), config) == {}
    clear = load_config({**RECIPE, "task": {"env": "calculator", "args": {"token": "in-clear-1"}}})
    assert differences(clear.model_dump(mode="json"), clear) == {}
