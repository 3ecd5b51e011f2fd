"""Tables of the pages that repeat what the code has."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from graft.algos import batch as batch_module
from graft.algos.batch import Batch
from graft.algos.credits.table import CREDITS
from graft.algos.losses.table import LOSSES
from graft.algos.presets import PRESETS
from graft.algos.reductions import REDUCTIONS
from graft.algos.weights import WEIGHTS
from graft.envs import ENVS
from graft.evaluate.benchmarks import BENCHMARKS
from graft.recipe.peer_table import read_table
from tests.docs.pages import ROOT
from tests.docs.test_commands import TREE


def test_the_table_of_keys_is_the_config():
    """Repair it with `python scripts/recipe_keys.py`."""
    script = runpy.run_path(str(ROOT / "scripts" / "recipe_keys.py"))
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert script["BEGIN"] in page and script["END"] in page
    assert script["updated"](page) == page


def test_the_memory_of_recipes_is_what_the_plan_says():
    """Repair it with `python scripts/recipe_memory.py`."""
    script = runpy.run_path(str(ROOT / "scripts" / "recipe_memory.py"))
    page, rows = script["PAGE"].read_text(encoding="utf-8"), script["all_rows"]()
    assert script["BEGIN"] in page and script["END"] in page
    assert script["updated"](page, rows) == page
    assert script["FILE"].read_text(encoding="utf-8") == script["as_json"](rows)


def test_the_page_about_other_libraries_is_their_table():
    """Repair it with `python scripts/peer_pages.py`."""
    script = runpy.run_path(str(ROOT / "scripts" / "peer_pages.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["BEGIN"] in page and script["END"] in page
    assert script["updated"](page) == page
    for row in read_table():
        assert all(f"`{name}`" in page for name in (*row.trl, *row.verl)), row


def test_the_map_has_every_room():
    """The folders of graft/, except those that are named with the room above them."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+)/`", page))
    package = ROOT / "graft"
    rooms = {str(path.parent.relative_to(package)) for path in package.glob("*/**/__init__.py")}
    nested = {"engine/native/cuda/kernels"}
    assert named == rooms - nested


@pytest.mark.parametrize(
    "section, names",
    [
        ("Credit", CREDITS),
        ("Loss", LOSSES),
        ("Weights", WEIGHTS),
        ("Reduction", REDUCTIONS),
        ("Presets", PRESETS),
    ],
)
def test_every_part_of_an_algorithm_has_a_row(section, names):
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    own = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in own.splitlines() if line.startswith("| ")]
    assert names.keys() == {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_index_has_every_command():
    def names(command: Any, path: str) -> list[str]:
        if not hasattr(command, "commands"):
            return [path]
        return [
            name
            for key in command.commands
            for name in names(command.commands[key], f"{path} {key}")
        ]

    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [name for name in names(TREE, "graft") if f"| `{name}" not in page] == []


def test_the_number_of_environments_is_that_of_the_table():
    """Also the number of each family that the page counts."""
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    code = "from graft.envs import ENVS; print(len(ENVS))"  # other tests register environments here
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.findall(r"`graft envs` lists (\d+) of them", page) == [fresh.stdout.strip()]
    for family in ("earl", "game", "rg"):
        (counted,) = re.findall(rf"^\| `{family}:` \| (\d+),", page, re.M)
        assert int(counted) == sum(name.startswith(f"{family}:") for name in ENVS), family


def test_the_page_has_every_benchmark_with_its_dataset_columns_scorer_and_rows():
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    for one in BENCHMARKS.values():
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{one.name}` |")]
        for part in (one.hub, one.split, *one.tools, one.scorer or "own"):
            assert part in line, (one.name, part)
        for part in (*one.question_key.split("|"), *one.answer_key.split("|")):
            assert f"`{part}`" in line, (one.name, part)
        for number in (one.rows, one.hub_rows):
            assert number is None or f"{number:,}" in line, (one.name, number)
        assert ("unconfirmed" in line) == bool(one.unconfirmed), one.name


def test_the_table_of_a_batch_is_the_dataclass():
    """Names in order, shapes and types as documented there; a field that may be None says when."""
    page = (ROOT / "docs" / "loop.md").read_text(encoding="utf-8")
    own = page.partition("\n## What is in a batch\n")[2].partition("\n## ")[0]
    rows = [
        [x.strip() for x in line.split("|")[1:-1]] for line in own.splitlines() if "| `" in line
    ]
    (batch,) = (
        node
        for node in ast.parse(inspect.getsource(batch_module)).body
        if isinstance(node, ast.ClassDef)
    )
    lines = [node for node in batch.body if isinstance(node, ast.AnnAssign | ast.Expr)]
    shapes = {
        field.target.id: re.match(r"\[[^]]*\](?: long| bool)?", text.value.value)[0]  # type: ignore[index, union-attr]
        for field, text in pairwise(lines)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert [(row[0].strip("`"), row[1]) for row in rows] == list(shapes.items())
    optional = {field.name for field in fields(Batch) if field.default is None}
    assert {row[0].strip("`") for row in rows if row[3]} == optional
