"""Pages about the Python side: the names they list exist, and their line counts are about right."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import graft

ROOT = Path(__file__).resolve().parents[2]
COUNT = re.compile(r"`(graft/[\w/]+\.py)` \[(\d+)\]")


def test_the_reading_page_counts_the_lines_of_its_files():
    page = (ROOT / "docs" / "reading.md").read_text("utf-8")
    listed = COUNT.findall(page)
    assert len(listed) > 15
    now = {path: len((ROOT / path).read_text("utf-8").splitlines()) for path, _ in listed}
    wrong = {
        path: now[path] for path, count in listed if not 2 / 3 < now[path] / int(count) < 3 / 2
    }
    assert wrong == {}, "docs/reading.md has other numbers of lines for these"
    core, _, _ = page.partition("## Around it")
    (about,) = re.findall(r"About ([\d,]+) lines", page)
    counts = [int(count) for _, count in COUNT.findall(core)]
    assert int(about.replace(",", "")) == round(sum(counts), -2)


def test_the_python_page_lists_every_name():
    page = (ROOT / "docs" / "loop.md").read_text("utf-8")
    table = set(re.findall(r"`(\w+)`", page))
    assert set(graft.__all__) - table == {"__version__"}
    for target in re.findall(r"^::: (\S+)$", page, re.M):
        module, _, name = target.rpartition(".")
        assert hasattr(__import__(module, fromlist=["_"]), name), target


def test_names_for_editors_are_the_names_at_run_time():
    """What the TYPE_CHECKING block imports is what `graft.<name>` is."""
    tree = ast.parse((ROOT / "graft" / "__init__.py").read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown: dict[str, object] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        module = __import__(str(node.module), fromlist=["_"])
        shown |= {one.asname or one.name: getattr(module, one.name) for one in node.names}
    assert set(shown) | {"__version__"} == set(graft.__all__)
    for name, thing in shown.items():
        if name not in ("train", "evaluate", "rollout"):  # packages that can be called
            assert getattr(graft, name) is thing, name
        signature = inspect.signature(thing)  # type: ignore[arg-type]
        assert inspect.signature(getattr(graft, name)) == signature, name


@pytest.mark.parametrize("name", ["load", "Engine", "Learner", "collect", "evaluate", "generate"])
def test_every_argument_is_explained_in_the_docstring(name):
    thing = getattr(graft, name)
    if name == "evaluate":
        from graft.api.evaluate import evaluate as thing
    for argument in inspect.signature(thing).parameters:
        assert re.search(rf"^    (?:    )?{argument}  +\S", thing.__doc__, re.M), argument


def test_sync_and_async_forms_take_the_same_arguments():
    for sync, other in ((graft.collect, graft.acollect), (graft.generate, graft.agenerate)):
        assert inspect.signature(sync) == inspect.signature(other)
