"""What a run would see in a file of rows: read from front to back, whatever its size.

chats.jsonl: 1,204 rows, read as sharegpt
    conversations of {from, value}; system, tools (ARPO's supervised data too)
    its rows have: conversations, system
    to imitate (sft.data)

row 1
    user         Where is the Louvre?
    assistant    <think>I know it.</think><answer>Paris</answer>
...
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from graft.data.check import SPARED, Repeats, Verdict, fault_of, id_of, is_spared, same_id
from graft.data.conversations import messages_in
from graft.data.errors import DataError
from graft.data.fields import literal_in, named_tools
from graft.data.location import local_files, open_place
from graft.data.rows import rows_in
from graft.data.schemas import LOOKED_AT, ChatRow, Purpose, RowLayout, TaskRow, recognise, source_of
from graft.data.tables import name_of
from graft.types import Message

SHOWN = 240  # characters of a message
SOURCES = 10  # data sources that are listed
MARKS = ("<result>", "</result>")
USES = {"task": "to try (env prompts)", "chat": "to imitate (sft.data)"}


class LengthStats:
    """How long texts are: exact, and small, since few lengths differ.

    3, 3, 4, 10: shortest 3, median 3, mean 5, 95% at most 10, longest 10
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, length: int) -> None:
        self.counts[length] += 1

    def at_most(self, share: float) -> int:
        """The length that this share of the texts does not exceed."""
        left = share * self.counts.total()
        for length in sorted(self.counts):
            left -= self.counts[length]
            if left <= 0:
                return length
        return max(self.counts)

    def to_json(self) -> dict[str, float]:
        total = sum(length * times for length, times in self.counts.items())
        return {
            "min": min(self.counts),
            "median": self.at_most(0.5),
            "mean": total / self.counts.total(),
            "p95": self.at_most(0.95),
            "max": max(self.counts),
        }


