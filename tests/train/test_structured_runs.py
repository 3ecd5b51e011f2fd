"""Answers under a schema in runs, in environments and from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import graft
from graft.config import ConfigError
from graft.envs.base import BaseEnv
from graft.structure import Structure, StructureError
from graft.types import NO_ACTION, Author, Episode, Turn
from tests.training import metrics_of, train_recipe

ONE = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}


class Counted(BaseEnv):
    """The first answer is free, the second one has to be a number."""

    max_turns = 2

    def pose(self) -> str:
        return "n?"

    def respond(self, action: str) -> Turn:
        if self.turns < 1:
            return Turn("and?", info={"answer_schema": {"type": "integer", "maximum": 9}})
        return Turn(reward=float(action.lstrip("-").isdigit()), terminated=True)


class Odd(Counted):
    def respond(self, action: str) -> Turn:
        return Turn("and?", info={"answer_schema": "digits" if self.seed % 2 else {"type": "?"}})


def recipe(folder: Path, env: str, **rollout: Any) -> dict[str, Any]:
    shape = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16}
    return {
        "run": {
            "name": "r",
            "dir": str(folder),
            "eval_tasks": 0,
            "trackers": [],
            "log_episodes": 1,
        },
        "model": {"shape": {**shape, "max_positions": 96}, "alphabet": '0123456789-{}": n?and'},
        "task": {"env": f"{__name__}:{env}"},
        "rollout": {"tasks": 2, "samples": 4, "max_tokens": 12, "max_context": 90, **rollout},
        "train": {"steps": 2},
    }


def episodes_of(folder: Path) -> list[Episode]:
    lines = [
        line
        for file in sorted((folder / "r" / "episodes").glob("*.jsonl"))
        for line in file.read_text("utf-8").splitlines()
    ]
    return [Episode.loads(line) for line in lines]


def test_a_run_holds_all_turns_to_its_schema_and_learns_under_the_masks(tmp_path: Path) -> None:
    train_recipe(recipe(tmp_path, "Counted", answer_schema=ONE, max_turns=1))
    steps = metrics_of(tmp_path / "r", "rl")
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-5 for step in steps)
    spans = [s for e in episodes_of(tmp_path) for s in e.spans if s.author is Author.POLICY]
    assert spans and all(json.loads(s.text)["n"] in (1, 2, 3) for s in spans)
    assert all(s.masks and sum(s.mask) == 1 and s.actions.count(NO_ACTION) > 5 for s in spans)


def test_an_environment_gives_the_schema_of_its_next_turn(tmp_path: Path) -> None:
    train_recipe(recipe(tmp_path, "Counted", cut_turns="step"))
    turns = [
        [s for s in walk.spans if s.author is Author.POLICY]
        for e in episodes_of(tmp_path)
        for walk in e.trajectories()
    ]
    assert any(len(spans) == 2 for spans in turns)
    for first, *others in turns:
        assert not first.masks and all(s.masks and s.text.lstrip("-").isdigit() for s in others)


def test_an_unusable_schema_of_an_environment_is_its_attempts_fault(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="schema"):  # all attempts fail for it
        train_recipe(recipe(tmp_path, "Odd"))


@pytest.mark.parametrize("schema", [{"type": "?"}, {"const": "Z"}, {"minimum": 2, "type": 5}])
def test_an_unusable_schema_of_a_recipe_is_refused_at_the_start(
    tmp_path: Path, schema: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.answer_schema"):
        train_recipe(recipe(tmp_path, "Counted", answer_schema=schema))


class Pair(BaseModel):
    a: int
    b: bool


def test_completions_have_a_schema_a_model_or_a_structure(tmp_path: Path) -> None:
    shape = recipe(tmp_path, "Counted")["model"]["shape"]
    policy = graft.load(shape=shape, alphabet='0123456789-{}": n?and')
    free = graft.generate(policy, "n?", samples=3, max_tokens=8, raw=True)
    for schema in (ONE, Structure.choice(["an", "and"])):
        done = graft.generate(policy, "n?", samples=3, max_tokens=40, schema=schema, raw=True)
        assert [one.finish for one in done] == ["stop"] * 3 and done[0].text != free[0].text
    for wrong in ("text", 3, [ONE], Pair(a=1, b=True).a):
        with pytest.raises(StructureError, match="schema"):
            graft.generate(policy, "n?", schema=wrong, raw=True)
    assert Structure.of(Pair) == Structure.json(Pair.model_json_schema())
