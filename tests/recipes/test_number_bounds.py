"""Every number of a recipe has bounds: the test goes through the table of keys, also of new ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from graft.config import Config, ConfigError, load_config

SIGNED = {"algo.entropy_coef"}
"""Numbers that may be negative: a bonus that is a penalty then."""
SEVERAL = {
    "algo.reference_sync": "[{}, 1]",
    "train.betas": "[{}, 0.9]",
    "algo.overlong": "[{}, 2]",
    "algo.kl_control": "{{target: {}}}",
    "algo.entropy_control": "{{target: {}}}",
}
"""Keys that hold several numbers, with a place for one."""


def numbers() -> Iterator[tuple[str, set[str]]]:
    for section, info in Config.model_fields.items():
        for name, field in type(info.default).model_fields.items():
            types = {*re.findall(r"\w+", str(field.annotation))}
            if types & {"int", "float"}:
                yield f"{section}.{name}", types


def refused(key: str, value: Any) -> str:
    override = f"{key}={SEVERAL.get(key, '{}').format(value)}"
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", [override])
    message = str(error.value)
    assert f"{key}" in message and "\n" not in message, message
    return message


def test_the_table_has_numbers():
    assert {"train.lr", "run.seed", "algo.kl_control", *SIGNED, *SEVERAL} <= dict(numbers()).keys()


@pytest.mark.parametrize("key", sorted(dict(numbers())))
def test_a_number_that_cannot_be_is_refused_by_its_key(key: str):
    types = dict(numbers())[key]
    for value in ("-1", "-1000000000000") if key not in SIGNED else ():
        assert f"{key}" in refused(key, value)
    for value in (".nan", ".inf", "-.inf"):
        refused(key, value)
    if key not in SEVERAL and "bool" not in types:
        assert "not true or false" in refused(key, "true")
    if "float" not in types:
        refused(key, "1000000000000000000000")
        refused(key, "1.5")


@pytest.mark.parametrize(
    "override",
    ["train.lr=10", "sft.lr=3", "rollout.temperature=1e6", "rollout.tasks=10000000", "run.seed=-3"],
)
def test_an_absurd_number_is_refused(override: str):
    refused(*override.split("="))


def test_a_penalty_on_the_entropy_is_possible():
    assert load_config("quickstart", ["algo.entropy_coef=-0.01"]).algo.entropy_coef == -0.01
