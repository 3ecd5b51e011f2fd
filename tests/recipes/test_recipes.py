"""Every bundled recipe has a header that starts it, and is started here: two steps with a tiny model.

The data are rows in the originals' columns at the places that the recipes name; nothing of a recipe is
changed but its sizes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest

from graft.commands.recipes import RecipeHeader, list_recipes, read_header, table
from graft.config import bundled_recipes, load_config
from graft_search import make_source
from graft_search.server import build_app
from tests.graft_search.search_helpers import serving
from tests.recipes.original_rows import write_original_rows
from tests.training import train_recipe

RECIPES = bundled_recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_a_header_names_the_command_that_starts_the_recipe(name):
    header = read_header(RECIPES[name].read_text())
    assert header.title.endswith(".") and header.needs
    command = shlex.split(header.start)
    assert command[-1] == name and command[-2] in ("train", "sft")
    if header.num_gpus > 1:
        assert command[:3] == ["torchrun", "--nproc-per-node", str(header.num_gpus)]
    else:
        assert command[0] == "graft"


def test_a_header_is_read_to_its_first_line_of_yaml():
    text = "# A toy.\n#\n# start: graft train toy\n# needs: 2 GPUs of 24 GB\n# See docs.\nrun: {}\n# x\n"
    expected = RecipeHeader("A toy.", "graft train toy", "2 GPUs of 24 GB", "See docs.")
    assert read_header(text) == expected
    assert read_header(text).num_gpus == 2


def test_the_list_names_what_is_missing_here(monkeypatch):
    monkeypatch.delenv("SEARCH_URL", raising=False)
    (row,) = list_recipes("quickstart")
    assert row["can_run"] and row["start"] == "graft train quickstart"
    assert "  missing  nothing" in list(table([row]))
    assert "graft plan" in "".join(table([row, row | {"memory": None}]))
    (row,) = list_recipes("coder/programs")
    assert row["memory"]["fits"] == [48, 80, 141] and "48 80 141" in "".join(table([row, row]))
    (row,) = list_recipes("arpo/reasoning-7b")
    assert not row["can_run"] and "$SEARCH_URL is not set" in row["missing"]
    assert [row["name"] for row in list_recipes("gem/math12k")] == ["gem/math12k"]
    assert len(list_recipes("math12k")) == 2
    assert "no bundled recipe" in next(iter(table(list_recipes("nothing"))))
    lines = list(table(list_recipes()))
    assert len(lines) == len(RECIPES) + 2


@pytest.fixture(scope="module")
def search_url() -> Iterator[str]:
    with serving(build_app(make_source("bm25", corpus="small"))) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_starts_with_the_rows_of_the_original(
    name, model, search_url, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAFT_DATA", str(tmp_path / "hub"))
    write_original_rows(tmp_path, tmp_path / "hub")
    config = load_config(name)
    sizes = {
        "run.dir": str(tmp_path),
        "run.trackers": "[]",
        "run.eval_tasks": min(config.run.eval_tasks, 2),
        "train.steps": min(config.train.steps, 2),
        "train.minibatches": min(config.train.minibatches, 2),
        "rollout.tasks": 2,
        "rollout.max_tokens": 8,
        "rollout.max_turns": min(config.rollout.max_turns, 2),
        "rollout.max_context": 16384,  # a byte is a token here
        "sft.steps": 2 if config.sft.is_on else 0,
        "sft.epochs": 0,
        "sft.batch": 2,
        "sft.stop_at": 0,
    }
    if config.model.path:
        sizes["model.path"] = model
    if config.distill.teacher:
        # there is no other model here; this one is told the answer
        sizes["distill.teacher"] = "reference"
        sizes["distill.context"] = "'{prompt}{answer}'"
    monkeypatch.setenv("SEARCH_URL", search_url)
    summary = train_recipe(name, *(f"{key}={value}" for key, value in sizes.items()))
    lines = (tmp_path / summary["name"] / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert sum(line["phase"] == "rl" for line in steps) == sizes["train.steps"]
    assert sum(line["phase"] == "sft" for line in steps) == sizes["sft.steps"]