class DataReport:
    """Everything that `graft data show` prints."""

    def __init__(self, source: str, layout: RowLayout, columns: list[str], purpose: str) -> None:
        self.source, self.layout, self.columns, self.purpose = source, layout, columns, purpose
        self.rows = 0
        self.examples: list[tuple[int, list[tuple[str, str]]]] = []
        self.lengths: dict[str, LengthStats] = {}
        self.sources: Counter[str] = Counter()
        self.ruled: list[str] = []
        """Data sources that are graded by a rule of their own."""
        self.tools = self.marked = self.unanswered = 0
        self.named_tools: Counter[str] = Counter()
        self.opened: Counter[str] = Counter()
        """Columns that are JSON text, or a list of pairs, and are read as what they say."""
        self.verdict = Verdict()
        self.same_prompt: list[tuple[int, int]] = []
        self.broken = ""
        """Why the file could not be read to its end."""

    @property
    def bad(self) -> int:
        return len(self.verdict.bad) + bool(self.broken)

    def is_usable(self, skip_bad: bool = False) -> bool:
        """Whether a run with these rows would start."""
        bad = len(self.verdict.bad)
        return not self.broken and is_spared(bad, self.rows, skip_bad or SPARED)

    def measure(self, name: str, length: int) -> None:
        self.lengths.setdefault(name, LengthStats()).add(length)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "layout": self.layout.name,
            "columns": self.columns,
            "rows": self.rows,
            "purpose": self.purpose,
            "examples": [{"row": row, "text": dict_of(text)} for row, text in self.examples],
            "lengths": {name: one.to_json() for name, one in self.lengths.items()},
            "data_sources": dict(self.sources.most_common()),
            "graded_by_their_source": self.ruled,
            "with_tools": self.tools,
            "named_tools": dict(self.named_tools),
            "opened": dict(self.opened),
            "with_results_inside": self.marked,
            "without_answer": self.unanswered,
            "same_prompt": len(self.same_prompt),
            "bad": len(self.verdict.bad),
            "faults": [fault._asdict() for fault in self.verdict.faults],
            "broken": self.broken,
        }

    def lines(self, skip_bad: bool = False) -> Iterator[str]:
        yield f"{self.source}: {self.rows:,} rows, read as {self.layout.name}"
        yield f"    {self.layout.says}"
        yield f"    its rows have: {', '.join(self.columns)}"
        yield f"    {USES[self.purpose]}{self._otherwise()}"
        for row, text in self.examples:
            yield ""
            yield f"row {row}"
            width = max(len(who) for who, _ in text)
            for who, said in text:
                first, *more = said.split("\n")
                yield f"    {who:<{width}}  {first}"
                yield from (f"    {'':<{width}}  {line}" for line in more)
        yield ""
        yield from self._statistics()
        yield from self._faults(skip_bad)

    def _otherwise(self) -> str:
        other = "task" if self.purpose == "chat" else "chat"
        return f"; as something {USES[other]}: --for {other}" if self.layout.can(other) else ""

    def _statistics(self) -> Iterator[str]:
        heads = ("shortest", "median", "mean", "95% within", "longest")
        width = max((len(name) for name in self.lengths), default=0)
        if self.lengths:
            yield f"{'':<{width}}  " + " ".join(f"{head:>11}" for head in heads)
        for name, lengths in self.lengths.items():
            yield f"{name:<{width}}  " + " ".join(
                f"{n:>11,.0f}" for n in lengths.to_json().values()
            )
        if self.sources:
            most = [f"{name} {count:,}" for name, count in self.sources.most_common(SOURCES)]
            more = len(self.sources) - SOURCES
            yield f"data sources: {', '.join(most)}" + (f", {more} more" if more > 0 else "")
            if self.purpose == "task":
                rule = f"{', '.join(self.ruled)} by EARL's rules" if self.ruled else ""
                is_all = len(self.ruled) == len(self.sources)
                last = "" if is_all else "by the last answer, since no rule of their own is known"
                yield f"graded, without task.reward: {'; others '.join(filter(None, (rule, last)))}"
        for name, count in self.opened.items():
            yield f"{name}: text in {count:,} rows, read as the list or object that it is"
        if self.tools:
            yield f"tools: {self.tools:,} rows bring their own"
        if self.named_tools:
            several = ", ".join(f"{name} {count:,}" for name, count in self.named_tools.items())
            yield f"tools by name alone: {several}; the run must bring them (task.wrappers)"
        if self.unanswered:
            yield f"{self.unanswered:,} rows have no answer: a reward from outside has to grade them"
        if self.marked:
            yield (
                f"tool results inside the assistant's words ({' '.join(MARKS)}): {self.marked:,} rows; "
                'sft.mask_results=["<result>","</result>"] keeps them from being trained'
            )
        if self.same_prompt:
            row, first = self.same_prompt[0]
            count = len(self.same_prompt)
            yield f"same prompt: {count:,} rows repeat an earlier one (row {row} that of row {first}, ...)"

    def _faults(self, skip_bad: bool) -> Iterator[str]:
        faults, count = self.verdict.faults, len(self.verdict.bad)
        if self.broken:
            yield f"not read to the end: {self.broken}"
        if not count:
            yield "no bad rows" if not self.broken else "no bad rows until there"
            return
        spared = is_spared(count, self.rows, skip_bad or SPARED)
        what = "left out" if spared else "a run stops there; skip_bad=true leaves them out"
        yield f"bad rows: {count:,} of {self.rows:,} ({what})"
        for fault in faults:
            yield f"    row {fault.row}, {fault.field or 'the whole of it'}: {fault.why}"
        if count > len(faults):
            yield f"    and {count - len(faults):,} more"


