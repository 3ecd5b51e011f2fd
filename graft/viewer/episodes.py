"""An index of a file of episodes that is not read into memory: offset and summary of each line.

A line is {"task": {...}, "spans": [... up to megabytes of numbers ...], "leaves": [...]}. The
columns of a table of tasks are at its two ends, so the middle is not parsed, only searched for the
beginnings of the policy's tokens:

    {"task": {"id": "7", ...}, "spans": [{"parent": 0, "author": "policy", "tokens": [4, 4, 9], ...
    ^ parsed                                                                ^ two commas: 3 tokens
    ... "info": {}}], "leaves": [{"tips": [1], "reward": 1.0, "status": "done", ...}]}
                       ^ parsed

A quote inside of a JSON string has a backslash before it, so none of these marks can be part of a text.
A file of 6 GB is indexed in seconds, a part of it in every request that asks before it is complete.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

PROMPT = 200
"""Characters of the prompt that a table shows."""
SPANS, LEAVES = b', "spans": [', b'], "leaves": ['
POLICY = b'"author": "policy", "tokens": ['


@dataclass(slots=True)
class Glance:
    """One task of a step: the offset of its line, and its row of the table."""

    line: int
    offset: int
    length: int
    task: str = ""
    env: str = ""
    prompt: str = ""
    attempts: int = 0
    reward: float | None = None
    best: float | None = None
    spread: float | None = None
    """Standard deviation of the attempts' rewards; with 0 there is no advantage to learn from."""
    tokens: float = 0.0
    """The policy's tokens per attempt; shared spans count once."""
    turns: float = 0.0
    tools: float = 0.0
    """Tool calls per attempt."""
    statuses: dict[str, int] = field(default_factory=dict)
    fault: str = ""
    """Why the line could not be read."""

    def to_json(self) -> dict[str, Any]:
        shown = asdict(self)
        del shown["offset"], shown["length"]
        return shown


SORTS: dict[str, Callable[[Glance], Any]] = {
    "line": lambda g: g.line,
    "task": lambda g: g.task,
    "reward": lambda g: _or_low(g.reward),
    "best": lambda g: _or_low(g.best),
    "spread": lambda g: _or_low(g.spread),
    "length": lambda g: g.tokens,
    "turns": lambda g: g.turns,
    "tools": lambda g: g.tools,
    "attempts": lambda g: g.attempts,
    "status": lambda g: (g.attempts - g.statuses.get("done", 0), sorted(g.statuses)),
}


class EpisodeFile:
    """One `step_000012.jsonl`; each request may extend the index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.glances: list[Glance] = []
        self._by_task: dict[str, int] = {}
        self._offset = 0
        self._size = 0
        self._file: tuple[int, int] | None = None
        self._orders: dict[tuple[Any, ...], list[int]] = {}

    @property
    def progress(self) -> float:
        """The share of the file that is indexed."""
        return self._offset / self._size if self._size else 1.0

    def index(self, seconds: float = math.inf, lines: int | None = None) -> bool:
        """Extend the index for a time or up to a number of lines; True when every whole line is indexed."""
        until = time.monotonic() + seconds
        with self.lock:
            try:
                with self.path.open("rb") as file:
                    return self._index(file, until, lines)
            except OSError:  # a resumed run has removed it
                self._forget()
                return True

    def _index(self, file: BinaryIO, until: float, lines: int | None) -> bool:
        seen = os.fstat(file.fileno())
        if (seen.st_dev, seen.st_ino) != self._file or seen.st_size < self._offset:
            self._forget()
            self._file = (seen.st_dev, seen.st_ino)
        self._size = seen.st_size
        file.seek(self._offset)
        while lines is None or len(self.glances) < lines:
            raw = file.readline()
            if not raw.endswith(b"\n"):  # the end, or a line that is being written
                return True
            glance = glance_at(raw, len(self.glances), self._offset)
            self._by_task.setdefault(glance.task, glance.line)
            self.glances.append(glance)
            self._offset += len(raw)
            if time.monotonic() > until:
                return False
        return False

    def _forget(self) -> None:
        self.glances, self._by_task, self._orders = [], {}, {}
        self._offset = self._size = 0
        self._file = None

    def read(self, line: int) -> bytes | None:
        """The bytes of a line, None where there is no such line."""
        with self.lock:
            if line < 0:
                return None
            self.index(lines=line + 1)
            if line >= len(self.glances):
                return None
            glance = self.glances[line]
            with self.path.open("rb") as file:
                file.seek(glance.offset)
                return file.read(glance.length)

    def find(self, task: str) -> int | None:
        """The first indexed line of this task."""
        with self.lock:
            return self._by_task.get(task)

    def order(self, sort: str, is_falling: bool, status: str, words: str) -> list[int]:
        """Line numbers in the given order, filtered by status and by words in task or prompt."""
        with self.lock:
            key = (len(self.glances), sort, is_falling, status, words)
            if key not in self._orders:
                self._orders = dict(list(self._orders.items())[-3:])
                needle = words.casefold()
                kept = [
                    g
                    for g in self.glances
                    if (not status or status in g.statuses)
                    and (not needle or needle in f"{g.task}\n{g.prompt}".casefold())
                ]
                kept.sort(key=SORTS[sort], reverse=is_falling)
                self._orders[key] = [g.line for g in kept]
            return self._orders[key]

    def lines(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Whole lines from `first` on, with their numbers."""
        with self.lock:
            self.index(lines=first)
            if first > len(self.glances):
                return
            known = first < len(self.glances)
            offset = self.glances[first].offset if known else self._offset
        with self.path.open("rb") as file:
            file.seek(offset)
            number = first
            while (raw := file.readline()).endswith(b"\n"):
                yield number, raw
                number += 1


