"""What of a JSON schema is enforced, what is only a note, and which numbers are refused."""

from __future__ import annotations

from typing import Any

import pytest

from graft.structure import StructureError
from graft.text.enforced_schema import enforced_schema


@pytest.mark.parametrize(
    ("schema", "enforced"),
    [
        (True, {}),
        ({"type": "string", "format": "path"}, {"type": "string"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "array", "uniqueItems": True}, {"type": "array", "uniqueItems": True}),
        ({"items": {"format": "byte"}}, {"items": {}}),
        ({"anyOf": [{"format": "binary"}, True]}, {"anyOf": [{}, True]}),
        ({"$defs": {"format": {"format": "password"}}}, {"$defs": {"format": {}}}),
        ({"const": {"format": "path"}}, {"const": {"format": "path"}}),
    ],
)
def test_notes_are_left_out_wherever_a_schema_stands(schema: Any, enforced: Any) -> None:
    assert enforced_schema(schema) == enforced


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": 0, "maximum": 2**63 - 1},
        {"minimum": -(2**63), "maximum": 2**64 - 1},
        {"enum": [2**53, -(2**53), 0.1, True]},
        {"const": 9007199254740994},  # a float, written with all of its digits
        {"maximum": 2**53 + 1},  # taken for a smaller one
    ],
)
def test_numbers_that_floats_hold_may_stand_in_a_schema(schema: Any) -> None:
    assert enforced_schema(schema) == schema


@pytest.mark.parametrize(
    ("schema", "number"),
    [
        ({"enum": ["a", 1234567890123456789]}, 1234567890123456789),
        ({"properties": {"id": {"const": [{"a": 2**53 + 1}]}}}, 2**53 + 1),
        ({"const": 2**63}, 2**63),  # a float, whose shortest digits are others
        ({"const": 10**400}, 10**400),
        ({"maximum": 9007199254740999}, 9007199254740999),
        ({"exclusiveMinimum": 2**53 + 1}, 2**53 + 1),
    ],
)
def test_numbers_that_a_mask_would_change_are_refused(schema: Any, number: int) -> None:
    with pytest.raises(StructureError) as refused:
        enforced_schema(schema)
    assert str(number) in str(refused.value)


def test_the_schema_that_allows_nothing_is_refused() -> None:
    with pytest.raises(StructureError):
        enforced_schema(False)
