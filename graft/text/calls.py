"""Tool calls in a model's text, in styles that environments choose.

Pure functions on strings. They never raise, and their time is linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from graft.registry import resolve
from graft.text.parse import Tag, code_blocks, last_tag, tags

MAX_DEPTH = 64
"""Of the JSON of a call: code that reads it may recurse."""
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the policy's text. `error` is the reason why it cannot be carried out."""

    name: str
    content: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""
    start: int = 0
    end: int = 0


def tool_calls(text: str, style: str, names: Collection[str] | None = None) -> list[ToolCall]:
    """The calls in `text`, in order; `names` (None: all) keeps only these tools.

    tags    <python>print(1)</python>                                 name python, content print(1)
    hermes  <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>  name f, arguments {"x": 1}
    fenced  a fenced code block                                       name is its language
    gem     one call at most: a tag or a fence, see `first_call`
    mcp     <tool_call><tool_name>f</tool_name><arguments>{"x": 1}</arguments></tool_call>

    A call in invalid JSON is kept, whatever `names` is: its `error` is the answer.
    """
    calls = resolve(style, STYLES, "tool-call style")(text, names)
    return [call for call in calls if names is None or call.error or call.name in names]


def first_call(text: str, name: str) -> ToolCall | None:
    """The first call to one tool, written as a tag or as a fence: the one that ends first.

    "<python>```python\\nprint(1)```</python>" -> "print(1)": a fence inside the tag wins.
    """
    tag_at = text.find(f"<{name}>")
    body = tag_at + len(name) + 2
    found = _until(text, name, f"</{name}>", tag_at, body) if tag_at >= 0 else None
    fence = re.compile(rf"```\n?{re.escape(name)}(?![A-Za-z0-9_])").search(text)
    fenced = _until(text, name, "```", fence.start(), fence.end()) if fence else None
    return min(filter(None, (found, fenced)), key=lambda call: call.end, default=None)


def _until(text: str, name: str, close: str, start: int, body: int) -> ToolCall | None:
    end = text.find(close, body)
    if end < 0:  # then no later opening is closed either: one search is enough
        return None
    return ToolCall(name, text[body:end].strip(), start=start, end=end + len(close))


def _gem_calls(text: str, names: Collection[str] | None) -> list[ToolCall]:
    known = ("python", "search") if names is None else names  # GEM's tools; each needs a search
    calls = [call for name in known if (call := first_call(text, name))]
    return [min(calls, key=lambda call: call.start)] if calls else []


def _mcp_calls(text: str, names: Collection[str] | None) -> list[ToolCall]:
    return [_mcp_call(tag) for tag in tags(text, ["tool_call"])]


def _tag_calls(text: str, names: Collection[str] | None) -> list[ToolCall]:
    return [ToolCall(t.name, t.content, start=t.start, end=t.end) for t in tags(text, names)]


def _hermes_calls(text: str, names: Collection[str] | None) -> list[ToolCall]:
    return json_calls(text, "<tool_call>", "</tool_call>")


def _fenced_calls(text: str, names: Collection[str] | None) -> list[ToolCall]:
    return [ToolCall(b.language, b.code, start=b.start, end=b.end) for b in code_blocks(text)]


def json_calls(text: str, opening: str, closing: str) -> list[ToolCall]:
    """The calls that are JSON objects between two marks. A mark inside a JSON string marks nothing.

    Text between marks that is no call is one with an error; of several openings before it the last counts.
    """
    calls: list[ToolCall] = []
    at, close = 0, -1
    while (start := text.find(opening, at)) >= 0:
        body = start + len(opening)
        value, end = json_at(text, body, opening)
        found = end if text.startswith(closing, end) and isinstance(value, dict) else -1
        if found < 0:
            if close < body:
                close = text.find(closing, body)
            if close < 0:
                break
            following = text.find(opening, body, close)
            if following >= 0:
                at = following
                continue
            found = close
        tag = Tag("", text[body:found], start, found + len(closing))
        calls.append(_hermes_call(tag))
        at = tag.end
    return calls


