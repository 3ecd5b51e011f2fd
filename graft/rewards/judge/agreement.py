"""The agreement of a judge with the comparison of texts.

                     same text   other text
    judge: correct       40           25          share that agrees  (40 + 30) / 100 = 0.70
    judge: incorrect      5           30          Cohen's kappa      (0.70 - 0.485) / (1 - 0.485) = 0.42

By chance they would agree on 0.65 * 0.45 + 0.35 * 0.55 = 0.485 of the items; kappa is the agreement
beyond that, at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graft.rewards.answers import same_text
from graft.rewards.judge.prompt import MAX_CHARS

KEPT = 1000  # disagreements; beyond them only the counts grow
LISTED = 20


class JudgedItem(NamedTuple):
    """A question, its accepted answers and a prediction to judge."""

    question: str
    golds: Sequence[str]
    prediction: str
    id: str = ""

    @property
    def is_same_text(self) -> bool:
        return any(same_text(self.prediction, gold) for gold in self.golds)


class Disagreement(NamedTuple):
    item: JudgedItem
    judge: bool
    """True: correct, though the texts differ. False: incorrect, though they are the same."""


@dataclass(slots=True)
class Agreement:
    """Counts of both verdicts, and the items on which they differ."""

    both_yes: int = 0
    judge_only: int = 0
    """Correct to the judge, another text."""
    text_only: int = 0
    """The same text, incorrect to the judge."""
    both_no: int = 0
    not_asked: int = 0
    """Items without a request: empty predictions and, in a reward, predictions that are the same text."""
    failures: int = 0
    """The judge gave no verdict."""
    disagreements: list[Disagreement] = field(default_factory=list[Disagreement])
    """The first thousand."""

    def add(self, item: JudgedItem, judge: bool) -> None:
        is_same = item.is_same_text
        if judge != is_same and len(self.disagreements) < KEPT:
            shown = item._replace(prediction=item.prediction[-MAX_CHARS:])
            self.disagreements.append(Disagreement(shown, judge))
        self.both_yes += judge and is_same
        self.judge_only += judge and not is_same
        self.text_only += is_same and not judge
        self.both_no += not judge and not is_same

    @property
    def count(self) -> int:
        """Items with two verdicts."""
        return self.both_yes + self.judge_only + self.text_only + self.both_no

    @property
    def share(self) -> float | None:
        """The share of items on which they agree; None without items."""
        return (self.both_yes + self.both_no) / self.count if self.count else None

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa; None where one of the two always gives the same verdict."""
        if self.share is None:
            return None
        judge_yes = (self.both_yes + self.judge_only) / self.count
        text_yes = (self.both_yes + self.text_only) / self.count
        by_chance = judge_yes * text_yes + (1 - judge_yes) * (1 - text_yes)
        if judge_yes in (0, 1) or text_yes in (0, 1):
            return None
        return (self.share - by_chance) / (1 - by_chance)

    def markdown(self, listed: int = LISTED) -> str:
        """The table, the two numbers, and the first disagreements."""
        lines = [
            "| | same text | other text |",
            "| --- | --- | --- |",
            f"| judge: correct | {self.both_yes} | {self.judge_only} |",
            f"| judge: incorrect | {self.text_only} | {self.both_no} |",
            "",
            f"{self.count} judged; agreement {_format_score(self.share)}, Cohen's kappa "
            f"{_format_score(self.kappa)}; "
            f"{self.not_asked} not asked about, {self.failures} without a verdict.",
        ]
        if self.disagreements:
            lines += ["", "| item | judge | prediction | accepted |", "| --- | --- | --- | --- |"]
        for item, judge in self.disagreements[:listed]:
            verdict = "correct" if judge else "incorrect"
            cells = (item.id or item.question, verdict, item.prediction, "; ".join(item.golds))
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        if (left := self.judge_only + self.text_only - listed) > 0:
            lines.append(f"\n... and {left} more.")
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        names = ("both_yes", "judge_only", "text_only", "both_no", "not_asked", "failures")
        counts = {name: getattr(self, name) for name in names}
        listed = [
            {"judge": judge, **item._asdict(), "golds": list(item.golds)}
            for item, judge in self.disagreements
        ]
        return {**counts, "share": self.share, "kappa": self.kappa, "disagreements": listed}


def _format_score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 80 else f"{line[:77]}..."
