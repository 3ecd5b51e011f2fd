"""What a whole answer must look like: a JSON schema, a regular expression, a choice or a grammar.

    Structure.json({"properties": {"age": {"type": "integer"}}, "required": ["age"]})     {"age": 7}
    Structure.regex("[0-9]{2}")                                                           42
    Structure.choice(["yes", "no"])                                                       no
    Structure.lark('start: "a" | "b" start')                                              bba

It is data; `actions.matcher` finds out which tokens it allows next. The mode recorded there is a number made
from the row of their mask, the same for equal rows in every process and run.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from graft.signatures import explain_arguments

Kind = Literal["json", "regex", "lark"]

MAX_SOURCE = 1 << 20
"""Characters of a schema or grammar: it is compiled once, and kept in every episode that used it."""

SPACING = dict[str, Any](item_separator=", ", key_separator=": ", whitespace_flexible=False)
"""JSON as Python writes it: with a choice of blanks, less is forced, and an answer may be blanks for ever."""

FIRST_ROW_ID = 1 << 52
"""Numbers of rows lie between this and twice as much, which JSON's readers still hold exactly."""

MAX_ROW_BITS = 1 << 24
MAX_READ = 4096
"""Rows that are kept unpacked."""


class StructureError(ValueError):
    """A schema, expression or grammar that no answer can follow, or that cannot be read."""


@explain_arguments
@dataclass(frozen=True, slots=True)
class Structure:
    """The form of an answer, by its source."""

    kind: Kind
    source: str
    """The schema as JSON, the expression, or a grammar in the syntax of Lark."""
    is_part: bool = False
    """Whether it is of a part of an answer: the sample ends with it, and no end of a turn follows."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise StructureError(f"kind={self.kind!r}: must be one of {', '.join(get_args(Kind))}")
        if not isinstance(self.source, str) or not self.source.strip():
            raise StructureError(f"the source of a structure is {self.source!r}: must be a text")
        if len(self.source) > MAX_SOURCE:
            raise StructureError(
                f"a structure of {len(self.source):,} characters: at most {MAX_SOURCE:,} are compiled; "
                "shorten the schema, or put repeated parts into $defs"
            )

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str | None = None) -> Structure:
        """JSON that is valid under `schema`, an object or its text; None: any object."""
        if schema is None:
            return cls("json", '{"type": "object"}')
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise StructureError(f"the schema {schema[:80]!r} is no JSON: {error}") from error
        if not isinstance(schema, Mapping | bool):
            raise StructureError(f"the schema {schema!r:.80}: must be a JSON object, true or false")
        try:
            return cls("json", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise StructureError(f"the schema cannot be written as JSON: {error}") from error

    @classmethod
    def of(cls, given: Any) -> Structure:
        """A structure as callers give it: itself, a JSON schema, or a pydantic model."""
        if isinstance(given, Structure):
            return given
        if callable(schema := getattr(given, "model_json_schema", None)):
            given = schema()
        if not isinstance(given, Mapping | bool):
            raise StructureError(
                f"schema={given!r:.80}: must be a JSON schema, a pydantic model or a Structure"
            )
        return cls.json(given)

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """A text that the expression matches as a whole; \\d is any digit of Unicode, as in Python."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Structure:
        """One of these texts."""
        is_list = isinstance(texts, Sequence) and texts and not isinstance(texts, str)
        if not is_list or not all(isinstance(text, str) and text for text in texts):
            raise StructureError(
                f"choices {texts!r:.80}: must be a list of texts, none of them empty"
            )
        return cls("lark", "start: TEXT\nTEXT: " + " | ".join(map(lark_text, dict.fromkeys(texts))))

    @classmethod
    def lark(cls, grammar: str) -> Structure:
        """A text of the rule `start` of a grammar; `%json {...}` in it stands for JSON under a schema."""
        return cls("lark", grammar)


def lark_text(text: str) -> str:
    """A text as a grammar quotes it."""
    return json.dumps(text, ensure_ascii=False)


@lru_cache(maxsize=MAX_READ)
def read_row(text: str) -> bytes:
    """The bits of a row's text; ValueError if it is damaged or longer than any vocabulary."""
    unpacker = zlib.decompressobj()
    try:
        bits = unpacker.decompress(base64.b85decode(text), MAX_ROW_BITS // 8)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the row of a mask {text[:40]!r} cannot be read: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"the row of a mask {text[:40]!r} is cut off, or too long")
    return bits


def allowed_by(bits: bytes, width: int) -> Any:
    """The row as booleans of numpy, [width]."""
    import numpy as np  # here: an environment's process may have none

    packed = np.frombuffer(bits, np.uint8)
    return np.unpackbits(packed, count=width, bitorder="little").view(np.bool_)
