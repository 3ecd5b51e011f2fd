r"""The formats of tool calls and of their results.

    tags    <python>print(1)</python>   the turn stops there; <result>1</result> is appended inline
    arpo    the same, with the result on separate lines
    gem     <python>...</python> or a ```python fence anywhere, whichever ends first; what follows
            is ignored; the result is a message
    fenced  the first ```python block; the result is a message
    hermes  <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number; the
            schemas are in the prompt, the results are messages of the role "tool"
    mcp     <tool_call><tool_name>f</tool_name><arguments>{...}</arguments></tool_call>, the first
    actions no text: the turn is a `CallText`, made by actions beyond the vocabulary; the tool's result is
            appended inline, and the actions add the text around it

In the first four formats only the names of tools make a call. In the last three a call to an unknown
tool is a call, and is answered with an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from graft.text.calls import ToolCall, tool_calls
from graft.tools.errors import is_error
from graft.tools.schema import parameters_of, schema
from graft.types import CallText

SPENT = "No calls are left. Give the final answer."


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The strings around calls to one tool and around their results; "{}" is the result."""

    open: str
    close: str
    result: str
    error: str | None = None
    """Written instead of any error message, for vocabularies that cannot spell one."""
    spent: str = ""
    """The answer to calls beyond `max_uses`."""
    last: str = ""
    """Added to the result of the last call that `max_uses` allows."""

    def render(self, result: str) -> str:
        if self.error is not None and is_error(result):
            return self.error
        return self.result.replace("{}", result)


def in_tags(result: str, last: str = "", tag: str = "") -> Callable[[str], CallStyle]:
    """The styles of calls in tags with the tool's name, or in `tag` for any tool.

    >>> in_tags("<result>{}</result>")("calculator").open
    '<calculator>'
    """
    spent = result.replace("{}", SPENT)
    return lambda name: CallStyle(
        f"<{tag or name}>", f"</{tag or name}>", result, None, spent, last
    )


def bare(name: str) -> CallStyle:
    """Write only the result. No strings mark the call: its type, `CallText`, does."""
    return CallStyle("", "", "{}", spent=SPENT)


tagged = in_tags("<result>{}</result>")
lined = in_tags(" <result>\n{}\n</result>")
plain = in_tags("{}", last=f"\n{SPENT}")  # the result is a separate message and needs no tags
enclosed = in_tags("{}", last=f"\n{SPENT}", tag="tool_call")
COMPACT = CallStyle(open="[", close="]", result="{};", error="?;", spent="?;")
"""[12*3] is answered with "36;" and every error with "?;", for models of single characters."""
COMPACT_BARE = CallStyle(open="", close="", result="{}", error="?", spent="?")
"""The same for calls made by actions: 36 or ?, and the actions add the semicolon."""

Styles = Mapping[str, CallStyle]


class WrittenCall(NamedTuple):
    tool: str
    content: str | None
    """None: a close string without an open string."""


def find_call(action: str, styles: Styles) -> WrittenCall | None:
    """The call at the end of an action; None without one.

    >>> find_call("so [34*5]", {"calculator": COMPACT})
    WrittenCall(tool='calculator', content='34*5')
    """
    text = action.rstrip()
    ending = {name: style for name, style in styles.items() if text.endswith(style.close)}
    if not ending:
        return None
    # tools may share a close string: it closes the one opened last
    opened = {
        name: text.rfind(style.open, 0, len(text) - len(style.close))
        for name, style in ending.items()
    }
    name = max(opened, key=opened.__getitem__)
    if opened[name] < 0:
        return WrittenCall(name, None)
    style = ending[name]
    return WrittenCall(name, text[opened[name] + len(style.open) : len(text) - len(style.close)])


def _last_call(action: str, styles: Styles) -> list[ToolCall]:
    call = find_call(action, styles)
    if call is None:
        return []
    style = styles[call.tool]
    error = f"{style.close} without {style.open}" if call.content is None else ""
    return [ToolCall(call.tool, call.content or "", error=error, end=len(action))]


def _action_call(action: str, styles: Styles) -> list[ToolCall]:
    """CallText(" calculate 12 + 6 =", "calculator", ("1", "2", "+", "6")) -> calculator, "12+6"."""
    if not styles or not isinstance(action, CallText):
        return []
    return [ToolCall(action.tool, "".join(action.arguments), end=len(action))]


