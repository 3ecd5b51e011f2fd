"""Calls whose arguments are not JSON as a whole: each value between marks of its own, often without quotes.

parameters  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
arg_keys    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
gemma       <|tool_call>call:add{a:1}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from graft.text.call_syntax import CallSyntax, Schemas
from graft.text.calls import ToolCall, broken_call, opened_parts, read_arguments

_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?")
_PARAMETER_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|\Z))")
_ARGUMENT = re.compile(r"\s*<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>")
_ARGUMENT_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")
GEMMA_QUOTE = '<|"|>'
_GEMMA_WORD = re.compile(r"([\w.-]+)(\s*:)?")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def read_parameters(text: str, syntax: CallSyntax, schemas: Schemas) -> list[ToolCall]:
    def read(inside: str) -> tuple[str, dict[str, Any] | None]:
        head, _, rest = inside.strip().partition(">")
        body = rest.rstrip().removesuffix("</function>")
        is_whole = head.startswith("<function=") and body != rest.rstrip()
        name = head.removeprefix("<function=").strip()
        if not is_whole:
            return name, None
        return name, _pairs(body, _PARAMETER, _PARAMETER_END, schemas.get(name))

    return _tagged(text, syntax, read)


def read_arg_keys(text: str, syntax: CallSyntax, schemas: Schemas) -> list[ToolCall]:
    def read(inside: str) -> tuple[str, dict[str, Any] | None]:
        at = inside.find("<arg_key>")
        name = (inside if at < 0 else inside[:at]).strip()
        body = "" if at < 0 else inside[at:]
        if not re.fullmatch(r"[\w.:/-]{1,256}", name):
            return name, None
        return name, _pairs(body, _ARGUMENT, _ARGUMENT_END, schemas.get(name))

    return _tagged(text, syntax, read)


def read_gemma(text: str, syntax: CallSyntax, schemas: Schemas) -> list[ToolCall]:
    def read(inside: str) -> tuple[str, dict[str, Any] | None]:
        name, brace, rest = inside.partition("{")
        # texts stand between marks of their own; outside of them keys have no quotes
        parts = f"{brace}{rest}".split(GEMMA_QUOTE)
        parts[::2] = [_GEMMA_WORD.sub(_gemma_word, part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
        arguments, why = read_arguments("".join(parts)) if brace else ({}, "no arguments")
        return name.strip(), None if why else arguments

    return _tagged(text, syntax, read)


def _gemma_word(word: re.Match[str]) -> str:
    if word[2]:
        return f'"{word[1]}":'
    return json.dumps(_PYTHON_WORDS[word[1]]) if word[1] in _PYTHON_WORDS else word[1]


def _tagged(
    text: str, syntax: CallSyntax, read: Callable[[str], tuple[str, dict[str, Any] | None]]
) -> list[ToolCall]:
    """Calls between marks, each read from the text inside; a call does not hold another's opening."""
    calls: list[ToolCall] = []
    for start, body, stop in opened_parts(text, syntax.open):
        close = text.rfind(syntax.close, body, stop)
        name, arguments = read(text[body:close]) if close >= 0 else ("", None)
        if not name or arguments is None:
            calls.append(broken_call(text, start, body, f"{syntax.open} begins no call"))
            continue
        end = close + len(syntax.close)
        calls.append(ToolCall(name, text[body:close], arguments, start=start, end=end))
    return calls


def _pairs(
    text: str, opening: re.Pattern[str], closing: re.Pattern[str], schema: Any
) -> dict[str, Any] | None:
    """Named values one after another, in tags; None if there is anything else."""
    found: dict[str, Any] = {}
    known = (schema or {}).get("properties")
    at = 0
    while head := opening.match(text, at):
        end = closing.search(text, head.end())
        if end is None:
            return None
        name = head[1].strip()
        value = text[head.end() : end.start()]
        described = known.get(name) if isinstance(known, Mapping) else None
        found[name] = _typed(value, described)
        at = end.end()
    return None if text[at:].strip() else found


def _typed(text: str, schema: Any) -> Any:
    """A value that is written without quotes, in the type of its schema.

    "1" is 1 for an integer and "1" for a string; without a schema it is JSON where it can be.
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    if kinds and text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    value = _json_value(text)
    if value is None:
        return None if text.strip() == "null" else text
    is_text = isinstance(value, str) or ("string" in kinds and not isinstance(value, list | dict))
    return text if is_text else value


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    listed = kind if isinstance(kind, list) else schema.get("anyOf") or schema.get("oneOf")
    return {
        one if isinstance(one, str) else str(one.get("type", ""))
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, str | Mapping)
    }


def _json_value(text: str) -> Any:
    """The value of a JSON text; None for one that is none."""
    arguments, why = read_arguments(f'{{"value": {text}}}')
    return arguments.get("value") if not why and len(arguments) == 1 else None
