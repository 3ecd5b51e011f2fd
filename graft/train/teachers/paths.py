"""Which teachers of a recipe are other models in this process; commands ask without loading a library."""

from __future__ import annotations

from graft.config import Config

REFERENCE = "reference"
"""In `rollout.frozen`: the weights that RL starts from; also the name of their folder in the run."""


def is_server(teacher: str) -> bool:
    """Whether a teacher is the address of a server."""
    return teacher.startswith(("http://", "https://"))


def teacher_paths(config: Config) -> dict[str, str]:
    """The teachers that are other models in this process, by name."""
    if not config.train.steps:
        return {}
    own = ("policy", REFERENCE)
    found = config.distill.teachers.items()
    return {name: value for name, value in found if value not in own and not is_server(value)}