def _first_call(written: str) -> Callable[[str, Styles], list[ToolCall]]:
    return lambda action, styles: tool_calls(action, written, list(styles))[:1]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One format. `find` returns the calls of an action in order, [] without any."""

    find: Callable[[str, Styles], list[ToolCall]]
    style: Callable[[str], CallStyle]
    """The default style of a tool."""
    observe_as: str
    """How results enter the context: "inline", or as a message of the role "user" or "tool"."""
    stops: bool = False
    """Whether a turn ends at a close string."""
    is_json: bool = False
    """Whether calls have JSON arguments, so that the model needs the schemas."""
    in_prompt: bool = False
    """Whether the chat template shows the schemas (`info["tools"]`); else the instructions do."""
    example: str = ""
    """A call in the instructions, if not the open and close strings; "{name}" is the tool."""


FORMATS: dict[str, CallFormat] = {
    "tags": CallFormat(_last_call, tagged, "inline", stops=True),
    "arpo": CallFormat(_last_call, lined, "inline", stops=True),
    "gem": CallFormat(
        _first_call("gem"),
        plain,
        "tool",
        stops=True,
        example="<{name}>...</{name}> or a block fenced with ```{name} and ```",
    ),
    "fenced": CallFormat(
        _first_call("fenced"), plain, "user", example="a block fenced with ```{name} and ```"
    ),
    "hermes": CallFormat(
        lambda action, styles: tool_calls(action, "hermes"),
        enclosed,
        "tool",
        is_json=True,
        in_prompt=True,
    ),
    "mcp": CallFormat(
        lambda action, styles: tool_calls(action, "mcp")[:1],
        enclosed,
        "tool",
        stops=True,
        is_json=True,
        example="<tool_call><tool_name>name</tool_name><arguments>{...}</arguments></tool_call>",
    ),
    "actions": CallFormat(
        _action_call, bare, "inline", example="its keyword, then only what it takes can follow"
    ),
}
"""Name -> the format."""


def instructions_for(
    tools: Mapping[str, Any], form: CallFormat, styles: Styles, uses: int | None
) -> str:
    """The description of the tools for the policy; "" where the chat template has it.

    Two lines for a calculator in tags: "You may use tools; ... At most 5 calls in all." and
    "- calculator: Works out an expression. Write <calculator>...</calculator>."
    """
    if form.in_prompt or not tools:
        return ""
    limit = "" if uses is None else f" At most {uses} calls in all."
    if form.is_json:
        listed = "\n".join(json.dumps(schema(tool), ensure_ascii=False) for tool in tools.values())
        head = "You may use tools, one call in a message; the result is in the next one. Tools:"
        return f"{head}\n<tools>\n{listed}\n</tools>\nA call is written {form.example}.{limit}"
    lines = ["You may use tools; the result of a call is shown to you before you go on." + limit]
    for name, tool in tools.items():
        shown = form.example or f"{styles[name].open}...{styles[name].close}"
        about = getattr(tool, "description", "") or "see its name."
        line = f"- {name}: {about} Write {shown.replace('{name}', name)}."
        lines.append(" ".join(filter(None, (line, arguments_of(tool)))))
    return "\n".join(lines)


def arguments_of(tool: Any) -> str:
    """The arguments of a call, for a tool that takes more than one text; else "".

    area(width: float, height: float = 1.0) -> 'Inside, as JSON: {"width": number, "height": number}.'
    """
    known: Mapping[str, Any] = parameters_of(tool).get("properties", {})
    if not known or [one.get("type") for one in known.values()] == ["string"]:
        return ""
    kinds = [f'"{name}": {kind_of(described)}' for name, described in known.items()]
    return f"Inside, as JSON: {{{', '.join(kinds)}}}."


def kind_of(described: Mapping[str, Any]) -> str:
    """{"type": "integer"} -> "integer", {"enum": ["C", "F"]} -> '"C" or "F"'."""
    if "enum" in described:
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in described["enum"])
    several = described.get("anyOf") or described.get("oneOf")
    if several:
        return " or ".join(dict.fromkeys(kind_of(one) for one in several))
    kind = described.get("type", "any value")
    return kind if isinstance(kind, str) else " or ".join(kind)
