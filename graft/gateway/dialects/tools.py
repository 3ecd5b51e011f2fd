"""Tools of a request, as far as they run in the agent; the names of those that a provider would run.

{"type": "function", "name": "add", ...}                       add
{"type": "namespace", "name": "files", "tools": [read, ...]}   files__read, ...: functions of the agent
{"type": "bash_20250124", "name": "bash"}                      bash, which the agent runs
{"type": "custom", "name": "apply_patch"}                      apply_patch, whose argument is a text
{"type": "web_search"}                                         dropped: there is no provider here
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.gateway.dialects.fields import RequestFields

JOINED = "__"
"""Between the name of a namespace and that of its function, unless the first ends with it."""
COMMANDS = {
    "command": {"type": "string", "description": "The shell command to run."},
    "restart": {"type": "boolean", "description": "Restart the shell instead."},
}
INPUT = "input"
TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
EDITS: dict[str, Any] = {
    "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
    "path": {"type": "string"},
    "file_text": {"type": "string", "description": "Of create: the whole file."},
    "old_str": {
        "type": "string",
        "description": "Of str_replace: the text to replace, once in the file.",
    },
    "new_str": {"type": "string", "description": "Of str_replace: what takes its place."},
    "insert_line": {"type": "integer", "description": "Of insert: the line after which."},
    "insert_text": {"type": "string", "description": "Of insert: the text."},
    "view_range": {"type": "array", "items": {"type": "integer"}, "description": "Of view: lines."},
}
MEMORY: dict[str, Any] = {
    **EDITS,
    "command": {
        "type": "string",
        "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
    },
    "old_path": {"type": "string", "description": "Of rename."},
    "new_path": {"type": "string", "description": "Of rename."},
}
CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bash_": ("Runs a command in a shell that stays open.", COMMANDS, ()),
    "text_editor_": ("Shows, makes and changes files.", EDITS, ("command", "path")),
    "memory_": ("Keeps notes in files below /memories.", MEMORY, ("command",)),
}
"""Anthropic's tools that run in the agent, by the start of their type: description, parameters, required."""


@dataclass(slots=True)
class OfferedTools:
    """The tools of a request."""

    functions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    dropped: list[str] = field(default_factory=list[str])
    """The types of those that a provider would run."""
    strict: list[str] = field(default_factory=list[str])
    """The names of functions whose arguments must be valid."""
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Name of a function -> its namespace and its name there."""


def read_tools(
    fields: RequestFields, read: Callable[[RequestFields], dict[str, Any]], known: Sequence[str]
) -> OfferedTools:
    """The tools of a request; `read` reads those of the `known` types."""
    offered = OfferedTools()
    for tool in fields.objects("tools"):
        kind = tool.text("type", known[0])
        if kind in known or tool.get("function") is not None:
            offered.functions.append(read(tool))
            _note_strict(tool, offered)
        elif kind == "namespace":
            _read_namespace(tool, offered)
        elif start := next(filter(kind.startswith, CLIENT_TOOLS), ""):
            offered.functions.append(_client_tool(tool, start))
        else:
            offered.dropped.append(kind[:80])
    return offered


def function_tool(fields: RequestFields, parameters: str) -> dict[str, Any]:
    """A tool in OpenAI's form. `parameters` is the name of the field that has their schema."""
    function = {
        "name": fields.name("name"),
        "description": fields.text("description"),
        "parameters": dict(fields.fields(parameters).values)
        or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def text_tool(fields: RequestFields) -> dict[str, Any]:
    """A custom tool of OpenAI's: a function with one text, whose form is told and not enforced."""
    form = fields.fields("format").fields("grammar")
    definition = form.text("definition") or fields.fields("format").text("definition")
    description = "\n".join(filter(None, (fields.text("description"), definition)))
    function = {"name": fields.name("name"), "description": description, "parameters": TEXT}
    return {"type": "function", "function": function}


def text_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call of a `text_tool`."""
    return {INPUT: text}


def text_input(arguments: str) -> str:
    """The text in the arguments of a call; those of another form as they are.

    >>> text_input('{"input": "*** Begin Patch"}'), text_input('{"patch": 1}')
    ('*** Begin Patch', '{"patch": 1}')
    """
    match json.loads(arguments):
        case {"input": str(text), **rest} if not rest:
            return text
        case _:
            return arguments


def joined_name(namespace: str, name: str) -> str:
    """
    >>> joined_name("files", "read"), joined_name("mcp__git__", "log"), joined_name("", "add")
    ('files__read', 'mcp__git__log', 'add')
    """
    return f"{namespace}{JOINED * bool(namespace and not namespace.endswith(JOINED))}{name}"


def _read_namespace(fields: RequestFields, offered: OfferedTools) -> None:
    namespace = fields.name("name")
    for tool in fields.objects("tools"):
        if tool.text("type", "function") != "function":
            offered.dropped.append(tool.text("type")[:80])
            continue
        made = function_tool(tool, "parameters")
        name = made["function"]["name"]
        made["function"]["name"] = joined_name(namespace, name)
        offered.namespaces[made["function"]["name"]] = namespace, name
        offered.functions.append(made)
        _note_strict(tool, offered)


def _note_strict(fields: RequestFields, offered: OfferedTools) -> None:
    """Note the tool that was read last, if it is a strict one: `strict` is beside its schema."""
    inner = fields.fields("function") if fields.get("function") is not None else fields
    if inner.flag("strict"):
        offered.strict.append(offered.functions[-1]["function"]["name"])


def _client_tool(fields: RequestFields, start: str) -> dict[str, Any]:
    description, properties, required = CLIENT_TOOLS[start]
    parameters: Mapping[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters = {**parameters, "required": [*required]}
    function = {"name": fields.name("name"), "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
