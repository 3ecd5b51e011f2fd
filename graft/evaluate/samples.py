"""Every attempt of one result, in an append-only file:

    {"of": {"checkpoint": "rl-000020", "set": "gsm", ...}}
    {"task": "gsm:test:0", "seed": 0, "sample": 0, "text": "...", "answer": "18", "reward": 1.0, ...}
    {"task": "gsm:test:3", "seed": 3, "sample": 1, "text": "...", "answer": "5", "reward": 0.0, ...}

A line is written when its attempt ends. After kill -9 the last one may be torn: it is dropped, and
its attempt is made again, as are those that failed. Attempts are numbered and each number has its own
random draws, so repeated attempts come out as they would have, and eight attempts extend four.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.files import FileInUse, JsonlLog
from graft.types import Status


class SamplesInUse(RuntimeError):
    """Another process writes these samples."""


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One attempt at one task."""

    task: str
    seed: int
    sample: int
    """Its number among the attempts at this task, from 0."""
    source: str
    """The task's data_source."""
    text: str = ""
    """Everything after the prompt, tools' answers included."""
    answer: str = ""
    """The final answer in the policy's last turn; "" for an attempt that did not end."""
    reward: float = 0.0
    """0 where the attempt failed."""
    status: str = Status.DONE
    prompt_tokens: int = 0
    tokens: int = 0
    """Sampled ones."""
    tool_calls: int = 0
    tools: dict[str, int] = field(default_factory=dict[str, int])
    """Calls by tool."""
    measures: dict[str, float] = field(default_factory=dict[str, float])
    """em, acc and f1 of the answer (`graft.evaluate.answer_measures`)."""
    seconds: float = 0.0
    error: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether it failed through no fault of the policy."""
        return not Status(self.status).is_trainable

    @property
    def is_overlong(self) -> bool:
        """Its prompt left no space for an answer."""
        return self.status == Status.TRUNCATED and not self.tokens


class SampleFile:
    """The samples of one result. `kept` has them without their texts, by task and number."""

    def __init__(self, path: Path, of: Mapping[str, Any]) -> None:
        self.path = path
        self.kept: dict[tuple[str, int], StoredSample] = {}
        self.unreadable = 0
        """Lines in the middle that are no samples."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._log = JsonlLog(path)
        except FileInUse as error:
            raise SamplesInUse(f"{error}; wait for it, or give --name another name") from error
        is_new = True
        for _, line in self._log.lines():
            is_new = False
            if (sample := read_sample(line)) is not None:
                self.kept[sample.task, sample.sample] = replace(sample, text="")
            elif b'"of"' not in line[:8]:
                self.unreadable += 1
        if is_new:
            self._log.append({"of": dict(of)})

    def append(self, sample: StoredSample) -> None:
        """Handed to the operating system when this returns: a killed process loses nothing."""
        self._log.append(asdict(sample))
        self.kept[sample.task, sample.sample] = replace(sample, text="")

    def close(self) -> None:
        """Close the file; it is on the disk when this returns."""
        self._log.sync()
        self._log.close()


def read_sample(line: bytes | str) -> StoredSample | None:
    """A line of a sample file; None for its head and for unreadable lines."""
    try:
        sample = StoredSample(**json.loads(line))
        Status(sample.status)
    except (ValueError, KeyError, TypeError):
        return None
    return sample


def file_name(checkpoint: str, label: str, depends_on: Mapping[str, Any]) -> str:
    """A readable name that depends on the settings: "rl-000020.gsm.0f3a91c2d4e5b6a7.jsonl"."""
    known = json.dumps(depends_on, sort_keys=True, default=str)
    digest = blake2b(f"{checkpoint}/{label}/{known}".encode(), digest_size=8).hexdigest()
    readable = f"{checkpoint}.{label}"[:80]
    letters = "".join(c if c.isalnum() or c in "-_." else "_" for c in readable)
    return f"{letters}.{digest}.jsonl"
