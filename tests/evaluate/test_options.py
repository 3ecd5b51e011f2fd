"""The options of a call: checked where they are made, and whole from there on."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import graft
from graft.config import ConfigError
from graft.evaluate.model_source import EndpointSpec, ModelSource
from graft.evaluate.options import EvalOptions
from graft.rollout.options import RolloutOptions
from graft.types import Sampling


def test_what_is_not_given_is_left_to_the_recipe():
    options = RolloutOptions(temperature=0.0, top_k=0, max_tokens=8, seed=0)
    assert options.draws == {"temperature": 0.0, "top_k": 0} and options.limits == {"max_tokens": 8}
    assert options.select("seed", "samples") == {"seed": 0}
    assert options.make_sampling() == Sampling(temperature=0.0, max_tokens=8)
    assert (
        RolloutOptions().choose_temperature(0.7) == 0.7 and options.choose_temperature(0.7) == 0.0
    )
    with pytest.raises(FrozenInstanceError):
        options.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (RolloutOptions, {"top_p": 2.0}),
        (RolloutOptions, {"max_tokens": 0}),
        (EvalOptions, {"min_p": 1.0}),
        (EvalOptions, {"samples": 0}),
        (EvalOptions, {"max_turns": "x"}),
        (EvalOptions, {"k": [0]}),
        (EvalOptions, {"k": [8], "samples": 4}),
    ],
)
def test_values_that_cannot_work_are_refused_when_the_options_are_made(kind, values):
    with pytest.raises(ConfigError) as error:
        kind(**values)
    assert next(iter(values)) in str(error.value)


def test_several_greedy_attempts_are_refused_whoever_says_greedy():
    for options, own in (
        (RolloutOptions(samples=2, temperature=0.0), 1.0),
        (RolloutOptions(samples=2), 0.0),
    ):
        with pytest.raises(ConfigError, match="2 greedy attempts"):
            options.choose_temperature(own)


def test_urls_of_an_endpoint_may_be_joined_by_commas():
    source = ModelSource(endpoint=["http://a/v1, http://b/v1", "http://c/v1"], served="m")
    assert source.read_endpoint() == EndpointSpec(
        ("http://a/v1", "http://b/v1", "http://c/v1"), "m", "chat"
    )


def test_no_function_below_the_doors_takes_the_options_one_by_one():
    """Three or more of them as parameters are an options object that was taken apart."""
    root = Path(graft.__file__).parent
    options = {
        *RolloutOptions.DRAWS,
        *RolloutOptions.LIMITS,
        "tasks",
        "samples",
        "seed",
        "k",
        "solved",
    }
    apart = [
        f"{file.relative_to(root)}:{node.name}"
        for room in ("evaluate", "datagen", "rollout")
        for file in (root / room).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(options & {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}) > 2
    ]
    assert apart == []
