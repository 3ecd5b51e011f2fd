"""The actions of a run: the table, the grammar, and how a call is read and written.

With the bundled "sorting" a policy that draws compare, A, B writes

    " compare"  " A and"  " B"            three decisions; the third completes the call
    read        ("compare", ("A", "B"))   the call that the environment gets
    render      ": A < B\\n"               its answer "A < B" as it is written after the call

`spell` is the inverse, for demonstrations: from ("compare", ("A", "B")) to the three decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graft.actions.build import LANGUAGE, ActionPlan, ToolEntry, build_actions
from graft.actions.fields import ActionsError
from graft.actions.grammar import Automaton
from graft.actions.listing import read_listing
from graft.actions.space import ActionSpace
from graft.actions.tags import build_tags
from graft.protocols import Tokenizer
from graft.spelling import nearest
from graft.types import NO_ACTION


class Decisions(NamedTuple):
    """Tokens with the decision each belongs to; `mode` is the one after them.

    tokens   " compare" " A" " and" " B"      a continuing token has NO_ACTION, and the mode of
    actions       100    101    -1   102      the decision that wrote it
    modes           0      1     1     2
    """

    tokens: list[int]
    actions: list[int]
    modes: list[int]
    mode: int


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """The actions of a run. Extra ones have the ids vocab_size, vocab_size + 1, ..."""

    space: ActionSpace
    grammar: Automaton
    names: tuple[str, ...]
    """The description of each extra action."""
    init_tokens: tuple[int | None, ...]
    """The token whose head row each extra action starts from; None: a random row."""
    tool_entries: tuple[ToolEntry, ...]

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(entry.tool for entry in self.tool_entries)

    def read(self, actions: Sequence[int], modes: Sequence[int]) -> tuple[str, tuple[str, ...]]:
        """The call at the end of these decisions: its tool and its arguments.

        Other text and calls may come before it. Blanks and the exit are no arguments.
        """
        taken = [(m, a) for a, m in zip(actions, modes, strict=True) if a != NO_ACTION]
        if not taken or not self.grammar.is_exit(*taken[-1]):
            raise ValueError("these decisions do not end with the exit of a tool: nothing to read")
        entry = next(entry for entry in self.tool_entries if taken[-1][0] in entry.modes)
        texts: list[str] = []
        for mode, action in reversed(taken):
            if mode not in entry.modes:
                break  # the entry
            texts.append(entry.texts.get(action, ""))
        return entry.tool, tuple(text for text in reversed(texts) if text)

    def entry(self, tool: str) -> Decisions:
        """The entry alone: the routing action, or the tokens of the tag, each a decision."""
        return self.write(self._tool_entry(tool).entry)

    def spell(self, tool: str, arguments: Sequence[str]) -> Decisions:
        """A whole call as decisions: the entry, one for each argument, and an exit if required."""
        entry = self._tool_entry(tool)
        taken = list(entry.entry)
        mode = entry.modes[0]
        for i, argument in enumerate(arguments):
            if mode not in entry.modes:
                raise ValueError(
                    f"{tool} with {list(arguments)}: the call is complete before {argument!r}"
                )
            action = self._action_of(entry, mode, argument)
            if action is None:
                raise ValueError(
                    f"{tool} with {list(arguments)}: {argument!r} (number {i}) is not allowed there; "
                    f"allowed: {self._allowed(entry, mode)}"
                )
            taken.append(action)
            mode = self.grammar.step(mode, action)
        if mode in entry.modes:
            due = [action for action in entry.exits if self.space.allows(mode, action)]
            if not due:
                raise ValueError(
                    f"{tool} with {list(arguments)}: the call is not complete; "
                    f"allowed: {self._allowed(entry, mode)}"
                )
            taken.append(due[0])
        return self.write(taken)

    def words(self, tool: str) -> list[int]:
        """The tokens that a policy writes where it refers to this tool."""
        return list(self._tool_entry(tool).words)

    def render(self, tool: str, observation: str) -> str:
        """The observation as it is written after the call."""
        return self._tool_entry(tool).answer.replace("{}", observation)

    def _tool_entry(self, tool: str) -> ToolEntry:
        for entry in self.tool_entries:
            if entry.tool == tool:
                return entry
        hint = nearest(tool, list(self.tools))
        meant = f"did you mean {hint!r}? " if hint else ""
        raise ValueError(f"no tool {tool!r}; {meant}known: {', '.join(self.tools)}")

    def _action_of(self, entry: ToolEntry, mode: int, text: str) -> int | None:
        """The action with this text in this mode."""
        for action, its_text in entry.texts.items():
            if its_text == text.strip() and self.space.allows(mode, action):
                return action
        return None

    def _allowed(self, entry: ToolEntry, mode: int) -> list[str]:
        return [text for action, text in entry.texts.items() if self.space.allows(mode, action)]

    def write(self, taken: Sequence[int]) -> Decisions:
        """These actions, from free text on, with the tokens that each of them writes."""
        done = Decisions([], [], [], LANGUAGE)
        mode = LANGUAGE
        for action in taken:
            written = self.grammar.written(mode, action)
            done.tokens.extend(written)
            done.actions.extend([action, *[NO_ACTION] * (len(written) - 1)])
            done.modes.extend([mode] * len(written))
            mode = self.grammar.step(mode, action)
        return done._replace(mode=mode)


def load_actions(
    source: str,
    tokenizer: Tokenizer,
    tools: Sequence[str] = (),
    vocab_size: int | None = None,
) -> Actions:
    """The actions of a file: a bundled one ("calculator", "sorting", ...) or the path of your own.

    `tools` selects some of its tools. `vocab_size` is the number of the model's rows; rows beyond
    the tokenizer's tokens are never allowed.
    """
    rows = tokenizer.vocab_size if vocab_size is None else vocab_size
    if rows < tokenizer.vocab_size:
        raise ActionsError(
            f"the model has {rows} rows and the tokenizer {tokenizer.vocab_size} tokens; they do "
            f"not belong together"
        )
    plan = ActionPlan(read_listing(source).choose(tools), tokenizer, rows)
    build = build_tags if plan.listing.style == "tags" else build_actions
    entries = build(plan)
    space, grammar = plan.space(), plan.grammar()
    grammar.check(space)
    return Actions(space, grammar, tuple(plan.names), tuple(plan.init_tokens), tuple(entries))