def dict_of(text: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": who, "text": said} for who, said in text]


def inspect(
    source: str,
    layout: str = "auto",
    purpose: Purpose = "any",
    rows: int = 3,
    count_tokens: Callable[[str], int] | None = None,
) -> DataReport:
    """Read all rows of a file, folder, SPLIT@PATH or dataset of the hub; nothing of them is kept.

    Where ids repeat they are read twice: the second time without those rows, which a run leaves out too.
    """
    where, found = scan(source)
    first = list(islice(found, LOOKED_AT))
    chosen = recognise(first, where, layout, purpose)
    sample = [row for row in first if isinstance(row, Mapping)]
    columns = [key for row in sample for key, value in row.items() if value is not None]
    named = list(dict.fromkeys(map(str, columns)))
    use = main_purpose(sample, chosen, purpose)

    def told(found: Iterator[Any], repeated: Mapping[int, int]) -> tuple[DataReport, Repeats]:
        report = DataReport(where, chosen, named, use)
        ids, prompts = Repeats(), Repeats()
        try:
            for row in found:
                report.rows += 1
                if report.rows in repeated:
                    report.verdict.add(same_id(report.rows, repeated[report.rows]))
                else:
                    _take(report, row, rows, ids, prompts, count_tokens)
        except DataError as error:  # a broken file: what was read until there is still told
            report.broken = str(error)
        report.same_prompt = prompts.repeated()
        return report, ids

    report, ids = told(chain(first, found), {})
    if repeated := dict(ids.repeated()):
        # known only now, since a set of all ids would not fit: read again, without those rows
        del ids
        report, _ = told(scan(source)[1], repeated)
    return report


def scan(source: str) -> tuple[str, Iterator[Any]]:
    """A name for the rows, and the rows, or the DataError that each of them is."""
    files = local_files(source)
    if files is None:
        table = open_place(source, check=False)
        return table.source, table.scan()
    return name_of(files), (row for file in files for _, row in rows_in(file))


def main_purpose(sample: list[Any], layout: RowLayout, purpose: Purpose) -> str:
    """What rows that serve for both are there for: to be imitated, if any of the first ones can be."""
    if purpose != "any":
        return purpose
    if layout.chat is None:
        return "task"
    is_chat = layout.task is None or any(
        isinstance(read(layout.chat, row), ChatRow) for row in sample
    )
    return "chat" if is_chat else "task"


def read(reader: Callable[[Any], Any], row: Any) -> Any:
    """What a reader makes of a row, or the error."""
    try:
        return reader(row)
    except ValueError as error:
        return error


def _take(
    report: DataReport,
    row: Any,
    wanted: int,
    ids: Repeats,
    prompts: Repeats,
    count_tokens: Callable[[str], int] | None,
) -> None:
    number, layout = report.rows, report.layout
    if isinstance(row, DataError):
        report.verdict.add(fault_of(row, number, layout))
        return
    reader = layout.chat if report.purpose == "chat" else layout.task
    assert reader is not None, f"layout {layout.name} was recognised for something else"
    found = read(reader, row)
    if isinstance(found, ValueError):
        report.verdict.add(fault_of(found, number, layout))
        return
    if (name := id_of(row)) is not None:
        ids.add(name, number)
    asked, said = parted(found)
    prompts.add(json.dumps(asked, sort_keys=True, default=str), number)
    said_by = "assistant" if isinstance(found, ChatRow) else "answer"
    for name, text in (("prompt", "".join(map(text_of, asked))), (said_by, said)):
        if text:
            report.measure(f"{name}, characters", len(text))
            if count_tokens is not None:
                report.measure(f"{name}, tokens", count_tokens(text))
    if source := source_of(row):
        report.sources[source] += 1
    report.unanswered += isinstance(found, TaskRow) and found.answer is None
    report.tools += bool(found.tools)
    report.named_tools.update(named_tools(row))
    report.opened.update(opened_columns(row, layout.asks))
    report.marked += isinstance(found, ChatRow) and all(mark in said for mark in MARKS)
    if len(report.examples) < wanted:
        report.examples.append((number, written(found)))


def opened_columns(row: Mapping[str, Any], asks: Iterable[str]) -> list[str]:
    """The columns of a row that hold messages or an object as text."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    messages = {*asks, "messages", "completion"} & texts.keys()
    objects = {"reward_model", "reward_spec", "extra_info", "tools", "conversations"} & texts.keys()
    found = [name for name in objects if literal_in(texts[name]) is not None]
    found += [name for name in messages if isinstance(read(messages_in, texts[name]), list)]
    return sorted(found)


def parted(found: TaskRow | ChatRow) -> tuple[list[Message], str]:
    """What is asked, and what is learned or right."""
    if isinstance(found, TaskRow):
        answer = found.answer
        text = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer)
        return found.messages, text
    if found.spans is not None:
        own = [str(span.get("text", "")) for span in found.spans if span["author"] == "policy"]
        return found.messages, "".join(own)
    turns = [n for n, one in enumerate(found.messages) if one["role"] == "assistant"]
    return found.messages[: turns[0]], "".join(text_of(found.messages[n]) for n in turns)


def text_of(message: Message) -> str:
    """A message's words: thoughts, content, calls."""
    calls = [json.dumps(call.get("function", call)) for call in message.get("tool_calls") or []]
    said = (message.get("reasoning_content") or "", message.get("content") or "")
    return "".join([*map(str, said), *calls])


def written(found: TaskRow | ChatRow) -> list[tuple[str, str]]:
    """A row for the eye: who says what, shortened."""
    lines = [(str(one["role"]), shortened(text_of(one))) for one in found.messages]
    if isinstance(found, ChatRow):
        for span in found.spans or []:
            lines.append((span["author"], shortened(str(span.get("text") or span.get("call")))))
    if found.tools:
        lines.append(("tools", ", ".join(tool["function"]["name"] for tool in found.tools)))
    if isinstance(found, TaskRow):
        lines.append(("answer", shortened(json.dumps(found.answer, ensure_ascii=False))))
        if found.data_source:
            lines.append(("data source", found.data_source))
        if found.meta:
            lines.append(
                ("meta", shortened(json.dumps(found.meta, ensure_ascii=False, default=str)))
            )
    return [
        (who, "".join(c if c.isprintable() or c == "\n" else "?" for c in s)) for who, s in lines
    ]


def shortened(text: str) -> str:
    """
    >>> len(shortened("x" * 10_000)) < 300
    True
    """
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
