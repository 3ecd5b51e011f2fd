"""The best and the worst attempts of the first and the last step that was written down.

step 1     best   reward 0.00    2+3=  [2-3]  -1;  7
step 60    best   reward 1.00    2+3=  [2+3]  5;   5
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, zip_longest

from graft.report.markup import folded, note, section, shown
from graft.runs import RunRecord
from graft.types import Author, Episode, Leaf, Span, Status

OF_EACH = 2
"""Best and worst attempts of a step that are shown."""
MOST_BYTES = 64 << 20
"""Of one step's file that are looked through; episodes of long attempts fill gigabytes."""
LONGEST_TURN = 4000
LONGEST = 40_000
"""Bytes of one attempt on the page; of the turns that do not fit the number is told."""


@dataclass(frozen=True, slots=True)
class ShownAttempt:
    """One attempt of a step, with the tree it stands in."""

    episode: Episode
    leaf: Leaf


@dataclass(frozen=True, slots=True)
class Picked:
    """The attempts of one step that say most about it."""

    step: int
    best: list[ShownAttempt]
    worst: list[ShownAttempt]
    seen: int
    is_cut: bool
    """Whether the step has more than was looked through."""


def transcripts(record: RunRecord) -> str:
    """Nothing where no episodes were written down."""
    steps = record.episode_steps
    if not steps:
        return section(
            "Attempts",
            note("No episodes were written down: run.log_episodes is 0, or no RL step is done."),
        )
    parts: list[str] = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        picked = pick(record, step)
        parts.append(f"<h3>Step {step}</h3>")
        if not picked.seen:
            parts.append(note(f"No attempt of step {step} can be read."))
        if picked.is_cut:
            parts.append(
                note(
                    f"Best and worst of {picked.seen:,} attempts, those in the first "
                    f"{MOST_BYTES >> 20} MB of the step's file."
                )
            )
        for kind, chosen in (("best", picked.best), ("worst", picked.worst)):
            parts += [attempt(kind, one, is_open=not place) for place, one in enumerate(chosen)]
    return section("Attempts", *parts)


def pick(record: RunRecord, step: int) -> Picked:
    """Attempts that came to an end, by reward; one of each task while there are enough."""
    best: list[ShownAttempt] = []
    worst: list[ShownAttempt] = []
    seen = 0
    for episode in record.episodes(step, MOST_BYTES):
        ended = [
            ShownAttempt(episode, leaf)
            for leaf in episode.leaves
            if leaf.tips and _has_reward(leaf) and _is_whole(episode, leaf)
        ]
        if not ended:
            continue
        seen += len(ended)
        best = sorted([*best, max(ended, key=_reward)], key=_reward, reverse=True)[:OF_EACH]
        lowest = min(reversed(ended), key=_reward)  # of equals not the one that is best already
        worst = sorted([*worst, lowest], key=_reward)[:OF_EACH]
    best, worst = _apart(best, worst)
    try:
        size = (record.path / "episodes" / f"step_{step:06d}.jsonl").stat().st_size
    except OSError:
        size = 0
    return Picked(step, best, worst, seen, size > MOST_BYTES)


def _apart(
    best: list[ShownAttempt], worst: list[ShownAttempt]
) -> tuple[list[ShownAttempt], list[ShownAttempt]]:
    """Of few attempts some are among both: each goes where it stands higher, and is shown once."""
    where: dict[int, str] = {}
    for pair in zip_longest(best, worst):
        for kind, one in zip(("best", "worst"), pair, strict=True):
            if one is not None:
                where.setdefault(id(one.leaf), kind)
    return (
        [one for one in best if where[id(one.leaf)] == "best"],
        [one for one in worst if where[id(one.leaf)] == "worst"],
    )


def attempt(kind: str, one: ShownAttempt, is_open: bool = False) -> str:
    """An attempt, turn by turn, under its verdict."""
    leaf = one.leaf
    calls = int(leaf.metrics.get("tool_calls", 0) or 0)
    tools = f", {calls} tool call{'s' if calls != 1 else ''}" if calls else ""
    verdict = (
        f'<b class="{kind}">{kind}</b> reward {leaf.reward:.3f} '
        f"({shown(leaf.status)}{tools}) <code>{shown(one.episode.task.id, 120)}</code>"
    )
    answer = one.episode.task.answer
    wanted = "" if answer is None else f'<p class="wanted">answer: {shown(answer)}</p>'
    inside = f'<div class="talk">{"".join(_turns(one))}{wanted}</div>'
    return folded(verdict, inside, is_open)


def _turns(one: ShownAttempt) -> list[str]:
    parts: list[str] = []
    left, hidden = LONGEST, 0
    for number, tip in enumerate(one.leaf.tips):
        if number:  # the history was rewritten here: a new prompt, and on from there
            parts.append(f'<p class="context">context {number + 1}</p>')
        spans = [one.episode.spans[index] for index in one.episode.walk(tip)]
        calls = 0  # of the turn before: what the environment answers is then a tool's result
        for author, run in groupby(spans, key=lambda span: span.author):
            group = list(run)
            text = _text(one, author, group)
            if left <= 0:
                hidden += 1
                continue
            word = "tool" if author is Author.ENV and calls else str(author)
            calls = _calls(group) if author is Author.POLICY else 0
            parts.append(_turn(word, text, calls, group))
            left -= len(parts[-1].encode())
    if hidden:
        parts.append(note(f"… {hidden} more turns …"))
    return parts


def _turn(word: str, text: str, calls: int, spans: list[Span]) -> str:
    marks = [f'<span class="call">calls {calls} tool{"s"[: calls != 1]}</span>'] if calls else []
    forced = [str(span.info["forced"]) for span in spans if "forced" in span.info]
    marks += [f'<span class="call">forced: {shown(name, 80)}</span>' for name in forced[:3]]
    failed = [str(span.info["error"]) for span in spans if "error" in span.info]
    marks += [f'<span class="error">{shown(reason, 300)}</span>' for reason in failed[:3]]
    words = f'<pre dir="auto">{shown(text, LONGEST_TURN)}</pre>'
    return f'<div class="turn {word}"><span class="who">{word}</span>{words}{"".join(marks)}</div>'


def _text(one: ShownAttempt, author: Author, spans: list[Span]) -> str:
    said = "".join(span.text for span in spans)
    if not said and author is Author.TASK:
        said = "\n".join(str(message.get("content", "")) for message in one.episode.task.prompt)
    return said.rstrip("\n")


def _calls(spans: list[Span]) -> int:
    return sum(int(span.info.get("tool_calls", 0) or 0) for span in spans)


def _has_reward(leaf: Leaf) -> bool:
    is_ended = leaf.status.is_trainable or leaf.status is Status.REPLACED
    return is_ended and math.isfinite(leaf.reward)


def _is_whole(episode: Episode, leaf: Leaf) -> bool:
    """Whether its walk can be walked: parents come before their children, and every span is there."""
    ordered = all(
        span.parent is None or 0 <= span.parent < index for index, span in enumerate(episode.spans)
    )
    return ordered and all(0 <= tip < len(episode.spans) for tip in leaf.tips)


def _reward(one: ShownAttempt) -> float:
    return one.leaf.reward
