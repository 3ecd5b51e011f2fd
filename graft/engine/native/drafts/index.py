"""Finds where the last tokens of a text were written before, in the texts of its task.

    written before   5 6 7 8 9 1 2        now   4 5 6 7     a match of 3 tokens; the draft is 8 9 1 2

The texts of a task are those of the contexts that began with the same prompt, their common stems, and the
attempts at it under the weights before these. Only what a context has beyond its stem is its own text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from graft.engine.native.kv.sequences import Sequence

MIN_MATCH, MAX_MATCH = 3, 12
"""Tokens that must agree before a draft, and those that are compared."""
MAX_PLACES = 8
"""Places of the same MIN_MATCH tokens that are compared: the latest ones."""
MAX_INDEXED = 1 << 18
"""Tokens of all indices together; each takes about 300 bytes."""
MAX_STORED = 1 << 22
"""Tokens of earlier attempts that wait for their task, 4 bytes each; and those of a single task:"""
MAX_STORED_OF_TASK = 1 << 14
IDLE_ROUNDS = 256
"""Rounds of proposals after which a task that took no part may be stored."""


class DraftSource(StrEnum):
    """Whose text a draft is copied from."""

    OWN = "own"
    """The context's, prompts and quoted tool results included."""
    SIBLINGS = "siblings"
    """Another context's that began with the same prompt."""
    EARLIER = "earlier"
    """An attempt's under earlier weights."""


@dataclass(slots=True, eq=False)
class Text:
    """Tokens of a context or of an earlier attempt; `start` is where its own part begins."""

    tokens: MutableSequence[int]
    start: int = 0
    is_earlier: bool = False
    indexed: int = 0
    """Tokens whose places are known."""
    trials: float = 0.0
    accepted: float = 0.0
    """Of the drafts for it, lately."""


class TextMatch(NamedTuple):
    """`length` tokens before `end` of a text are the last ones of another, or of itself."""

    text: Text
    end: int
    length: int


class TaskTexts:
    """The texts of one task, and the places of every MIN_MATCH neighbours in them."""

    def __init__(self, version: int, began: int = 0, limit: int = MAX_INDEXED) -> None:
        self.version, self.began, self.last_used = version, began, began
        self.size, self.limit = 0, limit
        self.texts: dict[Sequence, Text] = {}
        self._places: dict[tuple[int, ...], list[tuple[Text, int]]] = {}

    def follow(self, sequence: Sequence) -> Text:
        """The text of a sequence, indexed as far as it is written now."""
        text = self.texts.get(sequence)
        if text is None:
            stem = sequence.stem
            if stem is not None and stem not in self.texts:
                self.follow(stem)
            start = 0 if stem is None else len(stem.tokens)
            text = self.texts[sequence] = Text(sequence.tokens, start)
        self.index(text)
        return text

    def index(self, text: Text) -> None:
        """Add the places of new tokens, the last one's too: what follows it is written later. Tokens beyond
        the limit have no places."""
        tokens, places = text.tokens, self._places
        stop = len(tokens)
        first = max(text.indexed, text.start, MIN_MATCH - 1)
        if first >= stop or self.size + stop - first > self.limit:
            return
        window = tuple(tokens[first + 1 - MIN_MATCH : first])
        for end in range(first + 1, stop + 1):
            window = (*window, tokens[end - 1])
            known = places.get(window)
            if known is None:
                places[window] = [(text, end)]
            else:
                known.append((text, end))
                if len(known) > MAX_PLACES:
                    del known[0]
            window = window[1:]
        self.size += stop - first
        text.indexed = stop

    def find(self, tokens: list[int]) -> TextMatch | None:
        """The longest match of the last tokens, of equal ones the latest."""
        suffix = tokens[-MAX_MATCH:]
        best: TextMatch | None = None
        for text, end in reversed(self._places.get(tuple(suffix[-MIN_MATCH:]), ())):
            others = text.tokens
            if end >= len(others):  # nothing follows: the tokens themselves, or a text that was cut
                continue
            length = _common(others, end, suffix)
            if length >= MIN_MATCH and (best is None or length > best.length):
                best = TextMatch(text, end, length)
                if length == MAX_MATCH:
                    break
        return best

    def source(self, text: Text, sequence: Sequence) -> DraftSource:
        """Whose text it is for this sequence."""
        if text.is_earlier:
            return DraftSource.EARLIER
        node: Sequence | None = sequence
        while node is not None:
            if self.texts.get(node) is text:
                return DraftSource.OWN
            node = node.stem
        return DraftSource.SIBLINGS


