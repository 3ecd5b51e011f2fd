"""The attempts that the first page shows: a good one of the last step, and what came before training.

highlights(run)
[{"step": "60", "line": 3, "is_best": True, "title": "After training"},
 {"step": "1", "line": 0, "is_best": False, "title": "At the start, the same task"}]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft.viewer.episodes import EpisodeFile, Glance
from graft.viewer.runs import ViewedRun


def highlights(run: ViewedRun, patience: float) -> list[dict[str, Any]]:
    """At most one attempt of the last step and one of the first, as far as they are indexed in time."""
    files = {step: file for step, file in run.files.items() if not step.startswith("failed")}
    if not files:
        return []
    steps = list(files)
    last, first = steps[-1], steps[0]
    ends = _glances(files[last], patience)
    if not ends:
        return []
    starts = _glances(files[first], patience) if first != last else []
    top = max(_best(glance) for glance in ends)
    good = [glance for glance in ends if _best(glance) == top]
    again = {glance.task: glance for glance in starts}
    good.sort(
        key=lambda glance: (
            glance.task in again,
            glance.reward or 0.0,
            glance.tools,
            -glance.tokens,
        )
    )
    chosen = good[-1]
    found = [
        _place("Now" if run.record.status == "running" else "After training", last, chosen, True)
    ]
    if starts:
        same = again.get(chosen.task)
        before = same or min(starts, key=lambda glance: (glance.reward or 0.0, glance.tokens))
        title = "At the start, the same task" if same else "At the start, another task"
        found.append(_place(title, first, before, False))
    return found


def _glances(file: EpisodeFile, patience: float) -> Sequence[Glance]:
    """The indexed tasks that have attempts with rewards."""
    file.index(patience)
    with file.lock:
        return [glance for glance in file.glances if glance.best is not None]


def _best(glance: Glance) -> float:
    return glance.best or 0.0


def _place(title: str, step: str, glance: Glance, is_best: bool) -> dict[str, Any]:
    return {"title": title, "step": step, "line": glance.line, "is_best": is_best}
