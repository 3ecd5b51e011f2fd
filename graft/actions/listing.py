"""Action files: the tools of a run, each with its entry, its actions, its syntax and its answer.

    tools:
      - name: compare
        entry: " compare"            written when the tool is entered
        words: [" compare"]          what a policy writes where it refers to this tool; the first is used
        answer: ": {}\\n"             how the result is written; {} stands for it
        syntax: {arguments: {take: [items, items], between: " and"}}
        groups:
          - {name: items, actions: [" A", " B"]}
      - name: swap
        ...
        groups: [{name: items}]      the same actions once more: named before, so not listed again

writes " compare A and B: A < B\\n". A group whose name contains "exit" has the actions that end a call. An
action {text: " is odd", init: 1} has a head row that starts as that of its token 1, " odd"; the default
of init is 0, and `init: random` draws a row.

With `style: tags` the same is done with tokens of the vocabulary: each action is one token, `entry` may
list several spellings of the tag (the first is the one that is forced), `exit` is the closing tag, and
`answer` is left out, because the environment writes the result.

`syntax` is the name of one, {name: {option: value}}, or "your.module:function"; see `graft.actions.syntax`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from graft.actions import earl
from graft.actions.fields import ActionsError, fields, load_fields, required, several, text
from graft.spelling import nearest

FILES = Path(__file__).parent / "files"
COMMON = ("name", "entry", "words", "syntax", "groups")
KEYS = {"actions": (*COMMON, "answer"), "tags": (*COMMON, "exit")}
"""Style -> the keys of its tools."""


class Action(NamedTuple):
    """A description, and which of its tokens lends the head row; None draws a row."""

    text: str
    init: int | None = 0


class ActionGroup(NamedTuple):
    name: str
    actions: tuple[Action, ...]

    @property
    def is_exit(self) -> bool:
        return "exit" in self.name


@dataclass(frozen=True, slots=True)
class ListedTool:
    """One tool as its file describes it. `exit` is the closing tag, "" where actions exit."""

    name: str
    entries: tuple[Action, ...]
    words: str
    answer: str
    exit: str
    syntax: str
    options: dict[str, Any]
    groups: tuple[ActionGroup, ...]


@dataclass(frozen=True, slots=True)
class ActionFile:
    """An action file that was read."""

    file: str
    style: str
    tools: tuple[ListedTool, ...]

    def choose(self, names: Sequence[str]) -> ActionFile:
        """Keep only these tools, still in the file's order; all of them if none is named."""
        known = [tool.name for tool in self.tools]
        for name in names:
            if name not in known:
                hint = nearest(name, known)
                meant = f"did you mean {hint!r}? " if hint else ""
                raise ActionsError(f"{self.file} has no tool {name!r}; {meant}known: {known}")
        chosen = tuple(tool for tool in self.tools if not names or tool.name in names)
        return ActionFile(self.file, self.style, chosen)


def bundled() -> list[str]:
    return sorted(path.stem for path in FILES.glob("*.yaml"))


def read_listing(source: str) -> ActionFile:
    """A bundled file by its name, or any file by its path; EARL's own files are read too."""
    path = FILES / f"{source}.yaml" if source in bundled() else Path(source)
    if not path.is_file():
        hint = nearest(source, bundled())
        meant = f" Did you mean {hint!r}?" if hint else ""
        raise ActionsError(
            f"no actions {source!r}: neither a file nor bundled ({', '.join(bundled())}).{meant}"
        )
    data = load_fields(path)
    if "tool_list" in data:
        data = earl.translate(data, path.name)
    return parse(data, path.name)


def parse(data: dict[str, Any], file: str) -> ActionFile:
    """An ActionFile from plain values; later tools may use the groups of earlier ones."""
    data = fields(data, ("style", "tools"), file)
    style = data.get("style", "actions")
    if not isinstance(style, str) or style not in KEYS:
        raise ActionsError(f"{file}: style {style!r} is neither 'actions' nor 'tags'")
    groups: dict[str, ActionGroup] = {}
    tools: list[ListedTool] = []
    for i, entry in enumerate(several(required(data, "tools", file), f"{file}, tools"), 1):
        tool = _tool(entry, style, groups, f"{file}, tool {i}")
        if any(tool.name == other.name for other in tools):
            raise ActionsError(f"{file}: two tools are named {tool.name!r}; rename one")
        tools.append(tool)
    _refuse_clashes(tools, style, file)
    return ActionFile(file, style, tuple(tools))


