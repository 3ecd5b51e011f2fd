"""Every number of every credit, loss, weight, reduction, divergence and branch of the tables has bounds."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from graft.algos.credits.table import CREDITS
from graft.algos.distillation import DIVERGENCES
from graft.algos.losses.table import LOSSES
from graft.algos.part_numbers import ENDLESS, SIGNED
from graft.algos.parts import make
from graft.algos.reductions import REDUCTIONS
from graft.algos.weights import WEIGHTS
from graft.registry import resolve
from graft.rollout.branches.branch import BRANCHES

TABLES: dict[str, Mapping[str, Any]] = {
    "credit": CREDITS,
    "loss": LOSSES,
    "weight": WEIGHTS,
    "reduction": REDUCTIONS,
    "divergence": DIVERGENCES,
    "branch": BRANCHES,
}


def parameters(entry: Any) -> Mapping[str, inspect.Parameter]:
    factory = resolve("it", {"it": entry}, "part")
    return inspect.signature(factory).parameters


def numbers() -> Iterator[Any]:
    for what, table in TABLES.items():
        for name, entry in table.items():
            known = parameters(entry)
            needed = {"samples": 4} if "samples" in known else {}
            for key, parameter in known.items():
                if re.search(r"\b(int|float)\b", str(parameter.annotation)):
                    yield pytest.param(what, name, key, needed, id=f"{what} {name} {key}")


def refused(what: str, name: str, keywords: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=f"^{what} '{name}'") as error:
        make((name, keywords), TABLES[what], what)
    return str(error.value)


@pytest.mark.parametrize(("what", "name", "key", "needed"), list(numbers()))
def test_a_number_out_of_its_bounds_is_refused_by_name(
    what: str, name: str, key: str, needed: dict[str, Any]
):
    wrong: list[Any] = [math.nan, True, "1"]
    wrong += [] if key in SIGNED else [-1, -1e-6, -math.inf]
    wrong += [] if key in ENDLESS else [math.inf]
    for value in wrong:
        message = refused(what, name, {**needed, key: value})
        assert message.startswith(f"{what} {name!r}") and f"{key}={value!r}" in message
        assert "\n" not in message


def test_numbers_that_divide_are_above_zero():
    for name in ("grpo", "whiten", "maxrl"):
        assert "eps=0: must be above 0" in refused("credit", name, {"eps": 0})
        assert "eps=100.0: must be at most 1" in refused("credit", name, {"eps": 100.0})
    assert "norm=0: must be above 0" in refused("credit", "gpg", {"norm": 0})


def test_an_upper_bound_may_be_infinite():
    make(("clip", {"high": math.inf}), LOSSES, "loss")
    make(("importance", {"cap": math.inf}), WEIGHTS, "weight")
