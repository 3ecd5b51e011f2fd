"""Results of an evaluation: one checkpoint on one set, kept in an append-only file.

    {"checkpoint": "rl-000020", "set": "earl:sort-4", "settings": {...}, "rewards": [[1.0, 0.0], ...]}

A result is identified by its checkpoint (name and weights), its set, and every setting that the score
depends on. So a killed evaluation resumes where it stopped, and one with other settings computes its own
results beside the old ones. A result holds the reward and the vote of every attempt; avg, pass@k and
maj@k are computed from them when they are shown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from graft.evaluate.answer_measures import productivity
from graft.evaluate.estimates import NO_VOTE, Estimate, estimate, majority_at_k, pass_at_k
from graft.evaluate.samples import StoredSample
from graft.files import append_row
from graft.rewards.answers import in_words, normalise
from graft.rewards.numbers import parse_number

_FORMULA = re.compile(r"[0-9\\^=+*/<>]")
"""Characters of mathematics: an answer with one keeps its punctuation, else x-1 would equal x+1."""
SUMMARY = (
    "tool_calls", "tool_rate", "tools", "productivity", "answers", "failed", "overlong", "tokens",
    "missing", "seconds",
)  # fmt: skip
"""Fields of a result that describe all of its attempts."""
ALMOST = 1e-9
"""A sum of rewards that should be 1 may have been rounded."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of one checkpoint on one set."""

    checkpoint: str
    set: str
    settings: dict[str, Any]
    weights: str
    """Distinguishes two models of the same name."""
    tasks: list[str]
    sources: list[str]
    """The data_source of each task."""
    rewards: list[list[float]]
    """Of every attempt, task by task; 0 for failed ones."""
    votes: list[list[int]]
    """The answer of an attempt as a number, in order of first appearance within its task; -1 without one."""
    tool_calls: float
    """Per attempt."""
    tool_rate: float
    """Share of the attempts with a call."""
    failed: float
    """Share of the attempts that failed through no fault of the policy; they count as reward 0."""
    overlong: int
    """Tasks whose prompt left no space for an answer; they count as reward 0."""
    tokens: float
    """Sampled, per attempt."""
    seconds: float
    missing: int = 0
    """Attempts that were not made; above 0 only in an unfinished result."""
    answers: dict[str, float] = field(default_factory=dict[str, float])
    """em, acc and f1 of the answers, per attempt; empty where answers are not texts."""
    tools: dict[str, float] = field(default_factory=dict[str, float])
    """Calls of each tool, per attempt."""

    @classmethod
    def of(
        cls,
        samples: Mapping[tuple[str, int], StoredSample],
        wanted: Mapping[str, int],
        **which: Any,
    ) -> EvalResult:
        """The result of the `wanted` number of attempts at each task; `which` has the other fields."""
        tasks: list[str] = []
        groups: list[list[StoredSample]] = []
        for task, attempts in wanted.items():
            numbers = (samples.get((task, number)) for number in range(attempts))
            if group := [sample for sample in numbers if sample is not None]:
                tasks.append(task)
                groups.append(group)
        made = [sample for group in groups for sample in group]
        count = max(len(made), 1)
        return cls(
            **which,
            tasks=tasks,
            sources=[group[0].source for group in groups],
            rewards=[[sample.reward for sample in group] for group in groups],
            votes=[numbered([sample.answer for sample in group]) for group in groups],
            tool_calls=sum(sample.tool_calls for sample in made) / count,
            tool_rate=sum(sample.tool_calls > 0 for sample in made) / count,
            failed=sum(sample.has_failed for sample in made) / count,
            overlong=sum(any(sample.is_overlong for sample in group) for group in groups),
            tokens=sum(sample.tokens for sample in made) / count,
            missing=sum(wanted.values()) - len(made),
            answers=means([sample.measures for sample in made]),
            tools=means([sample.tools for sample in made]),
        )

    @property
    def reward(self) -> float:
        """The mean over tasks of the mean over attempts."""
        values = self.values("avg")
        return math.fsum(values) / max(len(values), 1)

    @property
    def productivity(self) -> float:
        """ARPO's tool productivity, of the mean reward."""
        return productivity(self.reward, self.tool_calls)

    def values(self, what: str, solved: float = 1.0) -> list[float]:
        return list(self.by_task(what, solved).values())

    def by_task(self, what: str, solved: float = 1.0) -> dict[str, float]:
        """One number per task: "avg", "pass@8", "maj@8"; tasks with fewer attempts are left out.

        solved  the least reward of a right attempt
        """
        name, _, number = what.partition("@")
        groups = zip(self.tasks, self.rewards, self.votes, strict=True)
        if name == "avg":
            return {task: math.fsum(group) / len(group) for task, group, _ in groups}
        k = int(number)
        found: dict[str, float] = {}
        for task, rewards, votes in groups:
            if len(rewards) < k:
                continue
            if name == "pass":
                right = sum(reward >= solved - ALMOST for reward in rewards)
                found[task] = pass_at_k(len(rewards), right, k)
            else:
                found[task] = majority_at_k(votes, rewards, k)
        return found

    def estimates(self, what: Sequence[str], solved: float = 1.0) -> dict[str, Estimate]:
        """The measures that can be computed, with their intervals."""
        known = {name: self.values(name, solved) for name in what}
        return {name: estimate(values) for name, values in known.items() if values}

    def by_source(self) -> dict[str, EvalResult]:
        """The result of each data_source alone."""
        results: dict[str, EvalResult] = {}
        for source in dict.fromkeys(self.sources):
            mine = [i for i, one in enumerate(self.sources) if one == source]
            parts = {
                name: [getattr(self, name)[i] for i in mine]
                for name in ("tasks", "sources", "rewards", "votes")
            }
            results[source] = EvalResult(**{**self.to_json(), **parts})
        return results

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def summary(self) -> dict[str, Any]:
        """The numbers without the single attempts."""
        return {name: getattr(self, name) for name in SUMMARY}


