"""Fields of a row as plain data: prompts, right answers, tools, calls and other columns.

pandas turns lists into arrays and empty values into NaN, older versions of `datasets` store free JSON as
text, and some writers store an object as a list of pairs; here all of these become what JSON would hold.
A null that was written stays: a template shows {"a": null} as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from graft.data import conversations
from graft.data.conversations import describe_value, messages_in, read_messages, unwrapped
from graft.data.errors import BadField
from graft.data.pictures import refuse_pictures
from graft.types import Message

Row = Mapping[str, Any]


def value_at(row: Row, path: str) -> Any:
    """The value at "reward_model.ground_truth"; None if there is none."""
    if path in row:  # a flattened file has columns with a point in their name
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = as_object(value)
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def as_object(value: Any) -> Any:
    """An object that is JSON text or a list of pairs as an object; any other value unchanged.

    >>> as_object('{"style": "rule"}'), as_object([["style", "rule"]]), as_object("rule")
    ({'style': 'rule'}, {'style': 'rule'}, 'rule')
    """
    if isinstance(value, str):
        found = as_object(parse_literal(value))
        return found if isinstance(found, Mapping) else value
    pairs = unwrapped(value)
    if not isinstance(pairs, list) or not pairs:
        return value
    if all(isinstance(one, Mapping) and one.keys() == {"key", "value"} for one in pairs):
        pairs = [(one["key"], one["value"]) for one in pairs]
    are_pairs = all(isinstance(one, list | tuple) and len(one) == 2 for one in pairs)
    if are_pairs and all(isinstance(name, str) for name, _ in pairs):
        return dict(pairs)
    return value


def parse_literal(text: str) -> Any:
    """The object or list in a text, in JSON or as Python prints it; None for any other text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return conversations.read_literal(text)
    except ValueError:
        return None


