"""Every setting that can hold a text is on the one list, and a stranger's recipe does nothing by it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from graft.algos.credits.table import CREDITS
from graft.algos.distillation import DIVERGENCES
from graft.algos.losses.table import LOSSES
from graft.algos.presets import PRESETS
from graft.algos.reductions import REDUCTIONS
from graft.algos.shaping import SHAPINGS
from graft.algos.weights import WEIGHTS
from graft.config import Config, load_config
from graft.engine import ENGINES
from graft.envs.table import ENVS
from graft.envs.tool_env import ToolEnv
from graft.envs.wrappers import WRAPPERS
from graft.ours import FOLDERS
from graft.recipe.admission import NOT_OF_A_STEP, NOT_OF_ATTEMPTS
from graft.recipe.attempt_keys import EnvItem
from graft.registry import load
from graft.rewards import REWARDS
from graft.rollout.branches.branch import BRANCHES
from graft.tools import TOOLS
from graft.tools.function import FunctionTool
from graft.train.run_dir.trackers import TRACKERS
from graft.trust import NotTrusted, Source, reading
from graft.trust.settings import ARGUMENTS, KEYS, NAMES, Effect, check_settings
from graft_envs.games.wiki.game import BACKENDS
from graft_envs.retail.customer import CUSTOMERS
from graft_search.mcp import McpTools
from graft_search.pages.summary import Summariser
from graft_search.source import SOURCES

TABLES: dict[str, Mapping[str, Any]] = {
    "ENVS": {name: entry.builder for name, entry in ENVS.items()},
    "WRAPPERS": WRAPPERS,
    "REWARDS": REWARDS,
    "TOOLS": TOOLS,
    "SOURCES": SOURCES,
    "CUSTOMERS": CUSTOMERS,
    "BACKENDS": BACKENDS,
    "BRANCHES": BRANCHES,
    "ENGINES": ENGINES,
    "TRACKERS": TRACKERS,
    "CREDITS": CREDITS,
    "LOSSES": LOSSES,
    "REDUCTIONS": REDUCTIONS,
    "WEIGHTS": WEIGHTS,
    "DIVERGENCES": DIVERGENCES,
    "SHAPINGS": SHAPINGS,
    "inside": {one.__name__: one for one in (ToolEnv, FunctionTool, McpTools, Summariser)},
}
"""Everything that a recipe builds with arguments, by its table."""

NO_ARGUMENTS = {"STYLES", "SYNTAXES", "READERS", "FORMATS", "FORMS", "SETS", "TASKS", "PRESETS"}
"""Tables of names whose entries a recipe gives no arguments."""

FILLED = {
    "of_training", "trajectory", "model_folder", "tokenizer", "function", "decoder", "folder", "config",
    "space", "group", "task", "env",
}  # fmt: skip
"""Parameters that graft fills, never a recipe."""

TEXT = re.compile(r"\b(str|Any|Path|PathLike|bytes|DataPlaces|Mapping|dict|object|Callable)\b")


def takes_text(annotation: Any) -> bool:
    if annotation is inspect.Parameter.empty:
        return True
    return bool(TEXT.search(annotation if isinstance(annotation, str) else str(annotation)))


def arguments(name: str, entry: Any) -> Iterator[str]:
    """The arguments of a table's entry that can hold a text."""
    build = load(entry) if isinstance(entry, str) else entry
    if getattr(build, "__func__", None) is type(ENVS["calculator"]).builder:
        build = build()
    for one in inspect.signature(build).parameters.values():
        is_named = one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        if is_named and one.name not in FILLED and takes_text(one.annotation):
            yield one.name


@pytest.mark.parametrize("table", TABLES)
def test_every_argument_that_can_hold_a_text_is_on_the_list(table: str) -> None:
    lacking = {
        f"{name}.{one}"
        for name, entry in TABLES[table].items()
        for one in arguments(name, entry)
        if one not in ARGUMENTS
    }
    assert not lacking, "say what they do in graft/trust/settings.py"


def test_the_walk_finds_an_argument_that_is_not_on_the_list() -> None:
    def planted(task: Any, trajectory: Any, *, log_to: str = "", most: int = 3) -> float:
        return 0.0

    assert list(arguments("planted", planted)) == ["log_to"] and "log_to" not in ARGUMENTS