def _tool(value: Any, style: str, groups: dict[str, ActionGroup], where: str) -> ListedTool:
    if isinstance(value, dict) and "name" in value:
        where = f"{where.partition(', tool')[0]}, tool {value['name']!r}"
    if isinstance(value, dict) and style == "tags" and "answer" in value:
        raise ActionsError(f"{where}: with tags the environment writes the result; delete 'answer'")
    if isinstance(value, dict) and style == "actions" and "exit" in value:
        raise ActionsError(
            f"{where}: 'exit' is a closing tag, for `style: tags`; with actions a call ends by its "
            f"last argument or by an action of a group named 'exit'"
        )
    values = fields(value, KEYS[style], where)
    name = text(required(values, "name", where), f"{where}, name")
    entries = required(values, "entry", where)
    if not (style == "tags" and isinstance(entries, list)):
        entries = [entries]
    words = [
        text(word, f"{where}, words")
        for word in several(required(values, "words", where), f"{where}, words")
    ]
    syntax, options = _syntax(required(values, "syntax", where), f"{where}, syntax")
    listed = several(required(values, "groups", where), f"{where}, groups")
    return ListedTool(
        name=name,
        entries=tuple(
            _action(one, f"{where}, entry") for one in several(entries, f"{where}, entry")
        ),
        words=words[0],
        answer=_answer(values["answer"], f"{where}, answer") if "answer" in values else "{}",
        exit=text(required(values, "exit", where), f"{where}, exit") if style == "tags" else "",
        syntax=syntax,
        options=options,
        groups=tuple(_group(one, style, groups, where) for one in listed),
    )


def _action(value: Any, where: str) -> Action:
    """ "text" or {text: "text", init: 1}."""
    if not isinstance(value, dict):
        return Action(text(value, where))
    values = fields(cast(Any, value), ("text", "init"), where)
    init = values.get("init", 0)
    described = text(required(values, "text", where), where)
    if init == "random":
        return Action(described, None)
    if not isinstance(init, int) or isinstance(init, bool) or init < 0:
        raise ActionsError(
            f"{where}: init {init!r} of {described!r} is neither the number of one of its tokens "
            f"(0 is the first) nor 'random'"
        )
    return Action(described, init)


def _group(value: Any, style: str, groups: dict[str, ActionGroup], where: str) -> ActionGroup:
    values = fields(value, ("name", "actions"), f"{where}, groups")
    name = text(required(values, "name", f"{where}, groups"), f"{where}, groups")
    where = f"{where}, group {name!r}"
    if "actions" not in values:
        if name in groups:
            return groups[name]
        hint = nearest(name, list(groups))
        meant = f"did you mean {hint!r}? " if hint else ""
        raise ActionsError(
            f"{where}: no actions, and no tool above has a group of this name; {meant}list them"
        )
    if name in groups:
        raise ActionsError(
            f"{where}: listed a second time; delete its actions to share those listed before, or "
            f"give it another name"
        )
    listed = several(values["actions"], f"{where}, actions")
    groups[name] = ActionGroup(name, tuple(_action(one, f"{where}, actions") for one in listed))
    if style == "tags" and groups[name].is_exit:
        raise ActionsError(f"{where}: with tags only the closing tag exits; give it as 'exit'")
    return groups[name]


def _syntax(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """ "expression", or {expression: {depth: 4}}: a name and its options."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict) and len(cast(dict[Any, Any], value)) == 1:
        ((name, options),) = cast(dict[Any, Any], value).items()
        if isinstance(name, str) and isinstance(options, dict):
            return name, cast(dict[str, Any], options)
    raise ActionsError(f"{where}: {value!r} is neither a name nor {{name: {{option: value}}}}")


def _answer(value: Any, where: str) -> str:
    answer = text(value, where)
    if answer.count("{}") != 1:
        raise ActionsError(f"{where}: {answer!r} must have {{}} once, in the place of the result")
    return answer


def _refuse_clashes(tools: Iterable[ListedTool], style: str, file: str) -> None:
    """Raise for equal descriptions, in the file or in one tool."""
    entries: dict[str, str] = {}
    owners: dict[str, str] = {}  # description -> its group
    for tool in tools:
        for entry in tool.entries:
            if entry.text in entries:
                raise ActionsError(
                    f"{file}: {entry.text!r} enters {entries[entry.text]!r} and {tool.name!r}; "
                    f"each needs an entry of its own, written once"
                )
            entries[entry.text] = tool.name
        seen: set[str] = set()
        names: set[str] = set()
        for group in tool.groups:
            where = f"{file}, tool {tool.name!r}, group {group.name!r}"
            if group.name in names:
                raise ActionsError(f"{where}: the tool has this group twice; delete one")
            names.add(group.name)
            for action in group.actions:
                # a tag may spell ")" and " )", two tokens for one thing; two actions may not
                key = action.text if style == "tags" else action.text.strip()
                if key in seen:
                    raise ActionsError(
                        f"{where}: the tool already has an action {key!r}; delete one of them"
                    )
                seen.add(key)
                owner = owners.setdefault(action.text, group.name)
                if style == "actions" and owner != group.name:
                    raise ActionsError(
                        f"{where}: {action.text!r} is already an action of the group {owner!r}; "
                        f"put what is shared into a group of its own"
                    )
