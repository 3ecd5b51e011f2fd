"""Whose code runs: settings of strangers name none, the user's own runs and recipes name any."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from graft.config import ConfigError, load_config
from graft.envs import make
from graft.registry import resolve
from graft.rewards import make_reward
from graft.text.template import find_template
from graft.tools import make_tools
from graft.tools.sandbox.choice import choose
from graft.train.run_dir.checkpoint import Checkpoint, checkpoints
from graft.trust import NotTrusted, Source, check_pickle, reading
from graft.trust.ownership import config_folder, remember, settings_from, sign, why_not_own
from tests.train.test_torchrun import ALONE, Case, learner_for
from tests.train.test_trainer_state import cloned, saver_in

MODULE = "open('ran', 'w').close()\nclass Env: ...\ndef reward(task, trajectory): return 1.0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module that leaves a file when it is imported, and a key of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "strangers_module.py").write_text(MODULE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("task: {env: 'strangers_module:Env'}\n")
    return tmp_path


NAMED: dict[str, Any] = {
    "env": lambda: make("strangers_module:Env"),
    "gadget": lambda: make("subprocess:Popen", args=["touch", "ran"]),
    "module of graft": lambda: make("graft.registry:load", path="strangers_module:Env"),
    "reward": lambda: make_reward({"strangers_module:reward": {}}),
    "sum of rewards": lambda: make_reward(["f1", "strangers_module:reward"]),
    "tool": lambda: make_tools(["strangers_module:Env"]),
    "program": lambda: make_tools([{"mcp": ["touch", "ran"]}]),
    "programs": lambda: make_tools([{"mcp": {"mcpServers": {"a": {"command": "touch"}}}}]),
    "no sandbox": lambda: choose("none"),
    "any table": lambda: resolve("strangers_module:Env", {"grpo": 1}, "credit"),
    "file": lambda: find_template("strangers_module.py"),
}


@pytest.mark.parametrize("name", NAMED)
def test_settings_of_a_stranger_run_no_code(folder: Path, name: str) -> None:
    with settings_from("run/config.yaml"), pytest.raises(NotTrusted) as caught:
        NAMED[name]()
    text = str(caught.value)
    assert "run/config.yaml" in text and "you did not start this run" in text and "--trust" in text
    assert not (folder / "ran").exists()


def test_names_of_the_user_are_imported(folder: Path) -> None:
    with settings_from("run/config.yaml", typed=["task.env=[strangers_module:Env]"]):
        assert resolve("strangers_module:Env", {}, "env").__name__ == "Env"
        with pytest.raises(NotTrusted):
            resolve("strangers_module:reward", {}, "reward")
    with settings_from("run/config.yaml", trust=True):
        assert make_reward("strangers_module:reward")
    with settings_from("run/config.yaml"):
        assert resolve("f1", {"f1": "graft.rewards.answers:f1"}, "reward")  # of a table of graft


def test_a_signature_is_by_this_key_and_of_this_text(folder: Path) -> None:
    run = folder / "run"
    sign(run / "config.yaml")
    assert (config_folder() / "key").stat().st_mode & 0o777 == 0o600
    assert why_not_own(run / "config.yaml") == ""
    with settings_from("run/config.yaml"):
        assert resolve("strangers_module:Env", {}, "env")
    moved = Path(shutil.move(run, folder / "moved")) / "config.yaml"
    assert why_not_own(moved) == ""
    moved.write_text(moved.read_text() + "\n")
    assert "is not by your key" in why_not_own(moved)
    sign(moved)
    (config_folder() / "key").unlink()  # another user has another key
    assert "is not by your key" in why_not_own(moved)
    sign(folder / "strangers_module.py")
    assert "is not by your key" in why_not_own(moved)


def test_a_key_that_others_can_read_signs_nothing(folder: Path) -> None:
    file = folder / "run" / "config.yaml"
    sign(file)
    (config_folder() / "key").chmod(0o644)
    assert why_not_own(file)
    sign(file)
    assert not file.with_name("config.yaml.sig").exists()


def test_without_a_home_a_run_is_unsigned_and_no_error(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "strangers_module.py"))  # no folder
    sign(folder / "run" / "config.yaml")
    assert "is missing" in why_not_own(folder / "run" / "config.yaml")
    remember(folder / "run" / "config.yaml")


def test_a_recipe_is_known_once_it_was_trained_or_trusted(folder: Path) -> None:
    recipe = folder / "mine.yaml"
    recipe.write_text("task: {env: 'strangers_module:Env'}\n")
    with (
        settings_from("mine.yaml"),
        pytest.raises(NotTrusted, match="have not trained this recipe"),
    ):
        make("strangers_module:Env")
    with settings_from("mine.yaml", trust=True):
        pass
    recipe.write_text("run: {name: changed}\n")  # one works on it
    assert why_not_own(recipe) == "" and why_not_own(folder / "run" / "config.yaml")
    for bundled in ("quickstart", ""):
        with settings_from(bundled):
            assert resolve("strangers_module:Env", {}, "env")


def test_a_strangers_recipe_reads_no_environment_variable(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "canary")
    recipe = folder / "theirs.yaml"
    text = {
        "run": {"name": "n", "dir": "${run.name}/out"},
        "model": {"shape": {"width": 16}},
        "task": {"env": "calculator", "reward": {"judge": {"url": "http://h/${oc.env:SECRET}"}}},
    }
    recipe.write_text(yaml.safe_dump(text))
    with (
        settings_from(recipe),
        pytest.raises(ConfigError, match=r"oc.env:SECRET.*--trust") as caught,
    ):
        load_config(str(recipe))
    assert "canary" not in str(caught.value)
    with settings_from(recipe, trust=True):
        assert "canary" in str(load_config(str(recipe)).task.reward)
    del text["task"]["reward"]
    recipe.write_text(yaml.safe_dump(text))
    with settings_from(recipe):
        assert load_config(str(recipe)).run.dir == "n/out"  # other keys may be named


# the state of a trainer


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def pickled(saved: Checkpoint) -> None:
    """The checkpoint as older versions wrote it."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    from graft.train.run_dir.small_state import load_small

    learner = learner_for(ALONE, None, Case(), saved)
    torch.save(load_small(saved.path / "trainer"), saved.path / "trainer.pt")
    tensors = cloned(learner)
    shutil.rmtree(saved.path / "trainer")
    save(tensors, checkpoint_id=saved.path / "trainer", no_dist=True)


