"""The keywords of JSON Schema: one that is misspelled constrains nothing, and nothing would say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graft.spelling import nearest

OF_ONE = [
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if",
    "items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
]  # fmt: skip
"""Keywords whose value is a schema."""

OF_SEVERAL = ["allOf", "anyOf", "items", "oneOf", "prefixItems"]
"""Keywords whose value is a list of schemas."""

OF_NAMES = ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"]
"""Keywords whose value is a schema for each name."""

OTHERS = [
    "$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor",
    "$recursiveRef", "$ref", "$schema", "$vocabulary", "const", "contentEncoding",
    "contentMediaType", "default", "dependencies", "dependentRequired", "deprecated",
    "description", "discriminator", "enum", "enumNames", "example", "examples",
    "exclusiveMaximum", "exclusiveMinimum", "externalDocs", "format", "id", "maxContains",
    "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "nullable", "optional", "options", "pattern",
    "readOnly", "required", "title", "type", "uniqueItems", "writeOnly",
]  # fmt: skip
KNOWN = {*OF_ONE, *OF_SEVERAL, *OF_NAMES, *OTHERS}
SUGGESTED = sorted(name for name in KNOWN if not name.startswith("$"))


def check_keywords(schema: Any) -> None:
    """Raise ValueError if a keyword is misspelled, or a schema has none at all.

    Other unknown ones may stand there, as the standard has it: notes of the program that wrote them.
    """
    for each in _schemas_of(schema):
        unknown = [name for name in each if name not in KNOWN and not name.startswith("x-")]
        for name in unknown:
            meant = nearest(name.replace("_", ""), SUGGESTED, cutoff=0.85)
            if meant and meant not in each:
                raise ValueError(
                    f"the schema {each!r:.80} has the unknown keyword {name!r}; did you mean {meant!r}?"
                )
        if unknown and len(unknown) == len(each):
            raise ValueError(
                f"the schema {each!r:.80} has no keyword of JSON Schema, so any JSON would do; write "
                '{"type": "object", "properties": {NAME: SCHEMA}, "required": [NAME]}'
            )


def _schemas_of(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all that it contains."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, Mapping):
            continue
        yield value
        for name, inner in value.items():
            if name in OF_NAMES and isinstance(inner, Mapping):
                waiting += inner.values()
            elif name in OF_SEVERAL and isinstance(inner, list | tuple):
                waiting += inner
            elif name in OF_ONE:
                waiting.append(inner)
