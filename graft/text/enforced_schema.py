"""A JSON schema as it is enforced: without notes that constrain nothing, and refused if a mask would differ.

    {"type": "string", "format": "path"}      {"type": "string"}: no format of the standard
    {"enum": [1234567890123456789]}           refused: it would be written as 1234567890123456768

llguidance reads numbers as 64-bit floats, which hold whole numbers exactly up to 2**53.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from graft.recipe.json_schema import OF_NAMES, OF_ONE, OF_SEVERAL
from graft.structure import StructureError

FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri",
    "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference",
    "uri-template", "uuid",
}  # fmt: skip
"""Those of the standard. Others are notes, such as pydantic's "path" and "password"."""
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")
LARGEST = 2**63 - 1
"""Whole numbers beyond it are not written: bounds there hold nothing back."""


def enforced_schema(schema: Any) -> Any:
    """The schema to be enforced; StructureError for one that no answer can follow exactly."""
    if schema is True:
        return {}
    if schema is False:
        raise StructureError("the schema false allows no value; write what is allowed")
    return _enforced(schema)


def _enforced(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    enforced: dict[str, Any] = {}
    for name, value in schema.items():
        if name in OF_NAMES and isinstance(value, Mapping):
            value = {key: _enforced(inner) for key, inner in value.items()}
        elif name in OF_SEVERAL and isinstance(value, list):
            value = [_enforced(inner) for inner in value]
        elif name in OF_ONE:
            value = _enforced(value)
        elif name in ("const", "enum"):
            _check_values(name, value)
        elif name in (*LOWER, *UPPER):
            _check_bound(name, value)
        is_note = (name == "uniqueItems" and value is False) or (
            name == "format" and isinstance(value, str) and value not in FORMATS
        )
        if not is_note:
            enforced[name] = value
    return enforced


def _check_values(name: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, list):
            waiting += inner
        elif isinstance(inner, Mapping):
            waiting += inner.values()
        elif _is_large(inner) and f"{inner}" != (written := _written(inner)):
            raise StructureError(
                f"the {name} of a schema has the number {inner}, which a mask would write as {written}: "
                "whole numbers are exact up to 2**53; let it be a string"
            )


def _check_bound(name: str, value: Any) -> None:
    """Refuse a bound that would let numbers beyond it pass, as it is rounded."""
    if _is_large(value) and abs(value) < LARGEST:
        rounded = int(float(value))
        if rounded > value if name in UPPER else rounded < value:
            raise StructureError(
                f"the schema has {name} {value}, which a mask would take for {rounded}: whole numbers are "
                "exact up to 2**53; choose a bound below it, or leave it out"
            )


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53


def _written(value: int) -> str:
    """The whole number as a float of 64 bits is written, with the fewest digits."""
    return f"{int(Decimal(repr(float(value))))}" if abs(value) < 10**300 else "another one"
