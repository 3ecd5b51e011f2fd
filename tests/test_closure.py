"""The short way in: how much a reader has to know for one step, counted over import statements.

The closure of a module is every file of `graft` that it reaches by imports, those inside functions and
under `if TYPE_CHECKING` included (as `tests/test_floors.py` finds them). `__init__.py` files of the
folders between count only if something is imported from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from tests.test_floors import ROOT, imports, room_of, whole_package

MAX_FILES, MAX_LINES = 80, 12_000
"""The limits of `graft.train.rl`, the page of the step."""

FILES = whole_package()


def read(module: str) -> str:
    return (ROOT / FILES[module]).read_text("utf-8")


@cache
def imported_by(module: str) -> frozenset[str]:
    known = set(FILES)
    return frozenset(one.target for one in imports(read(module), FILES[module], known)) & known


def closure(
    starts: Iterable[str], imported_by: Callable[[str], Iterable[str]] = imported_by
) -> set[str]:
    """The modules themselves and all that they import, directly or through others."""
    reached: set[str] = set()
    waiting = list(starts)
    while waiting:
        if (module := waiting.pop()) not in reached:
            reached.add(module)
            waiting += imported_by(module)
    return reached


def test_the_page_of_the_step_needs_few_files():
    needed = closure(["graft.train.rl"])
    lines = sum(read(name).count("\n") for name in needed)
    assert len(needed) <= MAX_FILES and lines <= MAX_LINES, (len(needed), lines, sorted(needed))


def test_the_step_knows_no_recipe_no_run_folder_and_no_engine():
    needed = closure(["graft.train.rl"])
    rooms = {room_of(name) for name in needed}
    assert not rooms & {"config", "recipe", "engine", "text", "data", "tools", "envs", "actions"}
    folders = {".".join(name.split(".")[:3]) for name in needed}
    assert not folders & {"graft.train.run_dir", "graft.train.distributed", "graft.train.phases"}


def test_the_native_engine_needs_neither_rollouts_nor_training():
    own = [name for name in FILES if name.startswith("graft.engine.native")]
    assert own
    assert not {room_of(name) for name in closure(own)} & {"rollout", "gateway", "train"}


def test_a_closure_is_followed_through_other_modules_and_around_circles():
    graph = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}
    assert closure(["a"], graph.__getitem__) == {"a", "b", "c"}
    assert closure(["d"], graph.__getitem__) == {"a", "b", "c", "d"}


def test_the_name_of_an_algorithm_is_resolved_in_one_place():
    """Who asks for the preset itself misses what the recipe changes in it."""
    users = {name for name in FILES if "resolve_preset" in read(name)}
    assert users == {"graft.algos.presets", "graft.train.algorithm"}