def test_a_pickled_state_is_refused_without_trust(folder: Path) -> None:
    learner = learner_for(ALONE, None, Case())
    saver_in(folder / "run" / "checkpoints").save("rl", 1, learner, {})
    (saved,) = checkpoints(folder / "run" / "checkpoints")
    (saved.path / "trainer" / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(NotTrusted, match=r"\.metadata' is a pickle.*--trust"):
        saved.restore(learner)
    assert not (folder / "ran").exists()


@pytest.mark.slow  # importing torch's checkpoints takes seconds
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pickled_state_is_read_only_with_trust(folder: Path) -> None:
    import torch

    from tests.train.test_torchrun import update

    learner = learner_for(ALONE, None, Case())
    update(learner, Case(), 1)
    saver_in(folder / "run" / "checkpoints").save("rl", 1, learner, {})
    (saved,) = checkpoints(folder / "run" / "checkpoints")
    pickled(saved)
    with pytest.raises(NotTrusted, match=r"\.metadata' is a pickle.*--trust"):
        learner_for(ALONE, None, Case(), saved)
    with reading(Source("run", is_said=True)):
        again = learner_for(ALONE, None, Case(), saved)
    before, after = cloned(learner), cloned(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_no_file_of_a_checkpoint_is_a_pickle(folder: Path) -> None:
    saver_in(folder / "saved").save("rl", 1, learner_for(ALONE, None, Case()), {})
    files = [file for file in (folder / "saved").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".jinja"}
    with pytest.raises(NotTrusted):
        check_pickle("trainer.pt")


def test_a_run_is_signed_when_it_starts(folder: Path) -> None:
    from graft.train.run_dir.folder import RunFolder

    values = {"model": {"shape": {"width": 16}}, "task": {"env": "calculator"}}
    run = RunFolder(load_config({**values, "run": {"name": "own", "dir": str(folder)}}))
    run.claim()
    run.begin()
    run.release()
    assert why_not_own(folder / "own" / "config.yaml") == ""
    assert [file.name for file in config_folder().iterdir()] == ["key"]
