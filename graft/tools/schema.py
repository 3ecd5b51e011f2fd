"""A tool in OpenAI's function schema, and the conversion between texts and arguments.

Chat templates print the schema unchanged, so it is kept short: no titles, no references.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graft.text.calls import read_arguments

TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"content": {"type": "string"}},
    "required": ["content"],
}
"""The parameters of a tool without `parameters`: it takes a text."""


def schema(tool: Any) -> dict[str, Any]:
    """A tool in OpenAI's form, for a chat template.

    schema(Calculator()) -> {"type": "function", "function": {"name": "calculator", "description":
    "Works out ...", "parameters": {"type": "object", "properties": {"expression": ...}, ...}}}
    """
    function = {
        "name": tool.name,
        "description": getattr(tool, "description", ""),
        "parameters": parameters_of(tool),
    }
    return {"type": "function", "function": function}


def parameters_of(tool: Any) -> Mapping[str, Any]:
    return getattr(tool, "parameters", None) or TEXT


def only_text(parameters: Mapping[str, Any]) -> str | None:
    """The property that a bare text fills: the only required one, if it is a string.

    >>> only_text({"properties": {"query": {"type": "string"}}, "required": ["query"]})
    'query'
    """
    required = parameters.get("required", [])
    if len(required) != 1:
        return None
    described = parameters.get("properties", {}).get(required[0], {})
    return required[0] if described.get("type") == "string" else None


def content_of(tool: Any, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """The content of a JSON call for `tool(content)` and "", or "" and the error.

    A tool that needs one string gets that string: {"code": "print(1)"} -> "print(1)"; any other gets
    the arguments as JSON text.
    """
    parameters = parameters_of(tool)
    name = only_text(parameters)
    known = parameters.get("properties", {})
    if name is None or (name in arguments and len(arguments) > 1 and len(known) > 1):
        return json.dumps(arguments, ensure_ascii=False), ""
    if name not in arguments:
        return "", f"argument {name!r} is missing"
    if unknown := [key for key in arguments if key != name]:
        return "", f"unknown argument {unknown[0][:40]!r}; the only one is {name!r}"
    value = arguments[name]
    if not isinstance(value, str):
        return "", f"argument {name!r} must be a string, not {type(value).__name__}"
    return value, ""


def arguments_in(content: str, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The arguments in a content and "", or {} and the error.

    For a tool that requires only a `city`: "Bern" -> {"city": "Bern"}, and a JSON object with no other
    names than its parameters is parsed: {"city": "Bern", "days": 2}. Any other tool takes only JSON.
    """
    arguments, why = read_arguments(content)
    required = parameters.get("required", [])
    if len(required) != 1:
        return arguments, why
    known = parameters.get("properties", {})
    is_text = only_text(parameters) is not None
    if is_text and (why or not arguments or any(name not in known for name in arguments)):
        return {required[0]: content}, ""  # a text may look like JSON without being a call
    return ({required[0]: content.strip()}, "") if why else (arguments, "")


def tidy(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema without titles and with its references replaced, except recursive ones.

    {"$defs": {"Color": {"enum": ["red"]}}, "properties": {"c": {"$ref": "#/$defs/Color"}}}
    -> {"properties": {"c": {"enum": ["red"]}}}
    """
    defined: Mapping[str, Any] = parameters.get("$defs", {})
    kept: set[str] = set()  # recursive definitions, which must stay

    def clean(node: Any, inside: tuple[str, ...], is_names: bool = False) -> Any:
        if isinstance(node, list):
            return [clean(item, inside) for item in node]
        if not isinstance(node, Mapping):
            return node
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if name in defined:
            if name in inside:
                kept.add(name)
                return dict(node)
            beside = {key: value for key, value in node.items() if key != "$ref"}
            return clean({**defined[name], **beside}, (*inside, name))
        return {
            # a property may be called "title": only the keyword is removed
            key: clean(value, inside, is_names=key == "properties" and not is_names)
            for key, value in node.items()
            if is_names or key not in ("title", "$defs")
        }

    cleaned = clean(parameters, ())
    if kept:
        cleaned["$defs"] = {name: clean(defined[name], (name,)) for name in sorted(kept)}
    return cleaned
