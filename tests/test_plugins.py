"""Packages that add environments, tools and rewards by entry points; graft's own are found like them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graft
from graft import plugins
from graft.envs.table import BUNDLED, EnvTable
from graft.ours import PACKAGES, is_ours
from graft.plugins import Table, entries
from graft.registry import UnknownName, load_service, resolve
from graft.trust import NotTrusted, Source, reading

ROOT = Path(__file__).parent.parent
MAZE = ROOT / "examples" / "plugin"


@pytest.fixture
def forget() -> Iterator[None]:
    """What is installed is looked up anew, before and after the test."""
    caches = (entries, plugins._groups_of_checkout)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.fixture
def maze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: None) -> Path:
    """The example as pip would leave it: its modules, and what it says about itself."""
    about = tmp_path / "graft_maze-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: graft-maze\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text(
        "[graft.envs]\nmaze = graft_maze.maze:Maze\n\n"
        "[graft.tools]\ncompass = graft_maze.compass:compass\n\n"
        "[graft.rewards]\nbrief = graft_maze.rewards:brief\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(MAZE / "src"))
    return about


def test_the_parts_of_an_installed_package_are_known_by_name(maze: Path):
    envs = EnvTable("graft.envs", BUNDLED)
    env = envs["maze"].builder()(size=2)
    assert env.reset(seed=0)[0].startswith("You are at 0,0. The exit is at 1,1.")
    env.step("N")
    assert env.step("E").reward == 1.0
    compass = resolve("compass", Table("graft.tools", {}), "tool")
    assert compass(0, 0, 1, 1) == "E"
    assert resolve("brief", Table("graft.rewards", {}), "reward").__name__ == "brief"


def test_a_table_keeps_its_own_and_what_is_registered(maze: Path):
    table = Table("graft.tools", {"calculator": "graft.tools.calculator:Calculator"})
    assert {"calculator", "compass", "python", "search"} <= set(table)
    table["mine"] = "my.module:tool"
    assert table["mine"] == "my.module:tool" and "mine" in table
    del table["mine"]
    assert "mine" not in table and len(table) == len(list(table))


def test_a_name_of_grafts_own_is_not_given_away(maze: Path):
    (maze / "entry_points.txt").write_text("[graft.tools]\npython = graft_maze.compass:compass\n")
    with pytest.warns(UserWarning, match="graft_maze.compass:compass"):
        assert entries("graft.tools")["python"].startswith("graft_envs.")


def test_a_stranger_may_not_name_parts_of_other_packages(maze: Path):
    tools = Table("graft.tools", {"calculator": "graft.tools.calculator:Calculator"})
    with reading(Source("run/config.yaml", "its author is unknown")):
        assert resolve("python", tools, "tool").__name__ == "PythonTool"
        with pytest.raises(NotTrusted, match="compass"):
            resolve("compass", tools, "tool")
    with reading(Source("run/config.yaml", "its author is unknown", frozenset({"compass"}))):
        resolve("compass", tools, "tool")


def test_a_package_without_its_module_is_a_sentence(maze: Path):
    (maze / "entry_points.txt").write_text("[graft.envs]\nmaze = graft_no_such.maze:Maze\n")
    with pytest.raises(UnknownName, match="graft_no_such"):
        EnvTable("graft.envs", BUNDLED)["maze"].builder()


def test_a_missing_service_is_a_sentence():
    with pytest.raises(UnknownName, match="no_such_service"):
        load_service("no_such_service")


def test_a_checkout_needs_no_install_to_find_its_packages(
    forget: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    assert "game:Wordle-v0" in EnvTable("graft.envs", BUNDLED)
    assert entries("graft.tools")["search"] == "graft_search:SearchTool"


def test_an_installed_graft_without_a_checkout_finds_them_too(
    forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from importlib.metadata import EntryPoint

    own = EntryPoint("search", "graft_search:SearchTool", "graft.tools")
    monkeypatch.setattr(plugins, "ROOT", tmp_path)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [own])
    assert entries("graft.tools") == {"search": "graft_search:SearchTool"}


@pytest.mark.parametrize("group", sorted(plugins._groups_of_checkout() or {}))
def test_every_entry_point_of_grafts_own_packages_can_be_loaded(group: str):
    for name, place in entries(group).items():
        if is_ours(place.partition(":")[0]):
            assert resolve(name, {name: place}, group) is not None


def test_only_grafts_packages_are_grafts():
    assert is_ours(graft.Task) and is_ours("graft_envs.games") and not is_ours("graftier.x")
    assert all((ROOT / name / "__init__.py").is_file() for name in PACKAGES)


def test_the_sandbox_needs_the_standard_library_alone():
    import ast

    for file in (ROOT / "graft_sandbox").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                assert top in {*sys.stdlib_module_names, "graft_sandbox"}, (file, name)


@pytest.mark.slow
def test_the_example_is_built_installed_and_played(tmp_path: Path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(tmp_path), str(MAZE)], check=True, timeout=300)
    code = (
        "import json, graft; env = graft.make('maze', size=2, seed=0); env.reset(); "
        "print(json.dumps([env.step('N').reward, env.step('E').reward]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout) == [0.0, 1.0]
