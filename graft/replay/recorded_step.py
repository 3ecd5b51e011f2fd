"""A recorded step: episodes, advantages and log-probs, metrics, fingerprints."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from graft.train.run_dir.fingerprint import StepRecord, read_record
from graft.train.run_dir.token_log import TokenRow, learned_path, read_learned
from graft.trust.bounds import OutOfBounds, check_is_file
from graft.types import Episode

RowKey = tuple[int, int, int]
"""Line of an episode, leaf, context of the leaf."""


class CannotReplay(RuntimeError):
    """A part of the recorded step is missing; the message names it."""


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step."""

    run: Path
    number: int
    metrics: Mapping[str, float]

    @cached_property
    def episodes(self) -> list[Episode]:
        path = self.run / "episodes" / f"step_{self.number:06d}.jsonl"
        try:
            check_is_file(path)
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, OutOfBounds) as error:
            raise CannotReplay(
                f"the episodes of step {self.number} are missing ({path}), and without them it cannot "
                "be learned again; run.log_episodes=1 writes those of every step"
            ) from error
        found: list[Episode] = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(Episode.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CannotReplay(f"{path}, line {number} is not an episode: {error}") from error
        return found

    @cached_property
    def record(self) -> StepRecord | None:
        return read_record(self.run, self.number)

    @cached_property
    def rows(self) -> dict[RowKey, TokenRow] | None:
        try:
            return read_learned(learned_path(self.run, self.number))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
