"""Checkpoints: Hugging Face folders with the trainer's state beside the weights.

`rl-000040` holds the state *after* step 40 of the phase `rl`. It is written under a temporary name and
renamed when all processes have written their parts, so every checkpoint with a final name is whole.

    model.safetensors, ...   the weights, with adapters merged: an ordinary model
    adapter/                 of a run that trains adapters, in PEFT's form. A folder of its own, because
                             transformers would apply an adapter beside merged weights a second time
    trainer/                 the optimizer's state, under names that do not depend on the layout
                             (`optimizer_state`): a run may resume with another number of processes
    ahead/                   of a run that samples ahead, the episodes of the next steps: their tokens are of
                             older weights than these, so nothing could sample them again
                             and counts and random states (`small_state`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from graft.files import write_text
from graft.models.io.hub import find_model
from graft.models.io.load import read_json
from graft.train.errors import RunStopped
from graft.train.learner import Learner
from graft.train.run_dir.metrics_log import episode_line
from graft.train.run_dir.names import named
from graft.train.run_dir.optimizer_state import find_unusable_state, load_tensors, tensors_of
from graft.train.run_dir.small_state import load_small, set_random_states
from graft.train.run_dir.trackers import PHASES, Phase
from graft.trust.bounds import parse_json, read_bytes
from graft.types import Episode

ACTION_NAMES = "actions.json"
"""Beside actions.safetensors: the names of its rows."""
ADAPTER_FOLDER = "adapter"
TRAINER_FOLDER = "trainer"
AHEAD_FOLDER = "ahead"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    phase: Phase
    step: int

    def state(self) -> dict[str, Any]:
        """State of the training loop: scores, cursors, alarms."""
        file = self.path / "state.json"
        try:
            found = parse_json(read_bytes(file), f"'{file}'")
        except ValueError as error:
            raise self._damaged(file, str(error)) from error
        if not isinstance(found, dict):
            raise self._damaged(file, f"it holds a {type(found).__name__}, not keys")
        return cast("dict[str, Any]", found)

    def _damaged(self, file: Path, why: str) -> RunStopped:
        return RunStopped(
            f"'{file}' is damaged: {why}. Move the folder '{self.path}' away, and the same command resumes "
            "from the checkpoint before it"
        )

    def ahead(self) -> dict[int, list[Episode]]:
        """Episodes of the steps that were sampled ahead when it was written, by step."""
        return {
            int(file.stem.removeprefix("step_")): [
                Episode.loads(line) for line in file.read_text(encoding="utf-8").splitlines()
            ]
            for file in sorted((self.path / AHEAD_FOLDER).glob("step_*.jsonl"))
        }

    def restore(self, learner: Learner) -> None:
        """Load optimizers, critic and random states; `build_run` loads the policy and its adapters."""
        trainer = self.path / TRAINER_FOLDER
        if not trainer.is_dir():
            raise RunStopped(
                f"{self.path} has no folder {TRAINER_FOLDER!r}, which holds the optimizer's state. To use "
                "its weights, start a new run with model.path set to it"
            )
        saved = load_small(trainer)
        learner.reference_moved = saved.get("reference_moved", False)
        with learner.processes.together("the optimizer's state of all ranks"):
            load_tensors(tensors_of(learner), trainer)
        found = find_unusable_state(learner, saved.get("anchor") or {})
        if learner.processes.any(bool(found), "whether the state of all ranks is finite"):
            why = found or "the part of another process is not finite"
            raise self._damaged(trainer, f"{why}, and training would spread it to every weight")
        learner.optimizer.resume(saved["steps"])
        if learner.critic_optimizer is not None:
            learner.critic_optimizer.resume(saved["critic_steps"])
        if learner.anchor is not None:
            learner.anchor = {
                name: value.to(learner.policy.device) for name, value in saved["anchor"].items()
            }
        set_random_states(saved["random"])


def write_ahead(folder: Path, ahead: Mapping[int, Sequence[Episode]]) -> None:
    """The episodes of later steps, for `Checkpoint.ahead`."""
    for step, episodes in ahead.items():
        (folder / AHEAD_FOLDER).mkdir(exist_ok=True)
        text = "".join(map(episode_line, episodes))
        write_text(folder / AHEAD_FOLDER / f"step_{step:06d}.jsonl", text)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All complete ones, oldest first."""
    found: list[Checkpoint] = []
    for state in folder.glob("*-*/state.json"):
        phase, _, step = state.parent.name.partition("-")
        if phase in PHASES and step.isdigit():
            found.append(Checkpoint(state.parent, phase, int(step)))
    return sorted(found, key=lambda c: (PHASES.index(c.phase), c.step))


def located(path: str, weights: bool = True) -> Path:
    """The folder of a run, checkpoint or model: a local path or run name, or a copy of a hub model.

    weights   False: the hub's configs and tokenizer are enough
    """
    where = named(path)
    return where if where.exists() else find_model(path, weights)


def latest_model(path: str, weights: bool = True) -> Path:
    """The model of a path, a run's name or a hub name; for a run its newest checkpoint."""
    where = located(path, weights)
    found = checkpoints(where / "checkpoints")
    return found[-1].path if found else where


def action_names(source: Path | None) -> list[str]:
    """Names of the extra head rows of a checkpoint; empty where it has none."""
    file = None if source is None else source / ACTION_NAMES
    return [] if file is None or not file.exists() else read_json(file)["actions"]