def json_at(text: str, at: int, stop: str = "") -> tuple[Any, int]:
    """The JSON object or list that begins behind blanks at `at`, and where blanks behind it end.

    None and `at` if there is none. A mark `stop` outside a string ends the search: many openings of calls
    that never close are then read in linear time.
    """
    start = _BLANKS.match(text, at).end()  # type: ignore[union-attr]
    depth = 0
    if text[start : start + 1] in ("{", "["):
        for token in _json_token(stop).finditer(text, start):
            if token[0] in ("{", "["):
                depth += 1
            elif token[0] in ("}", "]"):
                depth -= 1
                if depth == 0:
                    with suppress(ValueError, RecursionError):
                        value = _read_json(text[start : token.end()])
                        return value, _BLANKS.match(text, token.end()).end()  # type: ignore[union-attr]
                    break
            elif len(token[0]) == 1 or token[0] == stop:  # a string that does not end, or the mark
                break
    return None, at


@lru_cache(maxsize=64)
def _json_token(stop: str) -> re.Pattern[str]:
    strings = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|"'
    return re.compile("|".join([strings, *filter(None, [re.escape(stop)]), r"[\[\]{}]"]), re.DOTALL)


def _hermes_call(tag: Tag) -> ToolCall:
    try:
        name, arguments, why = call_of(_read_json(tag.content))
    except RecursionError:
        name, arguments, why = "", {}, "the tool call is nested too deeply"
    except ValueError as error:
        name, arguments, why = "", {}, f"the tool call is not valid JSON: {error}"
    return ToolCall(name, tag.content, arguments, why, tag.start, tag.end)


def call_of(call: Any) -> tuple[str, dict[str, Any], str]:
    """The name and arguments of a call in JSON, and the reason why it is none, or "".

    {"name": "f", "arguments": {"x": 1}} -> "f", {"x": 1}, ""
    """
    if not isinstance(call, dict):
        return "", {}, f"a tool call must be a JSON object, not {type(call).__name__}"
    if isinstance(call.get("function"), dict):  # {"type": "function", "function": {...}}
        call = call["function"]
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters", {}))  # Llama says "parameters"
    if not isinstance(name, str) or not name:
        return "", {}, 'a tool call needs a "name", which is a string'
    if isinstance(arguments, str):  # the wire form: JSON inside JSON
        try:
            arguments = _read_json(arguments)
        except RecursionError:
            return "", {}, "the tool call is nested too deeply"
        except ValueError as error:
            return "", {}, f"the tool call is not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return name, {}, f'"arguments" must be a JSON object, not {type(arguments).__name__}'
    return name, arguments, ""


def _mcp_call(tag: Tag) -> ToolCall:
    name = last_tag(tag.content, "tool_name")
    written = last_tag(tag.content, "arguments")
    if not name or written is None:
        lacking = "arguments" if name else "tool_name"
        why = f"a tool call needs <{lacking}>...</{lacking}>"
        return ToolCall(name or "", tag.content, error=why, start=tag.start, end=tag.end)
    arguments, why = read_arguments(written)
    return ToolCall(name, tag.content, arguments, why, start=tag.start, end=tag.end)


def read_arguments(text: str) -> tuple[dict[str, Any], str]:
    """The arguments of a call, a JSON object, and ""; or {} and the reason why they are invalid.

    '{"x": 1}' -> {"x": 1}, "";  "" -> {}, "";  "[1]" -> {}, "the arguments must be ..."
    """
    try:
        value = _read_json(text) if text.strip() else {}
    except RecursionError:
        return {}, "the arguments are nested too deeply"
    except ValueError as error:
        return {}, f"the arguments are not valid JSON: {error}"
    if not isinstance(value, dict):
        return {}, f"the arguments must be a JSON object, not {type(value).__name__}"
    return value, ""


def _read_json(text: str) -> Any:
    """Strict JSON: no NaN, and no lone surrogates, which could not be written again."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON value")

    value = json.loads(text, parse_constant=refuse)
    level, depth = [value], 0
    while level := [one for outer in level for one in _inside(outer)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError(f"more than {MAX_DEPTH} levels of JSON")
    # a lone surrogate and a float beyond range (1e999) fail here, both with a ValueError
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def opened_parts(text: str, opening: str) -> Iterator[tuple[int, int, int]]:
    """The start and end of each opening mark, and the start of the next one."""
    start = text.find(opening)
    while start >= 0:
        body = start + len(opening)
        following = text.find(opening, body)
        yield start, body, following if following >= 0 else len(text)
        start = following


def broken_call(text: str, start: int, end: int, why: str) -> ToolCall:
    return ToolCall("", text[start:end], error=why, start=start, end=end)


STYLES = {
    "tags": _tag_calls,
    "hermes": _hermes_calls,
    "fenced": _fenced_calls,
    "gem": _gem_calls,
    "mcp": _mcp_calls,
}
"""How a policy writes tool calls."""
