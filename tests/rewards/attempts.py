"""An attempt at a task by its texts."""

from __future__ import annotations

from typing import Any

from graft.types import Author, Episode, Leaf, Span, Task, Trajectory


def attempt(
    *texts: str | tuple[Author, str], shown: str = "?", **task: Any
) -> tuple[Task, Trajectory]:
    """A task, and a trajectory with these texts in order: the policy's, if no author is named."""
    made = Task("toy:train:0", "toy", **task)
    episode = Episode(made)
    tip = episode.append(Span(None, Author.TASK, [], text=shown))
    for text in texts:
        author, said = (Author.POLICY, text) if isinstance(text, str) else text
        tip = episode.append(Span(tip, author, [], text=said))
    episode.leaves.append(Leaf((tip,)))
    return made, next(episode.trajectories())