def _common(others: MutableSequence[int], end: int, suffix: list[int]) -> int:
    """How many tokens before `end` are the last ones of `suffix`."""
    length = 0
    limit = min(len(suffix), end)
    while length < limit and others[end - 1 - length] == suffix[-1 - length]:
        length += 1
    return length


def following(tokens: list[int], match: TextMatch, count: int) -> list[int]:
    """Up to `count` tokens that followed the match; a text that repeats itself goes on repeating.

    tokens 1 2 3 1 2 3, match of 3 at 3, count 5: 1 2 3 1 2
    """
    draft = list(match.text.tokens[match.end : match.end + count])
    if match.text.tokens is tokens:
        period = len(tokens) - match.end
        while len(draft) < count:
            draft.append(draft[-period])
    return draft


@dataclass
class TextStore:
    """The texts of all tasks, by a key of their prompts, in bounded memory.

    Tasks that took no part for long are stored without an index, and indexed again when they return.
    """

    max_indexed: int = MAX_INDEXED
    max_stored: int = MAX_STORED
    size: int = 0
    """Tokens of all indices."""
    num_stored: int = 0
    _round: int = 0
    _tasks: OrderedDict[int, TaskTexts] = field(default_factory=OrderedDict[int, TaskTexts])
    _stored: OrderedDict[int, list[array[int]]] = field(
        default_factory=OrderedDict[int, "list[array[int]]"]
    )

    def begin_round(self) -> None:
        """Proposals for one step follow."""
        self._round += 1

    def follow(self, key: int, sequence: Sequence, version: int) -> tuple[TaskTexts, Text]:
        """The texts of a task, its indices brought up to date with the sequence, and the sequence's."""
        if self.size > self.max_indexed * 3 // 4:
            self._store_stale()
        task = self._tasks.get(key)
        if (
            task is not None and version > task.version
        ):  # its texts are earlier attempts from now on
            self._store(key)
            task = None
        if task is None:
            task = self._tasks[key] = TaskTexts(version, self._round)
        elif task.last_used < self._round:
            task.last_used = self._round
            self._tasks.move_to_end(key)
        before = task.size
        task.limit = before + self.max_indexed - self.size
        for tokens in self._take(key):
            task.index(Text(tokens, is_earlier=True))
        text = task.follow(sequence)
        self.size += task.size - before
        return task, text

    def _store_stale(self) -> None:
        """Store the task that took no part for longest; or that is there for long: most of its contexts may
        be closed."""
        key, task = next(iter(self._tasks.items()))
        if min(task.last_used, task.began) < self._round - IDLE_ROUNDS:
            self._store(key)

    def _store(self, key: int) -> None:
        task = self._tasks.pop(key)
        self.size -= task.size
        texts, room = [], MAX_STORED_OF_TASK
        for text in reversed(task.texts.values()):  # the latest first
            tokens = array("i", text.tokens[text.start :])
            if MIN_MATCH < len(tokens) <= room:
                texts.append(tokens)
                room -= len(tokens)
        self._stored[key] = texts
        self.num_stored += MAX_STORED_OF_TASK - room
        while self.num_stored > self.max_stored:
            self._take(next(iter(self._stored)))

    def _take(self, key: int) -> list[array[int]]:
        texts = self._stored.pop(key, [])
        self.num_stored -= sum(map(len, texts))
        return texts
