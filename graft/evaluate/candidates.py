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

from graft.config import ConfigError
from graft.models.io.gguf_read import open_gguf
from graft.models.io.hub import origin_of
from graft.models.io.load import INDEX, ModelFileError, read_config, read_json, shape_of
from graft.models.shape import ARCHITECTURES
from graft.train.run_dir.checkpoint import PHASES, checkpoints


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to evaluate: a row of the table."""

    name: str
    path: Path
    weights: str
    """A short name for what the files hold, other than where they lie."""


def run_behind(path: Path) -> Path | None:
    """The run that a path is, or that it is a checkpoint of."""
    if not path.exists():
        raise ConfigError(
            f"no run or model at '{path}': there is no such folder or file, nor a run of that name in runs/"
        )
    if (path / "checkpoints").is_dir() or (path / "config.yaml").is_file():
        return path
    above = path.absolute().parent
    is_checkpoint = (path / "state.json").is_file() and above.name == "checkpoints"
    return above.parent if is_checkpoint else None


def model_name(path: Path) -> str:
    """What to call a model: its file, its folder, or its name on the hub where it is a copy of one."""
    if (named := origin_of(path)) is not None:
        return named[0].rpartition("/")[2]
    return path.stem if path.is_file() else path.absolute().name


def candidates(
    path: Path, run: Path | None, every: bool, say: Callable[[str], None]
) -> list[Candidate]:
    """The models to evaluate, oldest first, each found to be readable."""
    if run is None:
        check_readable(path)
        return [Candidate(model_name(path), path, fingerprint(path))]
    if path != run:
        check_readable(path)
        return [Candidate(path.absolute().name, path, fingerprint(path))]
    listed = checkpoints(run / "checkpoints")
    if not listed:
        raise ConfigError(f"'{run}' has no complete checkpoint yet; try again after its first")
    found: list[Candidate] = []
    for checkpoint in listed if every else listed[-1:]:
        try:
            check_readable(checkpoint.path)
            found.append(
                Candidate(checkpoint.path.name, checkpoint.path, fingerprint(checkpoint.path))
            )
        except (ModelFileError, OSError) as error:
            if not is_gone(checkpoint.path):
                raise ModelFileError(
                    f"checkpoint {checkpoint.path.name} cannot be read: {error}. Remove its folder, "
                    f"or evaluate the others one by one: graft eval {run}/checkpoints/NAME"
                ) from error
            say(f"{checkpoint.path.name} was deleted meanwhile; skipped")
    if not found:
        raise ConfigError(f"the checkpoints of '{run}' were deleted meanwhile; try again")
    return found


def is_gone(path: Path, patience: float = 1.0) -> bool:
    """Whether a checkpoint that was listed has been deleted: file by file, so it may take a moment."""
    waited_until = time.monotonic() + patience
    while path.exists():
        if time.monotonic() > waited_until:
            return False
        time.sleep(0.05)
    return True


def check_readable(path: Path) -> None:
    """Complain about files that are missing, cut off or of an unknown kind; weights are not read."""
    if path.suffix == ".gguf":
        open_gguf(path)
        return
    config = read_config(path)
    if config.get("model_type", "") in ("", *ARCHITECTURES):  # others only transformers knows
        shape_of(config, path / "config.json")
    files = set(path.glob("*.safetensors"))
    if (path / INDEX).exists():
        files |= {path / shard for shard in read_json(path / INDEX).get("weight_map", {}).values()}
    if not any(file.name.startswith("model") for file in files):
        raise ModelFileError(f"'{path}' holds no model*.safetensors; save or download it again")
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):  # reads the header, and that the file is as long
                pass
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"'{file}' is not a whole safetensors file ({error}); save or download it again"
            ) from error


def fingerprint(path: Path) -> str:
    """What tells these weights from others of the same name, wherever the folder is moved to.

    A checkpoint's state holds the run's clock, which no second run repeats. Of other models the
    files' sizes and times have to do: they are too large to be read for this.
    """
    if (path / "state.json").is_file():
        seen = (path / "state.json").read_bytes()
    else:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        seen = json.dumps(stats).encode()
    return blake2b(seen, digest_size=8).hexdigest()


def place(name: str) -> tuple[int, int, str]:
    """Where a row stands: untrained models, then the warm-up, then RL, by step."""
    phase, _, step = name.partition("-")
    with suppress(ValueError):
        return PHASES.index(phase) + 1, int(step), name
    return 0, 0, name