def glance_at(raw: bytes, line: int, offset: int) -> Glance:
    """The table row of one line."""
    glance = Glance(line, offset, len(raw))
    try:
        task, leaves, tokens = _read_ends(raw) or _whole(raw)
        _fill(glance, task, leaves, tokens)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        glance.fault = f"not an episode: {type(error).__name__}: {error}"[:200]
    return glance


def _read_ends(raw: bytes) -> tuple[Any, Any, int] | None:
    """Task, leaves and the number of the policy's tokens; None if the JSON has another layout."""
    behind_task, before_leaves = raw.find(SPANS), raw.rfind(LEAVES)
    if not raw.startswith(b'{"task": ') or not 0 < behind_task < before_leaves:
        return None
    try:
        task = json.loads(raw[len(b'{"task": ') : behind_task])
        leaves = json.loads(raw[before_leaves + len(LEAVES) - 1 : raw.rindex(b"}")])
    except ValueError:
        return None
    return task, leaves, sum(_counts(raw))


def _counts(raw: bytes) -> Iterator[int]:
    """The length of each span of the policy."""
    at = raw.find(POLICY)
    while at >= 0:
        start = at + len(POLICY)
        end = raw.index(b"]", start)
        yield raw.count(b",", start, end) + 1 if end > start else 0
        at = raw.find(POLICY, end)


def _whole(raw: bytes) -> tuple[Any, Any, int]:
    episode = json.loads(raw)
    sampled = [span for span in episode["spans"] if span["author"] == "policy"]
    return episode["task"], episode["leaves"], sum(len(span["tokens"]) for span in sampled)


def _fill(glance: Glance, task: Any, leaves: Any, tokens: int) -> None:
    glance.task, glance.env = str(task.get("id", "")), str(task.get("env", ""))
    glance.prompt = prompt_text(task)[:PROMPT]
    glance.attempts = len(leaves)
    for leaf in leaves:
        status = str(leaf["status"])
        glance.statuses[status] = glance.statuses.get(status, 0) + 1
    if not leaves:
        return
    rewards = [float(leaf["reward"]) for leaf in leaves]
    mean = sum(rewards) / len(rewards)
    if math.isfinite(mean):
        variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
        glance.reward, glance.best, glance.spread = mean, max(rewards), math.sqrt(variance)
    glance.tokens = tokens / len(leaves)
    glance.turns = _mean_of(leaves, "turns")
    glance.tools = _mean_of(leaves, "tool_calls")


def prompt_text(task: Any) -> str:
    """The last message of the prompt, as far as it is text."""
    messages = task.get("prompt") or [{}]
    content = messages[-1].get("content", "") if isinstance(messages[-1], dict) else ""
    if isinstance(content, list):  # parts, as in OpenAI's messages
        content = " ".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
    return str(content or "")


def _mean_of(leaves: Sequence[Any], name: str) -> float:
    found = [float((leaf.get("metrics") or {}).get(name, 0.0)) for leaf in leaves]
    mean = sum(found) / len(found)
    return mean if math.isfinite(mean) else 0.0


def _or_low(value: float | None) -> float:
    return -math.inf if value is None else value
