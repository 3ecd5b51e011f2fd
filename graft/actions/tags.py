"""The baseline: tools entered by a tag in free text, used with tokens of the vocabulary.

A tag is several tokens, so free text has a mode for each prefix of a tag that may already be written,
as in Knuth, Morris and Pratt's search. All of them allow every token. With the entry < a > as tokens

    text    x  <  <  a  >  1  +  ...
    mode    0  0  1  1  2  3  4            0: nothing yet, 1: "<", 2: "<a", from 3 on: inside

Inside, a mode allows the symbols of the syntax, and always the first token of the closing tag, which
writes the whole tag and exits.
"""

from __future__ import annotations

from collections.abc import Mapping

from graft.actions.build import LANGUAGE, ActionPlan, ToolEntry, symbols_of
from graft.actions.fields import ActionsError
from graft.actions.listing import ListedTool
from graft.actions.syntax import explore, rules_of

Tokens = tuple[int, ...]


class TagSpotter:
    """Tracks the prefix of an entry tag that the text ends with; `step` reads one more token."""

    def __init__(self, entries: Mapping[Tokens, str]) -> None:
        self.entries = entries
        self.prefixes = list(dict.fromkeys(tag[:n] for tag in entries for n in range(len(tag))))
        self.alphabet = sorted({token for tag in entries for token in tag})

    def step(self, prefix: Tokens, token: int) -> Tokens:
        """A whole entry if one ends here, else the longest prefix of one; () for none."""
        text = (*prefix, token)
        endings = [text[i:] for i in range(len(text) + 1)]  # the longest first, () last
        whole = (ending for ending in endings if ending in self.entries)
        return next(whole, None) or next(e for e in endings if e in self.prefixes)

    def first(self, tag: Tokens) -> Tokens:
        """The first entry that is complete when `tag` is read."""
        seen: Tokens = ()
        for token in tag:
            seen = self.step(seen, token)
            if seen in self.entries:
                break
        return seen


def build_tags(plan: ActionPlan) -> list[ToolEntry]:
    """Fill the plan with tools in tags."""
    entries = _entries(plan)
    spotter = TagSpotter(entries)
    free = {prefix: plan.add_mode(set(), is_free=True) for prefix in spotter.prefixes}
    inside: dict[str, range] = {}
    tool_entries: list[ToolEntry] = []
    for tool in plan.listing.tools:
        tool_entry = _build_inside(plan, tool)
        inside[tool.name] = tool_entry.modes
        tool_entries.append(tool_entry)
    for prefix, mode in free.items():
        if mode != LANGUAGE:
            plan.default[mode] = LANGUAGE
        for token in spotter.alphabet:
            after = spotter.step(prefix, token)
            if after in entries:
                plan.transitions[mode, token] = inside[entries[after]][0]
            elif free[after] != plan.default.get(mode, mode):
                plan.transitions[mode, token] = free[after]
    return tool_entries


def _entries(plan: ActionPlan) -> dict[Tokens, str]:
    """The tokens of every spelling of an entry -> its tool."""
    entries: dict[Tokens, str] = {}
    for tool in plan.listing.tools:
        for entry in tool.entries:
            where = f"{plan.where(tool)}, entry"
            tokens = tuple(plan.encode(entry.text, where))
            if tokens in entries:
                raise ActionsError(
                    f"{where}: {entry.text!r} has the same tokens {list(tokens)} as an entry of "
                    f"{entries[tokens]!r}; change or delete one"
                )
            entries[tokens] = tool.name
    spotter = TagSpotter(entries)
    for tag, tool in entries.items():
        first = spotter.first(tag)
        if first != tag:
            raise ActionsError(
                f"{plan.listing.file}, tool {tool!r}, entry: "
                f"{plan.tokenizer.decode(tag)!r} cannot be reached, since "
                f"{plan.tokenizer.decode(first)!r} in it already enters {entries[first]!r}"
            )
    return entries


def _build_inside(plan: ActionPlan, tool: ListedTool) -> ToolEntry:
    where = plan.where(tool)
    tokens = [_single(plan, action.text, where) for g in tool.groups for action in g.actions]
    symbols = symbols_of(tool)
    closing = tuple(plan.encode(tool.exit, f"{where}, exit"))
    if closing[0] in tokens:
        raise ActionsError(
            f"{where}, exit: {tool.exit!r} begins with the token {closing[0]}, which is also the "
            f"action {plan.tokenizer.decode(closing[:1])!r}; spell the tag so that it begins "
            f"differently"
        )
    states = explore(rules_of(tool.syntax, symbols, tool.options, where), symbols, where)
    full = len(states)  # no argument may follow: only the closing tag
    if any(arc.state is None for arcs in states for arc in arcs.values()):
        states.append({})
    modes = [plan.add_mode({tokens[i] for i in arcs} | {closing[0]}) for arcs in states]
    for mode, arcs in zip(modes, states, strict=True):
        for i, (state, insert) in arcs.items():
            plan.transitions[mode, tokens[i]] = modes[full if state is None else state]
            if insert:
                plan.writes[mode, tokens[i]] = (tokens[i], *plan.encode(insert, where))
        plan.transitions[mode, closing[0]] = LANGUAGE
        plan.writes[mode, closing[0]] = closing
        plan.exits.add((mode, closing[0]))
    return ToolEntry(
        tool.name,
        plan.encode(tool.entries[0].text, f"{where}, entry"),
        range(modes[0], modes[-1] + 1),
        {token: symbol.text for token, symbol in zip(tokens, symbols, strict=True)},
        closing[:1],
        plan.encode(tool.words, f"{where}, words"),
        tool.answer,
    )


def _single(plan: ActionPlan, text: str, where: str) -> int:
    tokens = plan.encode(text, where)
    if len(tokens) != 1:
        pieces = [plan.tokenizer.decode([token]) for token in tokens]
        raise ActionsError(
            f"{where}: the action {text!r} is {len(tokens)} tokens of this tokenizer, {pieces}; "
            f"with tags each action has to be one"
        )
    return tokens[0]
