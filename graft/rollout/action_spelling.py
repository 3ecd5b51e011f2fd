"""Find calls in a recorded text and spell them as the actions of a run.

Data for EARL has its calls as text: the descriptions of the actions, or tags. With the bundled "sorting"
the text

    "I look. compare A and B: A > B\\nSo swap A and B => B, A\\nDone."

is the plain text "I look.", the decisions compare, A, B, the answer ": A > B\\n" (not a decision), the
plain text "So", the decisions swap, A, B, the answer " => B, A\\n", and the plain text "Done.".

A call is an entry, what the tool's syntax allows, and its answer; anything less is plain text: "I compare
A and B." is no call. With tags the closing tag alone completes a call, and its answer, which the
environment writes, lies between two marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from graft.actions.actions import Actions, Decisions
from graft.actions.build import LANGUAGE, ToolEntry
from graft.text.marks import between
from graft.text.tokenizer import FastTokenizer

Marks = tuple[str, str]
"""What opens and what closes a result in a text."""


class CallPart(NamedTuple):
    """Part of a text: plain text, the text of a call with its decisions, or the answer to one."""

    text: str
    call: Decisions | None = None
    is_answer: bool = False


class _Spelling(NamedTuple):
    """One way to write the entry of a tool."""

    text: str
    taken: tuple[int, ...]
    tool: ToolEntry


class ActionSpeller:
    """Finds the calls of one set of actions in texts."""

    def __init__(
        self, actions: Actions, tokenizer: FastTokenizer, marks: Marks | None = None
    ) -> None:
        self.actions, self.tokenizer, self.marks = actions, tokenizer, marks
        ways = [way for tool in actions.tool_entries for way in self._ways(tool)]
        self.ways = sorted(ways, key=lambda way: -len(way.text))  # the longest reading first
        self._entry = re.compile("|".join(re.escape(way.text) for way in self.ways))
        self._writes = lru_cache(maxsize=None)(self._text_of)

    def parts(self, text: str, is_answered: bool = False) -> list[CallPart]:
        """The text in parts. `is_answered`: the answer to a call at the end of the text is elsewhere."""
        found: list[CallPart] = []
        begin = at = 0
        while (entry := self._entry.search(text, at)) is not None:
            at = entry.start()
            read = self._call(text, at, is_answered)
            if read is None:
                at += 1
                continue
            call, end, answer_end = read
            found.append(CallPart(text[begin:at]))
            found.append(CallPart(text[at:end], call=call))
            found.append(CallPart(text[end:answer_end], is_answer=True))
            begin = at = answer_end
        found.append(CallPart(text[begin:]))
        return [part for part in found if part.text]

    def _ways(self, tool: ToolEntry) -> Iterator[_Spelling]:
        """The entry, and without its blank where that enters the tool too."""
        written = "".join(
            self.tokenizer.decode_after(self.actions.grammar.written(LANGUAGE, action))
            for action in tool.entry
        )
        yield _Spelling(written, tuple(tool.entry), tool)
        bare = written.lstrip()
        if bare and bare != written and not self.actions.space.extra:
            tokens = self.tokenizer.encode_after(bare)
            mode = LANGUAGE
            for token in tokens:
                mode = self.actions.grammar.step(mode, token)
            if mode == tool.modes[0]:
                yield _Spelling(bare, tuple(tokens), tool)

    def _call(self, text: str, at: int, is_answered: bool) -> tuple[Decisions, int, int] | None:
        """The call that begins here, where it ends, and where its answer does."""
        for way in self.ways:
            if not text.startswith(way.text, at):
                continue
            read = self._inside(way.tool, text, at + len(way.text))
            if read is None:
                continue
            taken, end = read
            answer_end = self._answer_end(way.tool, text, end)
            if answer_end is None and is_answered and end == len(text):
                answer_end = end
            if answer_end is not None:
                return self.actions.write([*way.taken, *taken]), end, answer_end
        return None

    def _inside(self, tool: ToolEntry, text: str, at: int) -> tuple[list[int], int] | None:
        """The decisions from the first mode of a tool to its exit that write the text from `at`."""
        grammar = self.actions.grammar
        seen: set[tuple[int, int]] = set()
        ways: list[tuple[int, int, tuple[int, ...]]] = [(tool.modes[0], at, ())]
        while ways:
            mode, at, taken = ways.pop()
            if (mode, at) in seen:
                continue
            seen.add((mode, at))
            for action in (*tool.exits, *tool.texts):
                if not self.actions.space.allows(mode, action):
                    continue
                written = self._writes(mode, action)
                if not written or not text.startswith(written, at):
                    continue
                if grammar.is_exit(mode, action):
                    return [*taken, action], at + len(written)
                following = grammar.step(mode, action)
                ways.append((following, at + len(written), (*taken, action)))
        return None

    def _answer_end(self, tool: ToolEntry, text: str, at: int) -> int | None:
        """The position after the answer that begins here; None if the call has none and needs one."""
        before, _, after = tool.answer.partition("{}")
        if before or after:
            if not text.startswith(before, at) or not after:
                return None
            end = text.find(after, at + len(before))
            return None if end < 0 else end + len(after)
        if self.marks is not None:
            opening = len(text) - len(text[at:].lstrip())
            if text.startswith(self.marks[0], opening):
                return between(text[opening:], *self.marks)[0][1] + opening
        return None if self.actions.space.extra else at

    def _text_of(self, mode: int, action: int) -> str:
        return self.tokenizer.decode_after(self.actions.grammar.written(mode, action))
