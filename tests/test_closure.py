"""The short way in: how much a reader has to know for one step, counted over import statements.

The closure of a module is every file of `graft` that it reaches by imports, those inside functions and
under `if TYPE_CHECKING` included (as `tests/test_floors.py` finds them). `__init__.py` files of the
folders between count only if something is imported from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from tests.test_floors import ROOT, imports, room_of, whole_package

MAX_FILES, MAX_LINES = 80, 12_000
"""Of `graft.train.rl`, the page of the step."""


def reached(graph: Mapping[str, set[str]], starts: Iterable[str]) -> set[str]:
    """The modules themselves and all that they import, directly or through others."""
    known: set[str] = set()
    waiting = list(starts)
    while waiting:
        if (module := waiting.pop()) not in known:
            known.add(module)
            waiting += graph[module]
    return known


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {name: (ROOT / file).read_text("utf-8") for name, file in whole_package().items()}


@pytest.fixture(scope="module")
def graph(sources) -> dict[str, set[str]]:
    files = whole_package()
    return {
        name: {one.target for one in imports(text, files[name], set(files))} & set(files)
        for name, text in sources.items()
    }


def test_the_page_of_the_step_needs_few_files(graph, sources):
    needed = reached(graph, ["graft.train.rl"])
    lines = sum(sources[name].count("\n") for name in needed)
    assert len(needed) <= MAX_FILES and lines <= MAX_LINES, (len(needed), lines, sorted(needed))


def test_the_step_knows_no_recipe_no_run_folder_and_no_engine(graph):
    rooms = {room_of(name) for name in reached(graph, ["graft.train.rl"])}
    assert not rooms & {"config", "recipe", "engine", "text", "data", "tools", "envs", "actions"}
    folders = {".".join(name.split(".")[:3]) for name in reached(graph, ["graft.train.rl"])}
    assert not folders & {"graft.train.run_dir", "graft.train.distributed", "graft.train.phases"}


def test_the_native_engine_needs_neither_rollouts_nor_training(graph):
    own = [name for name in graph if name.startswith("graft.engine.native")]
    assert own
    needed = reached(graph, own)
    assert not {room_of(name) for name in needed} & {"rollout", "gateway", "train"}


def test_a_closure_is_followed_through_other_modules_and_around_circles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert reached(graph, ["a"]) == {"a", "b", "c"}
    assert reached(graph, ["d"]) == {"a", "b", "c", "d"}
