"""The Python of the pages runs, page by page, and prints what the page shows."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import graft
from graft.envs import ENVS
from graft.evaluate.benchmarks import BENCHMARKS
from graft_sandbox.choice import probe
from tests.docs.pages import BLOCKS, ROOT, Block, unload_modules, write_files

HAS_OWN_FILES = ("bubblewrap", "namespaces")
PYTHON = [block for block in BLOCKS if block.language == "python"]


def pages(blocks: list[Block]) -> list[Path]:
    return list(dict.fromkeys(block.page for block in blocks))


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, with_slow: bool) -> None:
    """Run the blocks of a page one after the other in one namespace, as a script would."""
    write_files(folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("SEARCH_URL", raising=False)
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    tables: list[Any] = [(table, dict(table)) for table in (BENCHMARKS, ENVS)]
    try:
        for block in (block for block in BLOCKS if block.page == page):
            if block.text.startswith(">>> "):
                run_session(block, main.__dict__)
            if block.language != "python":
                continue
            if block.mark in ("needs", "fragment", "file") or (
                block.mark == "slow" and not with_slow
            ):
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.text, block.place, "exec"), main.__dict__)
            if block.output is not None:
                assert printed.getvalue().strip() == block.output.strip(), block.place
    finally:
        for table, content in tables:  # a page may add a line to one
            table.clear()
            table.update(content)
        unload_modules(folder)


def run_session(block: Block, names: dict[str, Any]) -> None:
    """A block of `>>> statement`, each with its value or its error behind it, as a prompt shows them."""
    for statement, shown in re.findall(r"^>>> (.*)\n((?:(?!>>> ).*\n)*)", block.text, re.M):
        try:
            value = eval(statement, names)
            seen = "" if value is None else repr(value)
        except SyntaxError:  # no expression
            exec(statement, names)
            seen = ""
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
        assert seen == shown.strip(), f"{block.place}: {statement}"


@pytest.mark.parametrize("page", pages(PYTHON), ids=lambda page: page.stem)
def test_python_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    if page.stem == "security" and not any(probe(name).works for name in HAS_OWN_FILES):
        pytest.skip("the page shows a method with a file tree of its own")
    run_page(page, tmp_path, monkeypatch, with_slow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", pages([block for block in PYTHON if block.mark == "slow"]), ids=lambda page: page.stem
)
def test_slow_python_runs_too(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, with_slow=True)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_names_of_graft_in_python_exist(block: Block):
    """Also in blocks that are not run, where calls of graft's functions have arguments that exist."""
    if block.mark == "fragment":
        return
    for node in ast.walk(ast.parse(block.text, block.place)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graft"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.import_module(
                    f"{node.module}.{name.name}"
                )
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "graft":
            assert hasattr(graft, node.attr), node.attr
        elif isinstance(node, ast.Call) and re.fullmatch(r"graft\.\w+", ast.unparse(node.func)):
            function = getattr(graft, ast.unparse(node.func).removeprefix("graft."))
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(function).bind(*node.args, **keywords)  # TypeError: no such argument


def test_the_first_change_of_contributing_works():
    """Its reward, in the file that it names, passes its test, with the helper of that file."""
    page = ROOT / "CONTRIBUTING.md"
    reward, line, test = (block.text for block in PYTHON if block.page == page)
    names = {**vars(importlib.import_module("graft.rewards.answers"))}
    exec(reward, names)
    assert ast.literal_eval(f"{{{line}}}") == {"mentions": "graft.rewards.answers:mentions"}
    names["attempt"] = importlib.import_module("tests.rewards.test_answers").attempt
    exec(test, names)
    names["test_an_answer_may_stand_inside_a_sentence"]()
