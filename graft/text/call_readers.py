"""The calls of a policy's turn, found in its text in the syntax of its chat template.

What looks like a call and is none is a `ToolCall` with its `error`: it stays in the text. Readers never
raise and take linear time.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from graft.text.call_syntax import CallSyntax, Schemas
from graft.text.calls import (
    ToolCall,
    broken_call,
    call_of,
    json_at,
    json_calls,
    opened_parts,
    read_arguments,
)
from graft.text.tagged_calls import read_arg_keys, read_gemma, read_parameters

PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may write it before a call."""
LONGEST_NAME = 256
MAX_PYTHON = 50_000
"""Characters of calls in Python's syntax: its parser takes more than linear memory."""
_WORDS = {"true": True, "false": False, "null": None}


def read_json(text: str, syntax: CallSyntax, schemas: Schemas) -> list[ToolCall]:
    if not syntax.open:
        return _bare_json(text)
    if not syntax.is_list:
        calls = json_calls(text, syntax.open, syntax.close)
        return [*calls, *_unclosed(text, calls[-1].end if calls else 0, syntax.open)]
    calls: list[ToolCall] = []
    at = 0
    while (start := text.find(syntax.open, at)) >= 0:
        at = start + len(syntax.open)
        value, end = json_at(text, at, syntax.open)
        made = [call_of(one) for one in value] if isinstance(value, list) else []
        if not made or any(why for *_, why in made) or not text.startswith(syntax.close, end):
            calls.append(
                broken_call(text, start, at, f"{syntax.open} is followed by no list of calls")
            )
            continue
        at = end + len(syntax.close)
        calls += [ToolCall(name, "", given, start=start, end=at) for name, given, _ in made]
    return calls


def _bare_json(text: str) -> list[ToolCall]:
    """Calls without marks are all of the turn: {"name": "f", "parameters": {}}; {"name": "g", ...}."""
    start = len(text) - len(text.lstrip())
    has_tag = text.startswith(PYTHON_TAG, start)
    at = start + len(PYTHON_TAG) if has_tag else start
    calls: list[ToolCall] = []
    while True:
        value, end = json_at(text, at)
        made = [call_of(one) for one in (value if isinstance(value, list) else [value])]
        if not made or any(why for *_, why in made):
            break
        calls += [ToolCall(name, "", given, start=0, end=end) for name, given, _ in made]
        if end == len(text):
            return calls
        at = end + 1 if text[end] in ";," else end
    is_call = has_tag or calls or re.match(r'\[?\s*\{\s*"name"', text[start : start + 100])
    return [broken_call(text, start, len(text), "the turn is no JSON call")] if is_call else []


def read_named(text: str, syntax: CallSyntax, schemas: Schemas) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for start, body, _ in opened_parts(text, syntax.open):
        middle = text.find(syntax.middle, body, body + LONGEST_NAME)
        given = middle + len(syntax.middle)
        value, end = json_at(text, given, syntax.open) if middle >= 0 else (None, body)
        name = text[body:middle].strip()
        if not name or not isinstance(value, dict) or not text.startswith(syntax.close, end):
            why = f"{syntax.open} is followed by no name and JSON arguments"
            calls.append(broken_call(text, start, body, why))
            continue
        end += len(syntax.close)
        calls.append(ToolCall(name, text[body:end], value, start=start, end=end))
    return _with_outer(text, calls, syntax)


def read_python(text: str, syntax: CallSyntax, schemas: Schemas) -> list[ToolCall]:
    if not syntax.open:  # the calls are all of the turn
        made = _python_calls(text) if text.lstrip().startswith("[") else None
        return [ToolCall(name, "", given, end=len(text)) for name, given in made or ()]
    calls: list[ToolCall] = []
    for start, body, stop in opened_parts(text, syntax.open):
        close = text.find(syntax.close, body, stop)
        made = _python_calls(text[body:close]) if close >= 0 else None
        if not made:
            calls.append(broken_call(text, start, body, f"{syntax.open} begins no list of calls"))
            continue
        end = close + len(syntax.close)
        calls += [ToolCall(name, "", given, start=start, end=end) for name, given in made]
    return calls


def _python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """[add(a=1), sub()] -> ("add", {"a": 1}), ("sub", {}); None for anything else."""
    if len(text) > MAX_PYTHON:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in what the policy wrote
            tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls: list[tuple[str, dict[str, Any]]] = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args:
                return None
            given = {str(one.arg): _literal(one.value) for one in node.keywords}
            if read_arguments(json.dumps(given, ensure_ascii=False))[1]:
                return None
            calls.append((ast.unparse(node.func), given))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return calls


def _literal(node: ast.expr) -> Any:
    """A literal of Python; also true, false and null, which some templates write."""
    if isinstance(node, ast.List):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    return ast.literal_eval(node)


def _with_outer(text: str, calls: Sequence[ToolCall], syntax: CallSyntax) -> list[ToolCall]:
    """The calls with the marks around all of them, so that these are no content."""
    good = [number for number, call in enumerate(calls) if not call.error]
    made = list(calls)
    if good and all(syntax.outer):
        first, last = calls[good[0]], calls[good[-1]]
        before = text[: first.start].rstrip()
        if before.endswith(syntax.outer[0]):
            start = len(before) - len(syntax.outer[0])
            made[good[0]] = _moved(first, start, first.end)
        end = last.end + len(text[last.end :]) - len(text[last.end :].lstrip())
        if text.startswith(syntax.outer[1], end):
            kept = made[good[-1]]
            made[good[-1]] = _moved(kept, kept.start, end + len(syntax.outer[1]))
    return made


def _moved(call: ToolCall, start: int, end: int) -> ToolCall:
    return ToolCall(call.name, call.content, call.arguments, call.error, start, end)


def _unclosed(text: str, start: int, mark: str) -> list[ToolCall]:
    """The call that begins behind `start` and does not end: a turn that was cut off."""
    at = text.find(mark, start)
    return [broken_call(text, at, len(text), f"{mark} is not closed")] if at >= 0 else []


Reader = Callable[[str, CallSyntax, Schemas], list[ToolCall]]
READERS: dict[str, Reader] = {
    "json": read_json,
    "named": read_named,
    "parameters": read_parameters,
    "arg_keys": read_arg_keys,
    "python": read_python,
    "gemma": read_gemma,
}
"""Name -> what finds the calls; those of channels are found with the thoughts, in `graft.text.turn`."""
