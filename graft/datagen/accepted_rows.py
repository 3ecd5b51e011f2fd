"""The attempts that pass a condition, as rows of a file: each once, in the order of the tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.datagen.attempt_log import AttemptLog
from graft.datagen.row_file import new_rows
from graft.rollout.filters import Condition
from graft.train.errors import RunStopped
from graft.train.step_metrics import is_dead
from graft.types import Status

Row = dict[str, Any]


@dataclass(slots=True)
class RejectionSampling:
    """The result of sampling rows."""

    out: str
    attempts_file: str
    tasks: int = 0
    attempts: int = 0
    rows: int = 0
    rejected: int = 0
    duplicates: int = 0
    failed: int = 0
    """Attempts that failed through no fault of the policy; never kept."""
    unwritable: int = 0
    """Attempts that cannot be written as text."""
    reward: float = 0.0
    """Mean over the attempts that did not fail."""
    errors: Counter[str] = field(default_factory=Counter[str])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        named = ("rejected", "duplicates", "failed", "unwritable")
        rest = [f"{getattr(self, name):,} {name}" for name in named if getattr(self, name)]
        return (
            f"{self.rows:,} rows in {self.out} out of {self.attempts:,} attempts at {self.tasks:,} "
            f"tasks, mean reward {self.reward:.3f}" + "".join(f", {text}" for text in rest)
        )


def gather(
    log: AttemptLog, condition: Condition, sampled: RejectionSampling, keep: str
) -> RejectionSampling:
    """Write the attempts that pass, without duplicates."""
    seen: set[bytes] = set()
    statuses, rewards = Counter[str](), 0.0
    with new_rows(Path(sampled.out)) as file:
        for task, line in log.tasks(sampled.tasks):
            for attempt in line["attempts"]:
                sampled.attempts += 1
                statuses[attempt["status"]] += 1
                if not Status(attempt["status"]).is_trainable:
                    sampled.failed += 1
                    sampled.errors[attempt["error"]] += 1
                    continue
                rewards += attempt["reward"]
                if not condition(attempt):
                    sampled.rejected += 1
                elif "unwritable" in attempt:
                    sampled.unwritable += 1
                else:
                    fresh = [row for row in _rows(task, line, attempt) if _is_new(row, seen)]
                    sampled.duplicates += not fresh
                    for row in fresh:
                        file.append(row)
                    sampled.rows += len(fresh)
        sampled.reward = rewards / max(sampled.attempts - sampled.failed, 1)
        if is_dead(statuses.elements()):
            raise RunStopped(why_dead(sampled.errors))
        if not sampled.rows:
            raise RunStopped(_why_nothing(sampled, keep))
    return sampled


def _rows(task: int, line: Row, attempt: Row) -> Iterable[Row]:
    names = ("sample", "reward", "turns", "tool_calls", "length", "status")
    for context in attempt["contexts"]:
        yield {
            "messages": context.get("messages", line["messages"]),
            **({"spans": context["spans"]} if "spans" in context else {}),
            **({"tools": line["tools"]} if "tools" in line else {}),
            "data_source": line["data_source"],
            "extra_info": {
                "index": task,
                "seed": line["seed"],
                "split": "train",
                **{name: attempt[name] for name in names},
            },
        }


def _is_new(row: Row, seen: set[bytes]) -> bool:
    text = json.dumps([row["messages"], row.get("spans")], ensure_ascii=False)
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def why_dead(errors: Counter[str]) -> str:
    [(commonest, _)] = errors.most_common(1)
    return (
        f"no attempt ended; most frequent reason: {commonest}. Repair the environment, tool or agent and run "
        "the same command with --resume"
    )


def _why_nothing(sampled: RejectionSampling, keep: str) -> str:
    if sampled.unwritable:
        return (
            f"{sampled.unwritable:,} of {sampled.attempts:,} attempts pass {keep!r}, and none can be "
            f"written, so {sampled.out} is not; {sampled.attempts_file} says why (unwritable)"
        )
    return (
        f"none of {sampled.attempts:,} attempts passes {keep!r} (mean reward {sampled.reward:.3f}), so "
        f"{sampled.out} is not written. They are in {sampled.attempts_file}: with --resume another "
        "--keep reads them again, and a larger --n adds to them"
    )
