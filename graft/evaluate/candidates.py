"""The models that an evaluation measures: a run's checkpoints, one of them, or a plain model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from safetensors import SafetensorError, safe_open

from graft.config import ConfigError, bundled_recipes
from graft.models.io.gguf_read import open_gguf
from graft.models.io.hub import origin_of
from graft.models.io.load import INDEX, ModelFileError, hub_hint, read_config, read_index, shape_of
from graft.models.shape import ARCHITECTURES
from graft.spelling import nearest, suggestion
from graft.train.run_dir.checkpoint import checkpoints
from graft.train.run_dir.names import RUNS, is_run
from graft.train.run_dir.trackers import PHASES


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to evaluate: a row of the table."""

    name: str
    path: Path
    weights: str
    """A short digest of the weights, independent of their path."""


def _meant(path: Path) -> str:
    """The nearest run, else the nearest recipe, which makes one, else how a model of the hub is written."""
    runs = [folder.name for folder in Path(RUNS).glob("*") if is_run(folder)]
    if hint := suggestion(path.name, runs):
        return hint
    if recipe := nearest(str(path), bundled_recipes()):
        return f" {recipe!r} is a recipe: `graft train {recipe}` makes a run"
    return f" `graft runs` lists them; {hub_hint(str(path))}"


def run_behind(path: Path) -> Path | None:
    """The run at a path, or the run that a checkpoint belongs to."""
    if not path.exists():
        raise ConfigError(
            f"no run or model at '{path}': there is no such folder or file, nor a run of that name in "
            f"{RUNS}/;{_meant(path)}"
        )
    if (path / "checkpoints").is_dir() or (path / "config.yaml").is_file():
        return path
    above = path.absolute().parent
    is_checkpoint = (path / "state.json").is_file() and above.name == "checkpoints"
    return above.parent if is_checkpoint else None


def recipe_of(run: Path | None) -> str:
    """The recipe in a run's folder; "" where there is none."""
    file = None if run is None else run / "config.yaml"
    return "" if file is None or not file.is_file() else str(file)


def model_name(path: Path) -> str:
    """The display name of a model: its file, its folder, or its name on the hub."""
    if (named := origin_of(path)) is not None:
        return named[0].rpartition("/")[2]
    return path.stem if path.is_file() else path.absolute().name


def candidates(
    path: Path, run: Path | None, every: bool, say: Callable[[str], None]
) -> list[Candidate]:
    """The models to evaluate, oldest first; each one is checked to be readable."""
    if run is None or path != run:
        check_readable(path)
        name = model_name(path) if run is None else path.absolute().name
        return [Candidate(name, path, fingerprint(path))]
    listed = checkpoints(run / "checkpoints")
    if not listed:
        raise ConfigError(f"'{run}' has no complete checkpoint yet; try again after its first")
    found: list[Candidate] = []
    for folder in [checkpoint.path for checkpoint in (listed if every else listed[-1:])]:
        try:
            check_readable(folder)
            found.append(Candidate(folder.name, folder, fingerprint(folder)))
        except (ModelFileError, OSError) as error:
            if not is_gone(folder):
                raise ModelFileError(
                    f"checkpoint {folder.name} cannot be read: {error}. Remove its folder, or evaluate "
                    f"the others one by one: graft eval {run}/checkpoints/NAME"
                ) from error
            say(f"{folder.name} was deleted in the meantime; skipped")
    if not found:
        raise ConfigError(f"the checkpoints of '{run}' were deleted in the meantime; try again")
    return found


def is_gone(path: Path, patience: float = 1.0) -> bool:
    """Whether a listed checkpoint has been deleted; deletion goes file by file and may take a moment."""
    waited_until = time.monotonic() + patience
    while path.exists():
        if time.monotonic() > waited_until:
            return False
        time.sleep(0.05)
    return True


def check_readable(path: Path) -> None:
    """Refuse files that are missing, truncated or of an unknown kind, without reading the weights."""
    if path.suffix == ".gguf":
        open_gguf(path)
        return
    config = read_config(path)
    if config.get("model_type", "") in ("", *ARCHITECTURES):  # transformers reads other families
        shape_of(config, path / "config.json")
    files = set(path.glob("*.safetensors"))
    if (path / INDEX).exists():
        files |= {path / shard for shard in read_index(path).values()}
    if not any(file.name.startswith("model") for file in files):
        raise ModelFileError(f"'{path}' holds no model*.safetensors; save or download it again")
    for file in sorted(files):
        try:
            if not file.is_file():
                raise OSError("it is not a file")
            with safe_open(file, framework="pt"):  # reads the header and checks the file's length
                pass
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"'{file}' is not a whole safetensors file ({error}); save or download it again"
            ) from error


def fingerprint(path: Path) -> str:
    """A digest that distinguishes these weights from others of the same name, wherever the folder is.

    A checkpoint's state holds the run's clock, which no second run repeats. For other models the sizes
    and times of the files are used, since reading the weights would take too long.
    """
    if (path / "state.json").is_file():
        seen = (path / "state.json").read_bytes()
    else:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        seen = json.dumps(stats).encode()
    return blake2b(seen, digest_size=8).hexdigest()


def place(name: str) -> tuple[int, int, str]:
    """Sort key of a row: untrained models, then the warm-up, then RL, by step."""
    phase, _, step = name.partition("-")
    with suppress(ValueError):
        return PHASES.index(phase) + 1, int(step), name
    return 0, 0, name