def test_every_table_of_names_is_walked() -> None:
    """Each table that code hands to `resolve` or `make` is in one of the two lists above."""
    found: set[str] = set()
    for file in (file for folder in FOLDERS for file in Path(folder).rglob("*.py")):
        text = file.read_text()
        if "resolve(" not in text and "make(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in ("resolve", "make") and len(node.args) == 3:
                found |= {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
    assert {name for name in found if name.isupper()} <= TABLES.keys() | NO_ARGUMENTS
    assert {"ENGINES", "REWARDS", "TRACKERS", "SOURCES"} <= found


def test_every_key_that_can_hold_a_text_is_on_the_list() -> None:
    def holds(annotation: Any) -> bool:
        if annotation in (str, Any, dict, list, Path) or annotation is EnvItem:
            return True
        return any(holds(one) for one in get_args(annotation) if not isinstance(one, str))

    keys = {
        f"{section}.{name}"
        for section, info in Config.model_fields.items()
        for name, field in type(info.default).model_fields.items()
        if holds(field.annotation)
    }
    assert keys == KEYS.keys()
    items = {name for name, field in EnvItem.model_fields.items() if holds(field.annotation)}
    assert items <= ARGUMENTS.keys()


def test_what_is_left_out_exists() -> None:
    for name in (*NOT_OF_ATTEMPTS, *NOT_OF_A_STEP):
        section, _, key = name.partition(".")
        kind = type(Config.model_fields[section].default)
        assert not key or key in kind.model_fields
    known = {name for table in TABLES.values() for name in table} | {"mcp", "none"}
    assert known >= NAMES.keys() and PRESETS


# what a stranger's settings may hold


HOSTILE = {
    Effect.READ: "/etc/passwd",
    Effect.MODEL: "OWNER/NAME",
    Effect.BUNDLED: "/etc/passwd",
    Effect.WRITE: "/tmp/graft-written",
    Effect.CONNECT: "http://203.0.113.1/v1",
    Effect.EXECUTE: "touch ran",
    Effect.SECRET: "HF_TOKEN",
    Effect.UNKNOWN: "/etc/passwd",
}
DEFAULTS = {name: info.default.model_dump() for name, info in Config.model_fields.items()}


def judge(values: Mapping[str, Any], own: tuple[str, ...] = (), file: str = "theirs.yaml") -> str:
    """The refusal, or "": what a stranger's recipe with these values would meet."""
    with reading(Source(file, "it is a stranger's")):
        try:
            check_settings(values, DEFAULTS, own)
        except NotTrusted as refused:
            return str(refused)
    return ""


def at(key: str, value: Any) -> dict[str, dict[str, Any]]:
    section, _, name = key.partition(".")
    return {section: {name: value}}


@pytest.mark.parametrize("key", [key for key, effect in KEYS.items() if effect in HOSTILE])
def test_a_key_that_does_something_is_refused(key: str) -> None:
    text = HOSTILE[KEYS[key]]
    for value in (text, [text], {"a": text}):
        assert f"{key}" in judge(at(key, value)) and "--trust" in judge(at(key, value))
    assert judge(at(key, text), own=(key,)) == ""
    assert judge(at(key, DEFAULTS[key.partition(".")[0]][key.partition(".")[2]])) == ""


@pytest.mark.parametrize("name", [name for name, effect in ARGUMENTS.items() if effect in HOSTILE])
@pytest.mark.parametrize("key", ["task.args", "task.reward", "task.env", "sft.demo_args"])
def test_an_argument_that_does_something_is_refused_at_any_depth(key: str, name: str) -> None:
    text = HOSTILE[ARGUMENTS[name]]
    deep = [{"f1": {}}, {"tools": {"use": [{"search": {name: text}}]}, "weight": 1}]
    for value in ({name: text}, {name: [text]}, deep, [{"env": "prompts", "args": {name: text}}]):
        refused = judge(at(key, value))
        assert refused.partition("=")[0].endswith(name) and repr(text) in refused
        assert judge(at(key, value), own=(key,)) == ""
    assert judge(at(key, {name: None})) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_acts_by_itself_is_refused(name: str) -> None:
    forms = [name, f"f1, {name}", ["f1", name]]
    forms += [{name: {}}, [{name: None}]] * (name not in ARGUMENTS)
    for value in forms:
        for key in ("task.wrappers", "task.reward"):
            assert repr(name) in judge(at(key, value))
    assert repr(name) in judge(at("task.args", {"source": name}))


@pytest.mark.parametrize(
    "value",
    [
        {"args": {"colour": "/etc/passwd"}},
        {"args": {"colour": "evil:Env"}},
        {"args": {"colour": "https://203.0.113.1"}},
        {"args": {"colour": "../secrets"}},
        {"args": {"colour": "~/.ssh/id_rsa"}},
        {"args": {"a": {"b": [{"colour": "x/y"}]}}},
    ],
)
def test_an_argument_that_graft_does_not_know_holds_words_alone(value: dict[str, Any]) -> None:
    assert "colour" in judge({"task": value})
    assert judge({"task": {"args": {"colour": "dark red", "sizes": [1, 2], "is_on": True}}}) == ""


def test_files_of_the_run_may_be_read_and_no_link_leads_out(tmp_path: Path, monkeypatch) -> None:
    run, outside = tmp_path / "run", tmp_path / "rows.jsonl"
    run.mkdir()
    for file in (run / "config.yaml", run / "rows.jsonl", outside):
        file.write_text("{}\n")
    (run / "link.jsonl").symlink_to(outside)
    settings = str(run / "config.yaml")

    def data(path: Path | str) -> str:
        return judge({"task": {"args": {"data": str(path)}}}, file=settings)

    assert data(run / "rows.jsonl") == ""
    (run / "rows").mkdir()
    (run / "rows" / "a.jsonl").write_text("{}\n")
    assert data(run / "rows") == ""
    (run / "rows" / "b.jsonl").symlink_to(outside)
    (run / "~").mkdir()
    (run / "~" / "c.jsonl").write_text("{}\n")
    for place in (
        outside,
        run / "rows",
        run / "*.jsonl",
        run / "link.jsonl",
        run / ".." / "rows.jsonl",
        run / "absent.jsonl",
    ):
        assert "task.args.data" in data(place)
    monkeypatch.chdir(run)  # a name on the hub is no file of the run
    assert (
        data("rows.jsonl") == ""
        and data("~/c.jsonl")
        and data("OWNER/NAME")
        and data("http://203.0.113.1/a.jsonl")
    )
    # a lone recipe has no folder of its own: what lies beside it may be the reader's
    beside = judge({"task": {"args": {"data": "rows.jsonl"}}}, file=str(run / "recipe.yaml"))
    assert "task.args.data" in beside


def test_bundled_files_and_texts_are_no_files_of_the_reader(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert judge({"actions": {"file": "calculator"}, "model": {"chat_template": "chatml"}}) == ""
    assert (
        judge({"model": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}})
        == ""
    )
    (tmp_path / "calculator").write_text("mine")
    assert "actions.file" in judge({"actions": {"file": "calculator"}})


RECIPE = {
    "model": {"path": "OWNER/NAME", "chat_template": "chatml"},
    "task": {"env": "calculator"},
    "sft": {"data": "/home/me/rows.jsonl", "steps": 1},
    "run": {"dir": "/home/them/runs", "trackers": ["tensorboard", "wandb"]},
    "engine": {"url": ["http://203.0.113.1"]},
}


def test_what_a_command_never_reads_is_left_out_and_needs_no_trust(tmp_path: Path) -> None:
    run = tmp_path / "theirs"
    run.mkdir()
    file = run / "config.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    with reading(Source(str(file), "it is a stranger's")):
        config = load_config(str(file), unused=NOT_OF_ATTEMPTS)
        assert (config.sft.data, config.engine.url, config.run.trackers) == (
            "",
            [],
            ["tensorboard"],
        )
        assert (config.model.path, config.run.dir, config.run.name) == ("none", "runs", "theirs")
        with pytest.raises(NotTrusted, match=r"run\.trackers='wandb'"):
            load_config(str(file))  # a caller that says nothing uses everything
        with pytest.raises(NotTrusted, match=r"sft\.data"):
            load_config(str(file), ["model.path=MINE", "run.trackers=[]", "engine.url=[]"])
    assert load_config(str(file), unused=NOT_OF_ATTEMPTS).sft.data  # the user's own is as it is
