"""Every command of the pages is one that graft takes: sub-command, options, recipe, keys and values."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from graft.cli import app, main
from graft.config import Config, ConfigError, find_recipe, keys, load_config
from graft.doctor.tasks import can_check
from graft.envs import ENVS
from graft.recipe.peer_keys import PEER_KEYS
from tests.docs.pages import (
    BLOCKS,
    MARKS,
    PAGES,
    ROOT,
    Block,
    commands,
    inline,
    unload_modules,
    write_files,
)

TREE = typer.main.get_command(app)
GRAFT = [block for block in BLOCKS if commands(block.text, ("graft", "torchrun"))]
PLACEHOLDER = "{model: {path: MODEL}, task: {env: calculator}, sft: {steps: 1}}"
"""Stands for RECIPE where a page has RECIPE."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands see the files of the pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])  # commands add the folder that they start from
    write_files(tmp_path)
    for name in ("RECIPE", "recipe.yaml"):
        Path(name).write_text(PLACEHOLDER)
    yield
    unload_modules(tmp_path)


def find(arguments: list[str]) -> tuple[str, Any, list[str]]:
    """The sub-command's name, the command, and the arguments that are left for it."""
    command: Any = TREE
    path: list[str] = []
    rest = ["1" if each == "N" else each for each in arguments]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        path.append(rest.pop(0))
        if path[-1] not in command.commands:
            raise ConfigError(f"no command 'graft {' '.join(path)}'")
        command = command.commands[path[-1]]
    return " ".join(path), command, rest


def parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The sub-command and its parameters; click refuses unknown options."""
    name, command, rest = find(arguments)
    try:
        return name, command.make_context(name, rest).params
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer has a click of its own: not known by class
            raise
        raise ConfigError(error.format_message()) from error  # type: ignore[attr-defined]


def resolve(arguments: list[str]) -> None:
    name, params = parse(arguments)
    overrides = params.get("overrides") or []
    if (recipe := params.get("recipe")) and not can_check(recipe):
        load_config(recipe, [*overrides, "train.steps=0"] if name == "sft" else overrides)
    elif name in ("eval", "replay"):
        for override in overrides:
            check_key(override)
    if name in ("play", "data make"):
        env = str(params.get("env_id") or params.get("env") or params.get("task") or "")
        assert env.isupper() or env in ENVS or Path(env).exists(), f"no environment {env!r}"


def check_key(override: str) -> None:
    key = override.partition("=")[0]
    if not any(key == known or key.startswith(f"{known}.") for known in keys()):
        raise ConfigError(f"unknown key {key!r}")


def is_other(span: str) -> bool:
    """Looks like a key and is a file, or a name that a page's Python or another framework has."""
    files = (".py", ".md", ".toml", ".yaml", ".json", ".jsonl", ".safetensors")
    return span.endswith(files) or span in ("engine.stats", "engine.version")


def graft_arguments(block: Block) -> list[list[str]]:
    """The commands of graft, those that torchrun starts included."""
    found = commands(block.text, ("graft", "torchrun"))
    return [
        arguments[arguments.index("graft") + 1 :] for arguments in found if "graft" in arguments
    ]


@pytest.mark.parametrize("block", GRAFT, ids=lambda block: block.place)
def test_commands_are_those_that_graft_takes(block: Block):
    for arguments in graft_arguments(block) if block.mark != "output" else ():
        if block.mark == "refused":
            with pytest.raises(ConfigError):
                resolve(arguments)
        else:
            resolve(arguments)


@pytest.mark.parametrize(
    "block", [block for block in GRAFT if block.mark == "run"], ids=lambda block: block.place
)
def test_marked_commands_run(block: Block):
    for arguments in graft_arguments(block):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (
            f"graft {' '.join(arguments)}\n{done.output}\n{done.exception!r}"
        )


@pytest.mark.parametrize(
    "block", [block for block in GRAFT if block.mark == "output"], ids=lambda block: block.place
)
def test_commands_print_what_the_page_shows(block: Block, monkeypatch, capsys):
    for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        monkeypatch.setenv(name, value)  # as `main` sets them, and taken back
    monkeypatch.setenv("COLUMNS", "120")
    parts = re.split(r"^\$ graft (.*)\n", block.text, flags=re.M)[1:]
    for command, shown in zip(parts[::2], parts[1::2], strict=True):
        monkeypatch.setattr("sys.argv", ["graft", *shlex.split(command, comments=True)])
        with pytest.raises(SystemExit):
            main()
        seen = " ".join("".join(capsys.readouterr()).split())
        pattern = ".*".join(map(re.escape, " ".join(shown.split()).split("...")))
        assert re.fullmatch(pattern, seen), f"{block.place}: graft {command}\n{seen}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_keys_and_extras_in_the_prose_exist(page: Path):
    sections = "|".join(Config.model_fields)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = extras["project"]["optional-dependencies"]
    for span in inline(page):
        if span.startswith("graft ") and "|" not in span:  # may be short: `graft eval --on`
            _, command, rest = find(re.sub(r"\[|\]|\.\.\.", " ", span).split()[1:])
            known = {option for param in command.params for option in (*param.opts, "--help")}
            assert {word for word in rest if word.startswith("-")} <= known, span
        elif (
            re.fullmatch(rf"(?:{sections})\.[a-z_]+(?:[.=].*)?", span)
            and not is_other(span)
            and span not in PEER_KEYS
        ):
            check_key(span)
    for names in re.findall(r"graft-rl\[([\w,]+)\]", page.read_text(encoding="utf-8")):
        assert set(names.split(",")) <= set(extras), names


def test_make_targets_benchmarks_and_scripts_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.M))
    for block in BLOCKS:
        for arguments in commands(block.text, ("make", "python")):
            if arguments[0] == "make":
                settings = dict(each.split("=", 1) for each in arguments[1:] if "=" in each)
                assert {each for each in arguments[1:] if "=" not in each} <= targets, block.place
                bench = settings.get("BENCH", "cpu_step")
                assert (ROOT / "benchmarks" / f"{bench}.py").exists(), block.place
                tests = re.findall(r"tests/[\w/.]+", settings.get("ARGS", ""))
                assert all((ROOT / path).exists() for path in tests), block.place
            elif (
                len(arguments) > 2
                and arguments[1] == "-m"
                and arguments[2].startswith("benchmarks")
            ):
                name = ROOT / arguments[2].replace(".", "/")
                assert name.with_suffix(".py").exists() or name.is_dir(), block.place
            elif arguments[1].endswith(".py"):
                assert (ROOT / arguments[1]).exists(), block.place


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language == "yaml"],
    ids=lambda block: block.place,
)
def test_yaml_has_keys_that_recipes_have(block: Block):
    for values in yaml.safe_load_all(block.text):
        for section, fields in values.items():
            if block.mark != "fragment":
                assert section in Config.model_fields, section
            for name in fields if section in Config.model_fields else ():
                check_key(f"{section}.{name}")
    if block.mark == "file":
        load_config(block.about, [] if "task:" in block.text else ["train.steps=0"])


def test_marks_are_known_and_files_have_one_text():
    assert {block.mark for block in BLOCKS} <= {"", *MARKS}
    names = [block.about for block in BLOCKS if block.mark == "file"]
    assert sorted(names) == sorted(set(names))


def test_recipes_that_are_named_exist():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:arpo|aepo|expa)/[\w-]+)`", page):
        find_recipe(name)
