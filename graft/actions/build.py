"""Build the table of modes of a listing, and the automaton over them.

Ids follow the file: for each tool its entry, then the actions of each new group. Mode 0 is
free text; after it every tool has one mode per state of its syntax. With 100 tokens and the tools
compare and swap over the items A and B (swap distinct):

    100 compare   101 A   102 B   103 swap
    mode 0   all tokens, 100, 103
    mode 1   compare: 101 and 102 -> 2      mode 2   101 and 102 exit
    mode 3   swap: 101 -> 4, 102 -> 5       mode 4   102 exits      mode 5   101 exits
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graft.actions.fields import ActionsError
from graft.actions.grammar import Automaton
from graft.actions.listing import Action, ActionFile, ListedTool
from graft.actions.rules import Symbol
from graft.actions.space import ActionSpace
from graft.actions.syntax import explore, refuse_traps, rules_of
from graft.protocols import Tokenizer

LANGUAGE = 0
"""The mode of free text."""


class ToolEntry(NamedTuple):
    """One tool after the build: its entry, its modes, its actions by text."""

    tool: str
    entry: list[int]
    """The decisions that enter it from mode 0."""
    modes: range
    texts: dict[int, str]
    """Action -> its text without surrounding blanks; exits are left out."""
    exits: tuple[int, ...]
    """Actions that only end the call."""
    words: list[int]
    answer: str


@dataclass(slots=True)
class ActionPlan:
    """A table and an automaton under construction."""

    listing: ActionFile
    tokenizer: Tokenizer
    vocab_size: int
    """Rows of the model; those beyond the tokenizer's tokens are never allowed."""
    allowed: list[set[int]] = field(default_factory=list[set[int]])
    """Mode -> its actions; in free text besides all tokens."""
    free: set[int] = field(default_factory=set[int])
    """Modes of free text."""
    transitions: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    default: dict[int, int] = field(default_factory=dict[int, int])
    writes: dict[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[int, ...]]
    )
    exits: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    names: list[str] = field(default_factory=list[str])
    init_tokens: list[int | None] = field(default_factory=list[int | None])

    def encode(self, text: str, where: str) -> list[int]:
        try:
            tokens = self.tokenizer.encode_after(text)
        except ValueError as error:  # a character outside a small alphabet
            raise ActionsError(f"{where}: {text!r} cannot be encoded: {error}") from error
        if not tokens:
            raise ActionsError(f"{where}: {text!r} has no tokens; the model would read nothing")
        return tokens

    def add_mode(self, actions: set[int], is_free: bool = False) -> int:
        self.allowed.append(actions)
        if is_free:
            self.free.add(len(self.allowed) - 1)
        return len(self.allowed) - 1

    def add_action(self, action: Action, where: str) -> int:
        """A new action beyond the vocabulary; its id."""
        tokens = self.encode(action.text, where)
        if action.init is not None and action.init >= len(tokens):
            raise ActionsError(
                f"{where}: init {action.init} of {action.text!r}, which has {len(tokens)} tokens "
                f"({tokens}); the last is {len(tokens) - 1}"
            )
        self.names.append(action.text)
        self.init_tokens.append(None if action.init is None else tokens[action.init])
        return self.vocab_size + len(self.names) - 1

    def where(self, tool: ListedTool) -> str:
        return f"{self.listing.file}, tool {tool.name!r}"

    def space(self) -> ActionSpace:
        shape = (len(self.allowed), self.vocab_size + len(self.names))
        table = np.zeros(shape, dtype=np.bool_)
        for mode, actions in enumerate(self.allowed):
            table[mode, list(actions)] = True
            if mode in self.free:
                table[mode, : self.tokenizer.vocab_size] = True
        return ActionSpace(self.vocab_size, len(self.names), table)

    def grammar(self) -> Automaton:
        return Automaton(
            LANGUAGE, self.transitions, self.default, self.writes, frozenset(self.exits)
        )


def symbols_of(tool: ListedTool) -> list[Symbol]:
    return [
        Symbol(action.text.strip(), group.name, group.is_exit)
        for group in tool.groups
        for action in group.actions
    ]


def build_actions(plan: ActionPlan) -> list[ToolEntry]:
    """Fill the plan with actions beyond the vocabulary."""
    language = plan.add_mode(set(), is_free=True)
    ids: dict[str, int] = {}  # description -> action; no two actions share one
    entries: list[ToolEntry] = []
    for tool in plan.listing.tools:
        where = plan.where(tool)
        entry = plan.add_action(tool.entries[0], f"{where}, entry")
        for group in tool.groups:
            for action in group.actions:
                if action.text not in ids:
                    ids[action.text] = plan.add_action(action, f"{where}, group {group.name!r}")
        symbols = symbols_of(tool)
        texts = [action.text for group in tool.groups for action in group.actions]
        for part in filter(str.strip, tool.answer.split("{}")):  # else it would stop a rollout
            plan.encode(part, f"{where}, answer")
        states = explore(rules_of(tool.syntax, symbols, tool.options, where), symbols, where)
        refuse_traps(states, symbols, where)
        modes = [plan.add_mode({ids[texts[i]] for i in arcs}) for arcs in states]
        plan.allowed[language].add(entry)
        plan.transitions[language, entry] = modes[0]
        plan.writes[language, entry] = tuple(plan.encode(tool.entries[0].text, where))
        for mode, arcs in zip(modes, states, strict=True):
            for i, arc in arcs.items():
                taken = mode, ids[texts[i]]
                written = plan.encode(texts[i], where)
                inserted = plan.encode(arc.insert, where) if arc.insert else []
                plan.writes[taken] = (*written, *inserted)
                plan.transitions[taken] = language if arc.state is None else modes[arc.state]
                if arc.state is None:
                    plan.exits.add(taken)
        entries.append(
            ToolEntry(
                tool.name,
                [entry],
                range(modes[0], modes[-1] + 1),
                {ids[t]: s.text for t, s in zip(texts, symbols, strict=True) if not s.is_exit},
                tuple(ids[t] for t, s in zip(texts, symbols, strict=True) if s.is_exit),
                plan.encode(tool.words, f"{where}, words"),
                tool.answer,
            )
        )
    return entries
