"""Whose code runs: settings of strangers name none, the user's own runs and recipes name any."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from graft.config import ConfigError, load_config
from graft.envs import make
from graft.http import HttpClient
from graft.registry import resolve
from graft.rewards import make_reward
from graft.text.template import find_template
from graft.tools import make_tools
from graft.trust import NotTrusted, Source, check_address, reading
from graft.trust.ownership import config_folder, remember, settings_from, sign, why_not_own
from graft_envs.code.python_tool import PythonTool
from tests.train.test_torchrun import ALONE, Case, learner_for
from tests.train.test_trainer_state import saver_in

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
    "no sandbox": lambda: PythonTool(sandbox="none"),
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
    recipe.chmod(0o666)
    with settings_from("mine.yaml"), pytest.raises(NotTrusted, match="others can write"):
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
    recipe.chmod(0o666)  # others can write it, so it may be theirs
    with (
        settings_from(recipe),
        pytest.raises(ConfigError, match=r"oc.env:SECRET.*--trust") as caught,
    ):
        load_config(str(recipe))
    assert "canary" not in str(caught.value)
    with settings_from(recipe, trust=True):
        assert "canary" in str(load_config(str(recipe)).task.reward)
    del text["task"]["reward"]
    text["run"] = {"name": "runs", "dir": "${run.name}"}
    recipe = folder / "others.yaml"
    recipe.write_text(yaml.safe_dump(text))
    recipe.chmod(0o666)
    with settings_from(recipe):
        assert load_config(str(recipe)).run.dir == "runs"  # other keys may be named


# the record of recipes


def foreign(folder: Path, name: str = "theirs.yaml") -> Path:
    """A recipe that others can write."""
    recipe = folder / name
    recipe.write_text("task: {env: 'strangers_module:Env'}\n")
    recipe.chmod(0o666)
    return recipe


def record(*lines: bytes) -> None:
    config_folder().mkdir(parents=True, exist_ok=True)
    (config_folder() / "recipes.jsonl").write_bytes(b"".join(lines))


def forged(path: Path, **more: Any) -> bytes:
    return json.dumps({"path": str(path), **more}).encode()


@pytest.mark.parametrize("kind", ["old", "mac", "more", "cache", "number", "torn", "binary"])
def test_a_line_that_graft_did_not_write_trusts_nothing(folder: Path, kind: str) -> None:
    recipe = foreign(folder)
    sign(folder / "run" / "config.yaml")  # so there is a key
    line = {
        "old": forged(recipe) + b"\n",
        "mac": forged(recipe, mac="0" * 64) + b"\n",
        "more": forged(recipe, mac="0" * 64, also=1) + b"\n",
        # a cache at this place, with line ends in the name of its model
        "cache": b"SQLite format 3\0\n" + forged(recipe) + b"\n\0\0",
        "number": b'{"path": 3, "mac": 4}\n',
        "torn": forged(recipe)[:-9],
        "binary": bytes(range(256)) + b"\n",
    }[kind]
    record(line)
    with pytest.warns(UserWarning, match=r"recipes\.jsonl:\d+ is no record"):
        assert "others can write" in why_not_own(recipe)
    with pytest.warns(UserWarning, match="is no record"):
        remember(recipe)
    with pytest.warns(UserWarning, match="is no record"):
        assert why_not_own(recipe) == ""  # a line behind a damaged one counts


def test_the_record_is_the_users_alone_and_no_link_is_followed(folder: Path) -> None:
    recipe = foreign(folder)
    record()
    (config_folder() / "recipes.jsonl").chmod(0o644)
    remember(recipe)
    kept = config_folder() / "recipes.jsonl"
    assert kept.stat().st_mode & 0o777 == 0o600 and why_not_own(recipe) == ""
    line = kept.read_bytes()
    kept.unlink()
    (folder / "elsewhere").write_bytes(b"")
    kept.symlink_to(folder / "elsewhere")
    remember(recipe)
    assert (folder / "elsewhere").read_bytes() == b"" and why_not_own(recipe)
    kept.unlink()
    record(line.replace(b"theirs", b"others"))
    with pytest.warns(UserWarning, match="is no record"):
        assert why_not_own(foreign(folder, "others.yaml"))


def test_no_record_clears_the_settings_of_a_run(folder: Path) -> None:
    settings = folder / "run" / "config.yaml"
    remember(settings)
    with settings_from(settings, trust=True):
        pass
    assert not (config_folder() / "recipes.jsonl").exists()
    recipe = foreign(folder)
    remember(recipe)
    (folder / "run" / "config.yaml").unlink()
    settings.symlink_to(recipe)  # by another name it is what it is
    assert why_not_own(settings) == ""
    recipe.unlink()
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "config.yaml").write_text("{}")
    recipe.symlink_to(folder / "elsewhere" / "config.yaml")
    assert "you did not start this run" in why_not_own(recipe)


# whose a recipe is


def test_a_recipe_below_the_working_folder_is_mine(folder: Path, monkeypatch) -> None:
    (folder / "mine").mkdir()
    recipe = folder / "mine" / "recipe.yaml"
    recipe.write_text("task: {env: 'strangers_module:Env'}\n")
    assert why_not_own(recipe) == "" and not (config_folder() / "recipes.jsonl").exists()
    for place, mode in ((recipe, 0o646), (folder / "mine", 0o757), (folder, 0o1777)):
        before = place.stat().st_mode
        place.chmod(mode)
        assert "others can write" in why_not_own(recipe)
        place.chmod(before)
    link = folder / "link.yaml"
    link.symlink_to(recipe)
    assert why_not_own(link) == ""
    monkeypatch.chdir(folder / "run")
    assert "where you are" in why_not_own(recipe) and "where you are" in why_not_own(link)
    monkeypatch.setattr("os.geteuid", lambda: recipe.stat().st_uid + 1)
    monkeypatch.chdir(folder)
    assert "belongs to another user" in why_not_own(recipe)


def test_a_group_of_the_user_alone_may_write(folder: Path, monkeypatch) -> None:
    import grp
    import pwd
    from types import SimpleNamespace

    recipe = folder / "mine.yaml"
    recipe.write_text("{}")
    recipe.chmod(0o664)
    members: list[str] = []
    user = SimpleNamespace(pw_name="me")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=members))
    assert why_not_own(recipe) == ""
    members.append("other")
    assert "others can write" in why_not_own(recipe)
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)
    assert "others can write" in why_not_own(recipe)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["doctor"], marks=pytest.mark.slow),
        ["plan", "--no-probe"],
    ],
    ids=["doctor", "plan"],
)
def test_doctor_and_plan_open_my_recipe_as_train_does(folder: Path, command: list[str]) -> None:
    from typer.testing import CliRunner

    from graft.cli import app

    shape = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ff": 32}
    task = {"env": "calculator", "reward": "strangers_module:reward"}
    values = {"model": {"shape": shape}, "task": task, "rollout": {"max_tokens": 8}}
    recipe = folder / "mine.yaml"
    recipe.write_text(yaml.safe_dump(values))
    done = CliRunner().invoke(app, [*command, "mine.yaml"])
    assert isinstance(done.exception, SystemExit | None) and "--trust" not in done.output
    recipe.write_text(yaml.safe_dump({**values, "sft": {"data": "rows.jsonl", "steps": 1}}))
    recipe.chmod(0o666)
    done = CliRunner().invoke(app, [*command, "mine.yaml"])
    assert isinstance(done.exception, NotTrusted) and "sft.data" in str(done.exception)


def test_a_server_is_asked_only_if_the_user_typed_it() -> None:
    typed = frozenset(["task.args.url=http://mine:8000/v1"])
    with reading(Source("theirs.yaml", "it is a stranger's", typed)):
        check_address("http://mine:8000/v1/chat/completions")
        for url in ("http://mine:80", "http://mine", "https://mine:8000", "http://theirs:8000"):
            with pytest.raises(NotTrusted, match=r"theirs\.yaml would connect to"):
                check_address(url)
        with pytest.raises(NotTrusted):  # no second attempt, no retry
            HttpClient(timeout=1, retries=5).request("http://127.0.0.1:9/", None, bytes)
    check_address("http://theirs:8000")


def test_training_a_recipe_is_a_yes_and_training_a_strangers_run_is_not(folder: Path) -> None:
    recipe = foreign(folder)
    with settings_from(recipe, is_trained=True):
        assert resolve("strangers_module:Env", {}, "env")
    assert why_not_own(recipe) == ""
    (folder / "run" / "checkpoints").mkdir()
    with settings_from("run/config.yaml", is_trained=True), pytest.raises(NotTrusted):
        resolve("strangers_module:Env", {}, "env")


# the state of a trainer


def test_no_file_of_a_checkpoint_is_a_pickle(folder: Path) -> None:
    saver_in(folder / "saved").save("rl", 1, learner_for(ALONE, None, Case()), {})
    files = [file for file in (folder / "saved").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".jinja"}


def test_a_run_is_signed_when_it_starts(folder: Path) -> None:
    from graft.train.run_dir.folder import RunFolder

    values = {"model": {"shape": {"width": 16}}, "task": {"env": "calculator"}}
    run = RunFolder(load_config({**values, "run": {"name": "own", "dir": str(folder)}}))
    run.claim()
    run.begin()
    run.release()
    assert why_not_own(folder / "own" / "config.yaml") == ""
    assert [file.name for file in config_folder().iterdir()] == ["key"]