def means(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every key over all mappings; 0 where one lacks it.

    >>> means([{"python": 3}, {}, {"search": 3}])
    {'python': 1.0, 'search': 1.0}
    """
    names = dict.fromkeys(name for one in each for name in one)
    return {name: math.fsum(one.get(name, 0.0) for one in each) / len(each) for name in names}


def numbered(answers: Sequence[str]) -> list[int]:
    """Answers as votes: equal ones have the same number.

    >>> numbered(["The Louvre", "7", "louvre.", "", "7.0"])
    [0, 1, 0, -1, 1]
    """
    seen: dict[str, int] = {}
    return [
        seen.setdefault(meaning, len(seen)) if (meaning := meaning_of(answer)) else NO_VOTE
        for answer in answers
    ]


def meaning_of(answer: str) -> str:
    """The normal form of an answer: a number by its value, text as SQuAD normalises it."""
    answer = in_words(answer).strip("$ ")
    if not answer:
        return ""
    if (number := parse_number(answer.rstrip("."))) is not None:
        return f"number {number}"
    if _FORMULA.search(answer):
        return f"formula {''.join(answer.split()).rstrip('.').lower()}"
    return f"words {normalise(answer) or answer.lower()}"


class ResultsFile:
    """An append-only file with one finished result per line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: list[EvalResult] = []
        self.broken = 0
        """Lines that are no results: a process was killed while it wrote."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in filter(None, text.split("\n")):
            if (result := read_result(line)) is None:
                self.broken += 1
            else:
                self.results.append(result)

    def find(
        self, set: str, settings: Mapping[str, Any], checkpoint: str, weights: str
    ) -> EvalResult | None:
        """The result with exactly this identity, if it was computed."""
        for result in self.under(set, settings):
            if (result.checkpoint, result.weights) == (checkpoint, weights):
                return result
        return None

    def under(self, set: str, settings: Mapping[str, Any]) -> list[EvalResult]:
        """All checkpoints on this set under these settings, the latest computed first."""
        wanted = set, settings
        return [one for one in self.results[::-1] if (one.set, one.settings) == wanted]

    def append(self, result: EvalResult) -> None:
        """Append a result; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_row(self.path, asdict(result))
        self.results.append(result)


def read_result(line: str) -> EvalResult | None:
    try:
        values = json.loads(line)
        known = [one.name for one in fields(EvalResult) if one.name in values]
        return EvalResult(**{name: values[name] for name in known})
    except (ValueError, KeyError, TypeError):
        return None
