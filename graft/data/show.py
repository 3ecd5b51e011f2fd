"""A report about a file of rows, as a run would read them; the file may be larger than memory.

chats.jsonl: 1,204 rows, read as sharegpt
    conversations of {from, value}; system, tools (ARPO's supervised data too)
    its rows have: conversations, system
    chats to imitate (sft.data)

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

from graft.data.check import SPARED, Repeats, Verdict, id_of, is_spared, read_row, repeated_id
from graft.data.conversations import messages_in
from graft.data.errors import DataError, RowFault
from graft.data.fields import named_tools, parse_literal
from graft.data.layouts import SAMPLE_ROWS, Purpose, RowLayout, detect_layout
from graft.data.location import local_files, open_location
from graft.data.readers import ChatRow, TaskRow, source_of
from graft.data.rows import scan_rows
from graft.data.tables import name_of
from graft.types import Message

SHOWN_CHARS = 240  # characters of a message
LISTED_SOURCES = 10
RESULT_TAGS = ("<result>", "</result>")
USES = {"task": "tasks (env prompts)", "chat": "chats to imitate (sft.data)"}


class LengthStats:
    """Exact statistics of lengths; small, since few lengths differ.

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
    """The contents of `graft data show`."""

    def __init__(self, source: str, layout: RowLayout, columns: list[str], purpose: str) -> None:
        self.source, self.layout, self.columns, self.purpose = source, layout, columns, purpose
        self.rows = 0
        self.examples: list[tuple[int, list[tuple[str, str]]]] = []
        self.lengths: dict[str, LengthStats] = {}
        self.sources: Counter[str] = Counter()
        self.graded_sources: list[str] = []
        """Data sources with their own grading rule."""
        self.num_with_tools = self.num_with_results = self.unanswered = 0
        self.named_tools: Counter[str] = Counter()
        self.text_columns: Counter[str] = Counter()
        """Columns that hold messages or an object as text, which is parsed."""
        self.verdict = Verdict()
        self.ids, self.prompts = Repeats(), Repeats()
        self.same_prompt: list[tuple[int, int]] = []
        self.broken = ""
        """Why the file could not be read to its end."""

    def add(self, row: Any, examples: int, count_tokens: Callable[[str], int] | None) -> None:
        """Count the next row; the first `examples` good rows are shown."""
        number = self.rows
        found = read_row(self.layout, self.purpose, row, number)
        if isinstance(found, RowFault):
            self.verdict.add(found)
            return
        if (name := id_of(row)) is not None:
            self.ids.add(name, number)
        prompt, response = prompt_and_response(found)
        self.prompts.add(json.dumps(prompt, sort_keys=True, default=str), number)
        is_chat = isinstance(found, ChatRow)
        texts = {
            "prompt": "".join(map(text_of, prompt)),
            "assistant" if is_chat else "answer": response,
        }
        for name, text in texts.items():
            if text:
                self.lengths.setdefault(f"{name}, characters", LengthStats()).add(len(text))
            if text and count_tokens is not None:
                self.lengths.setdefault(f"{name}, tokens", LengthStats()).add(count_tokens(text))
        if source := source_of(row):
            self.sources[source] += 1
        self.unanswered += isinstance(found, TaskRow) and found.answer is None
        self.num_with_tools += bool(found.tools)
        self.named_tools.update(named_tools(row))
        self.text_columns.update(text_columns(row, self.layout.prompt_columns))
        self.num_with_results += is_chat and all(tag in response for tag in RESULT_TAGS)
        if len(self.examples) < examples:
            self.examples.append((number, preview(found)))

    def is_usable(self, skip_bad: bool = False) -> bool:
        """Whether a run with these rows would start."""
        bad = len(self.verdict.bad)
        return not self.broken and is_spared(bad, self.rows, skip_bad or SPARED)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "layout": self.layout.name,
            "columns": self.columns,
            "rows": self.rows,
            "purpose": self.purpose,
            "examples": [
                {"row": row, "text": [{"role": role, "text": text} for role, text in parts]}
                for row, parts in self.examples
            ],
            "lengths": {name: one.to_json() for name, one in self.lengths.items()},
            "data_sources": dict(self.sources.most_common()),
            "graded_by_their_source": self.graded_sources,
            "with_tools": self.num_with_tools,
            "named_tools": dict(self.named_tools),
            "opened": dict(self.text_columns),
            "with_results_inside": self.num_with_results,
            "without_answer": self.unanswered,
            "same_prompt": len(self.same_prompt),
            "bad": len(self.verdict.bad),
            "faults": [fault._asdict() for fault in self.verdict.faults],
            "broken": self.broken,
        }

    def lines(self, skip_bad: bool = False) -> Iterator[str]:
        yield f"{self.source}: {self.rows:,} rows, read as {self.layout.name}"
        yield f"    {self.layout.columns}"
        yield f"    its rows have: {', '.join(self.columns)}"
        other = "task" if self.purpose == "chat" else "chat"
        also = f"; as {USES[other]}: --for {other}" if self.layout.serves(other) else ""
        with_tools = "; with EARL's tools: env earl:rows" if self.graded_sources else ""
        yield f"    {self._use}{also}{with_tools}"
        for row, parts in self.examples:
            yield ""
            yield f"row {row}"
            width = max(len(role) for role, _ in parts)
            for role, text in parts:
                first, *more = text.split("\n")
                yield f"    {role:<{width}}  {first}"
                yield from (f"    {'':<{width}}  {line}" for line in more)
        yield ""
        yield from self._statistics()
        yield from self._faults(skip_bad)

    @property
    def _use(self) -> str:
        is_sorting = self.layout.name == "earl-sorting"
        return "tasks (env earl:rows)" if is_sorting else USES[self.purpose]

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
            most = [f"{name} {count:,}" for name, count in self.sources.most_common(LISTED_SOURCES)]
            more = len(self.sources) - LISTED_SOURCES
            yield f"data sources: {', '.join(most)}" + (f", {more} more" if more > 0 else "")
            if self.layout.name == "earl-sorting":
                yield "graded, without task.reward: by the order that calls of the tools produce"
            elif self.purpose == "task":
                graded = self.graded_sources
                rule = f"{', '.join(graded)} by EARL's rules" if graded else ""
                is_all = len(graded) == len(self.sources)
                last = "" if is_all else "by the last answer, since they have no rule of their own"
                yield f"graded, without task.reward: {'; others '.join(filter(None, (rule, last)))}"
        for name, count in self.text_columns.items():
            yield f"{name}: text in {count:,} rows, parsed as a list or an object"
        if self.num_with_tools:
            yield f"tools: {self.num_with_tools:,} rows have their own"
        if self.named_tools:
            several = ", ".join(f"{name} {count:,}" for name, count in self.named_tools.items())
            yield f"tools by name alone: {several}; the run must provide them (task.wrappers)"
        if self.unanswered:
            yield f"{self.unanswered:,} rows have no answer: your own reward has to grade them"
        if self.num_with_results:
            yield (
                f"tool results inside the assistant's text ({' '.join(RESULT_TAGS)}): "
                f"{self.num_with_results:,} rows; "
                'sft.mask_results=["<result>","</result>"] excludes them from training'
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
            yield "no bad rows" if not self.broken else "no bad rows before that"
            return
        spared = is_spared(count, self.rows, skip_bad or SPARED)
        what = "left out" if spared else "a run stops; skip_bad=true leaves them out"
        yield f"bad rows: {count:,} of {self.rows:,} ({what})"
        for fault in faults:
            yield f"    row {fault.row}, {fault.field or 'the whole row'}: {fault.why}"
        if count > len(faults):
            yield f"    and {count - len(faults):,} more"


def inspect(
    source: str,
    layout: str = "auto",
    purpose: Purpose = "any",
    rows: int = 3,
    count_tokens: Callable[[str], int] | None = None,
) -> DataReport:
    """Report on all rows of a file, folder, SPLIT@PATH or dataset of the hub; rows are not kept.

    Where ids repeat, the rows are read twice: the second time without those rows, as a run leaves them out.
    """
    where, found = scan(source)
    first = list(islice(found, SAMPLE_ROWS))
    chosen = detect_layout(first, where, layout, purpose)
    sample = [row for row in first if isinstance(row, Mapping)]
    columns = [key for row in sample for key, value in row.items() if value is not None]
    named = list(dict.fromkeys(map(str, columns)))
    use = main_purpose(sample, chosen, purpose)

    def read(found: Iterator[Any], repeated: Mapping[int, int]) -> DataReport:
        report = DataReport(where, chosen, named, use)
        try:
            for row in found:
                report.rows += 1
                if report.rows in repeated:
                    report.verdict.add(repeated_id(report.rows, repeated[report.rows]))
                else:
                    report.add(row, rows, count_tokens)
        except DataError as error:  # a broken file: the rows before are still reported
            report.broken = str(error)
        report.same_prompt = report.prompts.repeated()
        return report

    report = read(chain(first, found), {})
    if repeated := dict(report.ids.repeated()):
        # a set of all ids would not fit in memory, so repeated ones are known only now
        del report
        report = read(scan(source)[1], repeated)
    return report


def scan(source: str) -> tuple[str, Iterator[Any]]:
    """The source's name, and every row or the DataError about it."""
    files = local_files(source)
    if files is None:
        table = open_location(source, check=False)
        return table.source, table.scan()
    return name_of(files), (row for file in files for row in scan_rows(file))


def main_purpose(sample: list[Any], layout: RowLayout, purpose: Purpose) -> str:
    """The use of rows that serve as both: chats if any of the first rows is a chat, else tasks."""
    if purpose != "any":
        return purpose
    if layout.chat is None:
        return "task"
    if layout.task is None or any(
        isinstance(read_row(layout, "chat", r, 0), ChatRow) for r in sample
    ):
        return "chat"
    return "task"


def text_columns(row: Mapping[str, Any], prompt_columns: Iterable[str]) -> list[str]:
    """The columns of a row that hold messages or an object as text."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    messages = {*prompt_columns, "messages", "completion"} & texts.keys()
    objects = {"reward_model", "reward_spec", "extra_info", "tools", "conversations"} & texts.keys()
    found = [name for name in objects if parse_literal(texts[name]) is not None]
    found += [name for name in messages if _holds_messages(texts[name])]
    return sorted(found)


def _holds_messages(text: str) -> bool:
    try:
        return messages_in(text) is not None
    except ValueError:
        return False


def prompt_and_response(found: TaskRow | ChatRow) -> tuple[list[Message], str]:
    """The prompt, and the right answer or the text to learn."""
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
    """A message as text: thoughts, content, calls."""
    calls = [json.dumps(call.get("function", call)) for call in message.get("tool_calls") or []]
    texts = (message.get("reasoning_content") or "", message.get("content") or "")
    return "".join([*map(str, texts), *calls])


def preview(found: TaskRow | ChatRow) -> list[tuple[str, str]]:
    """(role, text) of each part of a row, shortened."""
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
            meta = json.dumps(found.meta, ensure_ascii=False, default=str)
            lines.append(("meta", shortened(meta)))
    return [
        (role, "".join(c if c.isprintable() or c == "\n" else "?" for c in text))
        for role, text in lines
    ]


def shortened(text: str) -> str:
    """
    >>> len(shortened("x" * 10_000)) < 300
    True
    """
    if len(text) <= SHOWN_CHARS:
        return text
    half = SHOWN_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
