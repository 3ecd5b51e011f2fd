"""What a run knows of its actions: the table, the grammar, and how a call is read and spelled.

With the bundled "sorting" a policy that draws compare, A, B writes

    " compare"  " A and"  " B"            three decisions; the third completes the call
    read        ("compare", ("A", "B"))   what the environment is asked
    render      ": A < B\\n"               how its answer "A < B" is written behind the call

`spell` is the way back, for teachers: from ("compare", ("A", "B")) to the three decisions.
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
from graft.registry import nearest
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
    """The token whose head row each extra action starts from; None draws one."""
    doors: tuple[ToolEntry, ...]

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(door.tool for door in self.doors)

    def is_free(self, mode: int) -> bool:
        """Whether a mode is free text: 0, and with tags also where part of an entry stands."""
        return not any(mode in door.modes for door in self.doors)

    def read(self, actions: Sequence[int], modes: Sequence[int]) -> tuple[str, tuple[str, ...]]:
        """The call that decisions end with: its tool, and what was said inside.

        Earlier text and calls may stand before it. Blanks and the exit are not said.
        """
        taken = [(m, a) for a, m in zip(actions, modes, strict=True) if a != NO_ACTION]
        if not taken or not self.grammar.is_exit(*taken[-1]):
            raise ValueError("these decisions do not end with the exit of a tool: nothing to read")
        door = next(door for door in self.doors if taken[-1][0] in door.modes)
        said: list[str] = []
        for mode, action in reversed(taken):
            if mode not in door.modes:
                break  # the way in
            said.append(door.texts.get(action, ""))
        return door.tool, tuple(text for text in reversed(said) if text)

    def entry(self, tool: str) -> Decisions:
        """Only the way in: the routing action, or the tokens of the tag, each a decision."""
        return self.write(self._door(tool).entry)

    def spell(self, tool: str, arguments: Sequence[str]) -> Decisions:
        """A whole call as decisions: the way in, one for each argument, an exit if one is due."""
        door = self._door(tool)
        taken = list(door.entry)
        mode = door.modes[0]
        for i, argument in enumerate(arguments):
            if mode not in door.modes:
                raise ValueError(
                    f"{tool} with {list(arguments)}: the call is complete before {argument!r}"
                )
            action = self._said(door, mode, argument)
            if action is None:
                raise ValueError(
                    f"{tool} with {list(arguments)}: {argument!r} (number {i}) cannot stand there; "
                    f"allowed: {self._allowed(door, mode)}"
                )
            taken.append(action)
            mode = self.grammar.step(mode, action)
        if mode in door.modes:
            due = [action for action in door.exits if self.space.allows(mode, action)]
            if not due:
                raise ValueError(
                    f"{tool} with {list(arguments)}: the call is not complete; "
                    f"allowed: {self._allowed(door, mode)}"
                )
            taken.append(due[0])
        return self.write(taken)

    def words(self, tool: str) -> list[int]:
        """The tokens a policy writes where it means this tool."""
        return list(self._door(tool).words)

    def render(self, tool: str, observation: str) -> str:
        """The observation as it is written behind the call."""
        return self._door(tool).answer.replace("{}", observation)

    def _door(self, tool: str) -> ToolEntry:
        for door in self.doors:
            if door.tool == tool:
                return door
        hint = nearest(tool, list(self.tools))
        meant = f"did you mean {hint!r}? " if hint else ""
        raise ValueError(f"no tool {tool!r}; {meant}known: {', '.join(self.tools)}")

    def _said(self, door: ToolEntry, mode: int, text: str) -> int | None:
        """The action that says `text` in this mode."""
        for action, said in door.texts.items():
            if said == text.strip() and self.space.allows(mode, action):
                return action
        return None

    def _allowed(self, door: ToolEntry, mode: int) -> list[str]:
        return [said for action, said in door.texts.items() if self.space.allows(mode, action)]

    def write(self, taken: Sequence[int]) -> Decisions:
        """Decisions from free text on, with the tokens that each of them writes."""
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
    """The actions of a file: a bundled one ("calculator", "sorting", ...) or the path of one's own.

    `tools` picks some of its tools. `vocab_size` is the number of the model's rows; those beyond
    the tokenizer's tokens are allowed nowhere.
    """
    rows = tokenizer.vocab_size if vocab_size is None else vocab_size
    if rows < tokenizer.vocab_size:
        raise ActionsError(
            f"the model has {rows} rows and the tokenizer {tokenizer.vocab_size} tokens; they do "
            f"not belong together"
        )
    plan = ActionPlan(read_listing(source).choose(tools), tokenizer, rows)
    build = build_tags if plan.listing.style == "tags" else build_actions
    doors = build(plan)
    space, grammar = plan.space(), plan.grammar()
    grammar.check(space)
    return Actions(space, grammar, tuple(plan.names), tuple(plan.init_tokens), tuple(doors))
