"""What rows ask, compared by content: whatever file, layout or wording around it a question comes in.

    {"question": "Who wrote Emma, and when?", "answer": "Jane Austen, in 1815"}
    {"messages": [{"role": "user", "content": "Think first. Who wrote  Emma, and when"}, ...]}

ask the same. Case, blanks and punctuation at the end of words do not count, nor do sentences that most
rows of a set repeat, such as a request for a format. A question is also found inside a longer text, if it
begins where a sentence or a line does.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from graft.data.conversations import SPEAKERS, messages_in, unwrapped
from graft.data.fields import value_at
from graft.data.pictures import COLUMNS, is_picture
from graft.data.readers import NUMBERS, QUESTIONS

ANCHOR = 8
"""Words by which a longer text is looked up before all of it is compared."""
FEWEST_INSIDE = 3
"""Words of the shortest question that is looked for inside other texts; a shorter one must be all of one."""
MAX_ALIKE = 32
"""Texts that begin alike: more of them are compared as a whole only, since their beginning says nothing."""
MAX_CHARACTERS = 20_000
"""Of one text; the rest is not compared."""
SAMPLE = 200
"""Rows from which the sentences that most rows repeat are known."""

_KNOWN = ("prompt", "messages", "conversations", *QUESTIONS)
_INNER = tuple(f"extra_info.{name}" for name in QUESTIONS)
_BREAK = re.compile(r"(?<=[.:?!])\s+|<[^<>\n]{1,40}>")
_QUOTES = str.maketrans("", "", "\"'`*“”‘’")
_TRAILING = re.compile(r"[.,;:?]+(?=\s|$)")

Sentence = tuple[str, ...]
Line = list[Sentence]


def texts_of(row: Any, columns: Sequence[str] = ()) -> list[str]:
    """The texts by which a row can be known: its questions and what its users write; none with a picture.

    columns   further ones that hold the question
    """
    if not isinstance(row, Mapping) or any(
        is_picture(row[name]) for name in COLUMNS if name in row
    ):
        return []
    named = [value_at(row, name) for name in columns if name not in _KNOWN]
    listed = [row[name] for name in _KNOWN if name in row]
    inner = [value_at(row, name) for name in _INNER] if "extra_info" in row else []
    texts = [text for value in (*listed, *named, *inner) for text in _written(value)]
    if "instruction" in row:
        parts = [row.get(name) for name in ("instruction", "input")]
        texts.append("\n".join(part for part in parts if isinstance(part, str)))
    if "target" in row:
        numbers = [row.get(name) for name in (*NUMBERS, "target")]
        texts.append(" ".join(str(unwrapped(one)) for one in numbers if one is not None))
    # EARL's rows of hidden items share their prompts
    if inner and (hidden := value_at(row, "extra_info.interaction_kwargs")) is not None:
        texts = [str(hidden)]
    return list(dict.fromkeys(text for text in texts if text.strip()))


def _written(value: Any) -> Iterator[str]:
    """A text, or the texts of the users in a list of messages in either form."""
    value = unwrapped(value)
    if isinstance(value, str):
        try:
            listed = messages_in(value)
        except ValueError:
            listed = None
        if listed is None:
            yield value
            return
        value = listed
    for message in value if isinstance(value, list | tuple) else ():
        if not isinstance(message, Mapping):
            continue
        speaker = SPEAKERS.get(str(message.get("role") or message.get("from")))
        content = unwrapped(message.get("content") or message.get("value"))
        if speaker != "user":
            continue
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield "".join(
                str(part.get("text") or "") for part in content if isinstance(part, Mapping)
            )


def lines_of(text: str) -> list[Line]:
    """The words of a text by line and sentence, as they are compared."""
    text = text[:MAX_CHARACTERS]
    text = (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold()
    lines: list[Line] = []
    for line in text.translate(_QUOTES).splitlines():
        sentences = (_TRAILING.sub("", part).split() for part in _BREAK.split(line))
        if kept := [tuple(words) for words in sentences if words]:
            lines.append(kept)
    return lines


def repeated(rows: Iterable[Sequence[str]]) -> frozenset[Sentence]:
    """The sentences that more than half of these rows have in their texts; of fewer than four rows none."""
    counts: Counter[Sentence] = Counter()
    total = 0
    for texts in rows:
        lines = (line for text in texts for line in lines_of(text))
        counts.update({sentence for line in lines for sentence in line})
        total += 1
    return frozenset(one for one, count in counts.items() if total >= 4 and 2 * count > total)


class AskedText(NamedTuple):
    """One text in words, without the sentences that its set repeats."""

    words: Sentence
    starts: list[tuple[int, int, int]]
    """Of each sentence: where it starts, where it ends, where its line ends."""

    @classmethod
    def of(cls, text: str, without: frozenset[Sentence] = frozenset()) -> AskedText:
        words: list[str] = []
        starts: list[tuple[int, int, int]] = []
        for line in lines_of(text):
            kept = [sentence for sentence in line if sentence not in without]
            end = len(words) + sum(map(len, kept))
            for sentence in kept:
                starts.append((len(words), len(words) + len(sentence), end))
                words.extend(sentence)
        return cls(tuple(words), starts)

    @property
    def anchor(self) -> Sentence:
        return self.words[:ANCHOR]

    def inside(self) -> Iterator[tuple[Sentence, int]]:
        """Every place where another text may begin: its first words, and where they are."""
        for start, end, line_end in self.starts:
            if start + ANCHOR <= len(self.words):
                yield self.words[start : start + ANCHOR], start
            for stop in {end, line_end}:
                if FEWEST_INSIDE <= stop - start < ANCHOR:
                    yield self.words[start:stop], start

    def has(self, other: AskedText, start: int) -> bool:
        return self.words[start : start + len(other.words)] == other.words


class AskedRows:
    """Rows to be found again among others.

    >>> rows = AskedRows([["What is 2 + 3?"], ["Who wrote Emma?"]])
    >>> rows.find([AskedText.of("Answer in one word: who wrote  emma")])
    {1}
    """

    def __init__(self, rows: Sequence[Sequence[str]]) -> None:
        without = repeated(rows[:SAMPLE])
        self._whole: dict[Sentence, set[int]] = defaultdict(set)
        self._anchors: dict[Sentence, list[AskedText]] = defaultdict(list)
        self._inside: dict[Sentence, list[tuple[AskedText, int]]] = defaultdict(list)
        for row, texts in enumerate(rows):
            for text in texts:
                asked = AskedText.of(text, without)
                if not asked.words:
                    continue  # most rows ask this: it tells none of them from another
                if asked.words not in self._whole:
                    self._anchors[asked.anchor].append(asked)
                    for words, start in asked.inside():
                        self._inside[words].append((asked, start))
                self._whole[asked.words].add(row)
        for table in (self._anchors, self._inside):
            for words in [words for words, alike in table.items() if len(alike) > MAX_ALIKE]:
                del table[words]

    def find(self, texts: Iterable[AskedText]) -> set[int]:
        """The rows that a row with these texts repeats."""
        found: set[int] = set()
        for text in texts:
            found |= self._whole.get(text.words, set())
            if len(text.words) >= FEWEST_INSIDE:
                for other, start in self._inside.get(text.anchor, ()):
                    # one sentence of a longer question is not that question
                    if 2 * len(text.words) >= len(other.words) and other.has(text, start):
                        found |= self._whole[other.words]
            for words, start in text.inside():
                for other in self._anchors.get(words, ()):
                    if text.has(other, start):
                        found |= self._whole[other.words]
        return found