def plain(value: Any, field: str = "") -> Any:
    """The value as JSON can hold it: no arrays, no dates, no NaN (an empty value of pandas)."""
    value = unwrapped(value)
    if isinstance(value, Mapping):
        given = {str(key): one for key, one in value.items() if not _is_nan(one)}
        return {key: plain(one, field or key) for key, one in given.items()}
    if isinstance(value, list | tuple):
        return [plain(one, field) for one in value]
    if isinstance(value, float) and math.isinf(value):
        raise BadField(field, f"{field!r} holds {value}, which JSON cannot hold; make it finite")
    if _is_nan(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys and values without those that are None."""
    return {key: one for key, one in value.items() if one is not None}


def read_prompt(row: Row, key: str) -> list[Message]:
    """A list of {role, content}, that list as JSON text, or any other text, which is one user message."""
    prompt = row.get(key)
    refuse_pictures(row)
    try:
        if isinstance(prompt, str):
            prompt = messages_in(prompt) or [{"role": "user", "content": prompt}]
        messages = with_parsed_calls(read_messages(prompt))
        if not any(str(message.get("content") or "").strip() for message in messages):
            raise ValueError("has no text; there must be something to answer")
    except ValueError as error:
        raise BadField(key, f"{key!r}: {error}") from error
    return messages


def refuse_surrogates_in(value: Any, field: str) -> None:
    """BadField if a text in `value` holds a lone surrogate, half of a character."""
    try:
        conversations.refuse_surrogates(value, f"{field!r}: ")
    except ValueError as error:
        raise BadField(field, str(error)) from error


def read_golds(row: Row, path: str) -> Any:
    """A text, a number or a list of them; or the numbers and target that `countdown` needs.

    {"target": ["a", "b"]}               ["a", "b"], as Search-R1 writes it
    {"target": 24, "numbers": [4, 6]}    {"numbers": [4, 6], "target": 24}, as TinyZero does
    """
    value = unwrapped(value_at(row, path))
    found = as_object(value)
    if isinstance(found, Mapping) and ("target" in found or not isinstance(value, str)):
        value = found  # any other text is itself the answer, also if it is JSON
    if isinstance(value, Mapping) and value.get("target") is not None:
        if value.get("numbers") is not None:
            return read_countdown(value["numbers"], value["target"], path)
        value = unwrapped(value["target"])
    head = path.partition(".")[0]
    if value is None and head != path and isinstance(row.get(head), str):
        raise BadField(
            head, f"{head!r} holds {describe_value(row[head])}, not an object or JSON of one"
        )
    several = [unwrapped(one) for one in (value if isinstance(value, list) else [value])]
    if not several or not all(is_gold(one) for one in several):
        raise BadField(
            path,
            f"{path!r} holds {describe_value(value)}; the right answer is a text, a number, a "
            "list of them, or "
            "{target: one of these}. Remove the row, or name the column of its answer: answer_key=",
        )
    golds = [plain(one) for one in several]
    refuse_surrogates_in(golds, path)
    return golds if isinstance(value, list) else golds[0]


def is_gold(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    # pandas writes NaN for an empty value
    return isinstance(value, Real | Decimal) and math.isfinite(value)


def read_countdown(numbers: Any, target: Any, field: str) -> dict[str, Any]:
    """{"numbers": [3, 7, 12], "target": 33}; csv has them as texts."""
    value = plain(from_json(numbers))
    several = [_whole(one) for one in value] if isinstance(value, list) else []
    if not several or None in several:
        raise BadField(
            field, f"{field!r} holds {describe_value(numbers)}, not a list of whole numbers"
        )
    goal = _whole(plain(target))
    if goal is None:
        raise BadField("target", f"'target' holds {describe_value(target)}, not a whole number")
    return {"numbers": several, "target": goal}


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
        return number if isinstance(value, str) or number == value else None
    except (TypeError, ValueError, OverflowError):
        return None


def read_tools(row: Row) -> list[dict[str, Any]] | None:
    """Schemas of the functions that may be called: a list, or a list as JSON text; None without any."""
    given = unwrapped(from_json(row.get("tools"), "tools"))
    if given is None or given == [] or named_tools(row):
        return None
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, list):
        raise BadField(
            "tools", f"'tools' holds {describe_value(given)}, not a list of function schemas"
        )
    return [_tool(plain(from_json(one, "tools")), number) for number, one in enumerate(given, 1)]


def named_tools(row: Row) -> list[str]:
    """["search"]: tools given by name, as in ARPO's rows; the run provides their schemas."""
    given = unwrapped(from_json(row.get("tools")))
    names = given if isinstance(given, list) else []
    are_names = all(isinstance(one, str) and re.fullmatch(r"[\w.:/-]+", one) for one in names)
    return names if are_names else []


def _tool(schema: Any, number: int) -> dict[str, Any]:
    function = (schema.get("function") or schema) if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadField(
            "tools",
            f"'tools': tool {number} is {describe_value(schema)}; a schema is {{type: function, function: "
            "{name, description, parameters}}",
        )
    refuse_surrogates_in(function, "tools")
    return {"type": "function", "function": function}


def with_parsed_calls(messages: list[Message]) -> list[Message]:
    """The same messages; arguments of calls that are JSON text are parsed.

    Templates write arguments as JSON, so a text would be quoted a second time.
    """
    return [
        {**message, "tool_calls": _calls(message["tool_calls"], f"message {number}")}
        if message.get("tool_calls")
        else message
        for number, message in enumerate(messages, 1)
    ]


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    calls = unwrapped(from_json(value))
    if not isinstance(calls, list):
        raise ValueError(
            f"{where}: `tool_calls` holds {describe_value(value)}, not a list of calls"
        )
    made: list[dict[str, Any]] = []
    for call in map(plain, calls):
        function = (call.get("function") or call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where}: {describe_value(call)} is no call: it must be {{function: {{name, arguments}}}}"
            )
        arguments = function.get("arguments")
        if arguments is None:
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}", parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where}: `arguments` of the call to {function['name']!r} are not JSON: {error}"
                ) from error
        conversations.refuse_surrogates(arguments, f"{where}: `arguments`: ")
        function = {**function, "arguments": arguments}
        kept = {"id": call["id"]} if call.get("id") is not None else {}
        made.append({**kept, "type": "function", "function": function})
    return made


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def from_json(value: Any, field: str = "") -> Any:
    """The value of a JSON text; any other value unchanged. With a `field`, other text is a BadField."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if not field:
            return value
        why = f"{field!r} is not JSON: {error}; it begins {value[:40]!r}"
        raise BadField(field, why) from error


def first_of(row: Row, names: Sequence[str]) -> str | None:
    """The first of these columns that the row fills."""
    return next((name for name in names if row.get(name) is not None), None)
