"""Every attempt that was sampled for a file of rows, in an append-only file beside it:

    {"of": {"weights": "0f3a91c2", "task": {...}, "samples": 4, ...}}
    {"task": 3, "messages": [...], "attempts": [{"sample": 0, "reward": 1.0, ..., "contexts": [...]}]}
    {"task": 0, "messages": [...], "attempts": [...]}

A line is written when all attempts at its task have ended; tasks end in any order. After kill -9 the
last line may be torn: it is dropped, and its task is sampled again, as is a task with attempts that
failed through no fault of the policy. Each attempt has its own random draws, so a repeated one comes out
the same. Rejected attempts are kept too: another condition costs no sampling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graft.datagen.row_file import room_for
from graft.files import FileInUse, JsonlLog
from graft.train.errors import RunStopped
from graft.types import Status

KEPT = "earlier attempts are kept: continue with --resume"


class AttemptLog:
    """The attempts of one model at one environment's tasks, by the task's number."""

    def __init__(self, path: Path, of: Mapping[str, Any]) -> None:
        self.path = path
        self.places: dict[int, int] = {}
        """The offset of the newest line of a task."""
        self.failed: set[int] = set()
        """Tasks with failed attempts, which are repeated."""
        with room_for(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._log = JsonlLog(path)
            except FileInUse as error:
                raise RunStopped(f"{error}; wait for it, or give another --out") from error
        try:
            self._read(json.loads(json.dumps(of, default=str)))
        except BaseException:
            self._log.close()
            raise

    def is_done(self, task: int) -> bool:
        return task in self.places and task not in self.failed

    def append(self, task: int, values: Mapping[str, Any]) -> None:
        """Handed to the operating system when this returns: a killed process loses nothing."""
        with room_for(self.path, KEPT):
            start = self._log.append({"task": task, **values})
        self._place(task, start, values["attempts"])

    def tasks(self, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The lines of tasks 0 to `count` - 1 in order, one in memory at a time."""
        for task in range(count):
            if task in self.places:
                yield task, json.loads(self._log.line_at(self.places[task]))

    def close(self) -> None:
        """Remove a log without attempts, which would otherwise have to be resumed."""
        if not self.places:
            self.path.unlink(missing_ok=True)
        with room_for(self.path, KEPT):
            self._log.close()

    def _place(self, task: int, start: int, attempts: list[dict[str, Any]]) -> None:
        self.places[task] = start
        if all(Status(attempt["status"]).is_trainable for attempt in attempts):
            self.failed.discard(task)
        else:
            self.failed.add(task)

    def _read(self, of: dict[str, Any]) -> None:
        known = None
        for start, line in self._log.lines():
            try:
                values = json.loads(line)
                if "of" in values:
                    known = values["of"]
                else:
                    self._place(int(values["task"]), start, values["attempts"])
            except (ValueError, KeyError, TypeError):
                raise RunStopped(
                    f"{self.path} is damaged at byte {start:,}; remove it to sample again, or cut it "
                    "off there to keep the part before it"
                ) from None
        if known is None:
            with room_for(self.path, KEPT):
                self._log.append({"of": of})
        elif known != of:
            raise RunStopped(
                f"{self.path} holds attempts under other settings ({_differences(known, of)}); go on "
                "with those, or give another --out"
            )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> str:
    """ "samples: 4 -> 8; task.args.split: 'train' -> 'test'" """
    found: list[str] = []
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            found.append(_differences(before, after, f"{within}{key}."))
        else:
            found.append(f"{within}{key}: {before!r} -> {after!r}")
    return "; ".join(found)
