"""Checkpoints against sets, as Markdown and as JSON:

| checkpoint | set | tasks | avg@8 | pass@8 | maj@8 | calls |
|---|---|---|---|---|---|---|
| rl-000000 | gsm | 500 | 0.430 [0.401, 0.460] | 0.812 [0.776, 0.846] | 0.548 [0.504, 0.592] | 1.9 |
| rl-000020 | gsm | 500 | 0.551 [0.521, 0.580] | 0.840 [0.806, 0.872] | 0.640 [0.598, 0.682] | 2.0 |

Sets with several data sources are also shown source by source; of sets that ask for a text, the answers
and the calls have a table of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.evaluate.answer_measures import MEASURES, NOT, given_attempted, simpleqa_f
from graft.evaluate.estimates import Estimate
from graft.evaluate.eval_spec import EvalSpec
from graft.evaluate.results import EvalResult

GRADED = (NOT, "given attempted", "F-score")
"""Measures of a judge with SimpleQA's grades."""
PRODUCTIVITY, TOOL_USE = "productivity", "tool use"
HEAD, SOURCE, TASKS, CALLS = ("checkpoint", "set"), "data source", "tasks", "calls"
"""Titles of the columns; `graft explain` describes each of them, and those of `ScoreTable.measures`."""


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Rows in the order they are shown: checkpoint -> set -> result, where one was computed."""

    sets: list[str]
    rows: Mapping[str, Mapping[str, EvalResult]]
    caption: str
    samples: int = 1
    k: Sequence[int] = (1,)
    solved: float = 1.0
    """The least reward of a right attempt, for pass@k."""
    problems: list[str] = field(default_factory=list[str])
    """Why it is not complete."""
    with_answers: frozenset[str] = frozenset()
    """The sets whose answers and calls are shown in detail."""
    is_uneven: bool = False
    """Whether tasks have different numbers of attempts."""
    not_held_out: dict[str, str] = field(default_factory=dict[str, str])
    """The sets with tasks that the run trains on, and which."""

    @classmethod
    def of(
        cls,
        spec: EvalSpec,
        rows: Mapping[str, Mapping[str, EvalResult]],
        problems: list[str],
        not_held_out: Mapping[str, str],
    ) -> ScoreTable:
        sets = [tasks.label for tasks in spec.sets]
        every = [one for results in rows.values() for one in results.values()]
        counts = sorted({len(rewards) for one in every for rewards in one.rewards}) or [1]
        options = spec.options
        samples, ks = options.samples or counts[-1], options.k or counts
        is_uneven = options.samples is None and len(counts) > 1
        caption = spec.caption(samples, not_held_out)
        detailed = frozenset(tasks.label for tasks in spec.sets if tasks.shows_answers)
        return cls(
            sets,
            rows,
            caption,
            samples,
            ks,
            options.solved,
            problems,
            detailed,
            is_uneven,
            dict(not_held_out),
        )

    @property
    def measures(self) -> list[str]:
        """The measures of each result; a single attempt has only its reward."""
        if self.samples == 1:
            return ["avg@1"]
        several = [k for k in self.k if k > 1]
        return [
            "avg" if self.is_uneven else f"avg@{self.samples}",
            *(f"pass@{k}" for k in self.k),
            *(f"maj@{k}" for k in several),
        ]

    def markdown(self) -> str:
        results = [
            (name, label, results[label])
            for name, results in self.rows.items()
            for label in self.sets
            if label in results
        ]
        parts = [self._drawn([*HEAD], [([n, s], result) for n, s, result in results])]
        by_source = [
            ([name, label, source or "-"], part)
            for name, label, result in results
            if len(set(result.sources)) > 1
            for source, part in result.by_source().items()
        ]
        if by_source:
            parts.append(self._drawn([*HEAD, SOURCE], by_source, False))
        detailed = [one for one in results if one[1] in self.with_answers]
        if detailed:
            parts.append(answers_table(detailed))
        parts.append(self.caption)
        parts += [f"Not complete: {problem}" for problem in self.problems]
        return "\n\n".join(parts) + "\n"

    def _drawn(
        self, head: list[str], rows: Sequence[tuple[list[str], EvalResult]], is_whole: bool = True
    ) -> str:
        """Calls, failures and what is missing are known of whole sets only."""
        lines = [[*head, TASKS, *self.measures, *([CALLS] if is_whole else [])]]
        lines.append(["---"] * len(lines[0]))
        for names, result in rows:
            known = result.estimates(self.measures, self.solved)
            shown = [show(known.get(measure)) for measure in self.measures]
            calls = [f"{result.tool_calls:.1f}{_remarks(result)}"] if is_whole else []
            lines.append([*names, str(len(result.tasks)), *shown, *calls])
        return drawn(lines)

    def to_json(self, with_tasks: bool = True) -> dict[str, Any]:
        """`with_tasks` adds the rewards and votes, which a later comparison reads."""
        rows: list[dict[str, Any]] = []
        settings: dict[str, Any] = {}
        for name, results in self.rows.items():
            scores = {label: self._scores(one, with_tasks) for label, one in results.items()}
            rows.append({"checkpoint": name, "scores": scores})
            settings = {label: one.settings for label, one in results.items()} | settings
        settings = {label: settings[label] for label in self.sets if label in settings}
        found = {"caption": self.caption, "solved": self.solved, "sets": settings, "rows": rows}
        return {**found, "not_held_out": self.not_held_out, "problems": self.problems}

    def _scores(self, result: EvalResult, with_tasks: bool) -> dict[str, Any]:
        scores = {
            "reward": result.reward,
            "tasks": len(result.tasks),
            "samples": self.samples,
            "measures": self._measured(result),
            "sources": {
                source: self._measured(part) for source, part in result.by_source().items()
            },
            **result.summary(),
            "answers": result.answers | graded(result),
        }
        if with_tasks:
            each = zip(result.tasks, result.rewards, result.votes, strict=True)
            scores["attempts"] = {
                task: {"rewards": rewards, "votes": votes} for task, rewards, votes in each
            }
        return scores

    def _measured(self, result: EvalResult) -> dict[str, Any]:
        known = result.estimates(self.measures, self.solved)
        return {name: {"value": v, "interval": interval} for name, (v, interval) in known.items()}


def answers_table(results: Sequence[tuple[str, str, EvalResult]]) -> str:
    """em, acc and f1 of the answers, the share of attempts with a call, calls by tool, productivity."""
    tools = sorted({tool for *_, result in results for tool in result.tools})
    has_grades = any(NOT in result.answers for *_, result in results)
    measures = [*MEASURES, *(GRADED if has_grades else ())]
    lines = [[*HEAD, *measures, TOOL_USE, *(f"{tool} calls" for tool in tools), PRODUCTIVITY]]
    lines.append(["---"] * len(lines[0]))
    for name, label, result in results:
        known = result.answers | graded(result)
        answers = [f"{known[measure]:.3f}" if measure in known else "" for measure in measures]
        calls = [f"{result.tools.get(tool, 0.0):.2f}" for tool in tools]
        used = f"{result.tool_rate:.3f}"
        lines.append([name, label, *answers, used, *calls, f"{result.productivity:.1f}"])
    return drawn(lines)


def graded(result: EvalResult) -> dict[str, float]:
    """The other measures of a judge with SimpleQA's grades; {} of other results."""
    if NOT not in result.answers:
        return {}
    of_score = result.reward, result.answers[NOT]
    return dict(zip(GRADED[1:], (given_attempted(*of_score), simpleqa_f(*of_score)), strict=True))


def drawn(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; its second line is the ruler."""
    whole = [[entry.replace("|", "\\|") for entry in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in whole)


def show(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.interval is None:
        return f"{estimate.value:.3f}"
    low, high = estimate.interval
    return f"{estimate.value:.3f} [{low:.3f}, {high:.3f}]"


def _remarks(result: EvalResult) -> str:
    """What qualifies the numbers beside it: failures, long prompts, missing attempts."""
    notes = []
    if result.failed:
        notes.append(f"{result.failed:.0%} failed" if result.failed >= 0.01 else "under 1% failed")
    if result.overlong:
        notes.append(f"{result.overlong} prompts too long")
    if result.missing:
        notes.append(f"{result.missing} attempts missing")
    return f" ({', '.join(notes)})" if notes else ""
