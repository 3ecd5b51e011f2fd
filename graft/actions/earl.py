"""EARL's tool files in the form of `graft.actions.listing`.

    tool_list:                                      tools:
      - name: swap                                    - name: swap
        entry_desc: " swap"                             entry: " swap"
        output_template: " => %s\\n"                     answer: " => {}\\n"
        cpo_words: [" swap"]              becomes       words: [" swap"]
        action_groups:                                  syntax: {arguments: {take: [items, items],
          - name: items                                   between: " and", distinct: true}}
            actions: [{desc: " A"}, ...]                groups: [{name: items, actions: [...]}]

Keys without a meaning here are ignored, with a warning. These files do not contain the syntax of a
tool, so it must be one of the four whose syntax is known. A baseline (`earl: false`) becomes a tool in
tags. If it lists "," as an action, the "," is written between two arguments instead of being drawn, as
" and" is between actions; a calculator has no ",".
"""

from __future__ import annotations

import logging
from typing import Any, cast

from graft.actions.fields import ActionsError, fields, required, several, text

log = logging.getLogger(__name__)

UNUSED = {
    "train_entry": "EARL's code never reads it",
    "trainable": "EARL's code never reads it",
    "do_not_expand_actions": "EARL's code never reads it",
    "is_sft_mode": "demonstrations are imitated with any file",
}
"""Keys of EARL's files -> why they are ignored."""
KEYS = ("name", "earl", "entry_desc", "output_template", "cpo_words", "init_weight_with")
RESULT = " <result> %s </result>"
"""The form of a result between tags in graft's environments."""


def translate(data: dict[str, Any], file: str) -> dict[str, Any]:
    """The same tools in graft's form."""
    listed = several(fields(data, ("tool_list",), file)["tool_list"], f"{file}, tool_list")
    tools: list[dict[str, Any]] = []
    styles: set[str] = set()
    passed: set[str] = set()
    for i, value in enumerate(listed, 1):
        where = f"{file}, tool {i}"
        value = _without_unused(value, passed)
        is_baseline = isinstance(value, dict) and cast(Any, value).get("earl") is False
        more = ("exit_desc", "actions") if is_baseline else ("action_groups",)
        values = fields(value, (*KEYS, *more), where)
        name = text(required(values, "name", where), f"{where}, name")
        where = f"{file}, tool {name!r}"
        tools.append((_baseline if is_baseline else _expanded)(values, name, where))
        styles.add("tags" if is_baseline else "actions")
    if passed:
        why = "; ".join(f"{key!r}: {UNUSED[key]}" for key in UNUSED if key in passed)
        log.warning("%s: ignored keys: %s", file, why)
    if len(styles) > 1:
        raise ActionsError(f"{file}: some tools have `earl: false` and some not; split the file")
    return {"style": styles.pop(), "tools": tools}


def _without_unused(value: Any, passed: set[str]) -> Any:
    """The tool without unused keys, at any depth; their names are added to `passed`."""
    if isinstance(value, list):
        return [_without_unused(one, passed) for one in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    found = cast(dict[Any, Any], value)
    passed |= found.keys() & UNUSED.keys()
    return {key: _without_unused(one, passed) for key, one in found.items() if key not in UNUSED}


def _expanded(values: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    if values.get("earl", True) is not True:
        raise ActionsError(f"{where}: earl is {values['earl']!r}; it may be true or false")
    groups: list[dict[str, Any]] = []
    for value in several(required(values, "action_groups", where), f"{where}, action_groups"):
        group = dict(fields(value, ("name", "actions"), f"{where}, action_groups"))
        if "actions" in group:
            listed = several(group["actions"], f"{where}, action_groups")
            group["actions"] = [_described(one, where) for one in listed]
        groups.append(group)
    template = text(required(values, "output_template", where), f"{where}, output_template")
    if template.count("%s") != 1 or "{}" in template:
        raise ActionsError(
            f"{where}, output_template: {template!r} must have %s once, in the place of the result, "
            f"and no {{}}"
        )
    entry = {"desc": required(values, "entry_desc", where)}
    if "init_weight_with" in values:
        entry["init_weight_with"] = values["init_weight_with"]
    return {
        "name": name,
        "entry": _described(entry, where),
        "words": required(values, "cpo_words", where),
        "answer": template.replace("%s", "{}"),
        "syntax": _syntax(name, "" if name == "check" else " and", where, groups),
        "groups": groups,
    }


def _described(value: Any, where: str) -> dict[str, Any]:
    """{desc: " is odd", init_weight_with: 1} -> {text: " is odd", init: 1}."""
    values = fields(value, ("desc", "init_weight_with"), f"{where}, actions")
    described = {"text": required(values, "desc", f"{where}, actions")}
    if "init_weight_with" in values:
        described["init"] = values["init_weight_with"]
    return described


def _baseline(values: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    if values.get("output_template", RESULT) != RESULT:
        raise ActionsError(
            f"{where}: the environment writes the result of a call in tags, as {RESULT!r}; it "
            f"cannot be {values['output_template']!r}"
        )
    actions = [
        text(one, f"{where}, actions")
        for one in several(required(values, "actions", where), f"{where}, actions")
    ]
    between = "," if name != "calculator" and "," in actions else ""
    drawn = [action for action in actions if action != ","]
    if name == "calculator" and "," in actions:  # of the file for demonstrations, which have 4,000
        log.warning(
            "%s: the action ',' is left out: numbers have no commas in an expression", where
        )
    symbols = [action for action in drawn if len(action.strip()) == 1]
    groups = [{"name": "items", "actions": symbols}, {"name": "properties", "actions": drawn}]
    if name == "check":
        groups[1]["actions"] = [action for action in drawn if action not in symbols]
    else:
        groups = [{"name": "items", "actions": drawn}]
    for group in groups:  # each tool lists its own, also where they are the same
        group["name"] = f"{name} {group['name']}"
    return {
        "name": name,
        "entry": required(values, "entry_desc", where),
        "exit": required(values, "exit_desc", where),
        "words": required(values, "cpo_words", where),
        "syntax": _syntax(name, between, where, groups),
        "groups": groups,
    }


def _syntax(name: str, between: str, where: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The rules of a tool; its first group holds the items, the second of check the properties."""
    items, properties = groups[0].get("name"), groups[-1].get("name")
    known: dict[str, dict[str, Any]] = {
        "calculator": {"expression": {}},
        "compare": {"arguments": {"take": [items, items], "between": between}},
        "swap": {"arguments": {"take": [items, items], "between": between, "distinct": True}},
        "check": {"arguments": {"take": [items, properties], "between": between}},
    }
    if name not in known:
        raise ActionsError(
            f"{where}: EARL's form does not contain the syntax of a tool, and {name!r} is none "
            f"of {', '.join(known)}; write the file in graft's form, with a syntax"
        )
    if name == "check" and len(groups) != 2:
        raise ActionsError(
            f"{where}: {len(groups)} group(s); check takes two, the items and then the properties"
        )
    return known[name]
