"""The teachers that a run began with: a resumed run must not take newer weights.

distill.teacher    runs/big                                  Qwen/Qwen3-8B
recorded           runs/big/checkpoints/rl-000070            Qwen/Qwen3-8B@9c925d64d72725edaf89...
"""

from __future__ import annotations

from pathlib import Path

from graft.config import Config
from graft.files import write_json
from graft.models.io.hub import origin_of
from graft.models.io.load import read_json
from graft.train.run_dir.checkpoint import latest_model
from graft.train.teachers.paths import teacher_paths

TEACHER_FILE = "teachers.json"
"""In a run's folder: {"given": teachers of the recipe by name, "used": checkpoint or commit of each}."""


def pin_teachers(config: Config, folder: Path, *, may_write: bool = True) -> Config:
    """The recipe with the checkpoints and commits that the run in `folder` began with.

    The first call records them; other teachers in the recipe are recorded anew.
    """
    paths, file = teacher_paths(config), folder / TEACHER_FILE
    if not paths:
        return config
    known = read_json(file) if file.exists() else {}
    used: dict[str, str] = known.get("used", {})
    if known.get("given") != paths:
        used = {name: _exactly(value) for name, value in paths.items()}
        if may_write:
            write_json(file, {"given": paths, "used": used})
    named = {**config.distill.teachers, **used}
    is_one = isinstance(config.distill.teacher, str)
    return config.changed({"distill.teacher": named["teacher"] if is_one else named})


def _exactly(value: str) -> str:
    path = latest_model(value)
    if Path(value).exists():
        return str(path)
    origin = origin_of(path)
    return str(path) if origin is None else "@".join(origin)
