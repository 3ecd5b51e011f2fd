"""Checkpoints: Hugging Face folders with the trainer's state beside the weights.

Each is written aside and renamed into place when it is complete, so the newest one that has its name
can be trusted. `rl-000040` holds the state *after* step 40 of the phase `rl`.

A run that trains adapters writes them into the folder `adapter`, in PEFT's form. The weights beside it
are the merged ones, so its checkpoints are models like any other; in a folder of their own, because
transformers would put an adapter that lies beside weights on its base a second time.

What the optimizer remembers lies in the folder `trainer`, by names that know no layout (see
`train.run_dir.optimizer_state`): the number of processes may change from one resumption to the next.
All processes write it, each its own part; the first one writes the rest, and renames the folder when
all are done.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graft.models.io.hub import find_model
from graft.models.io.load import read_json
from graft.train.learner import Learner
from graft.train.run_dir.folder import RunStopped
from graft.train.run_dir.names import named
from graft.train.run_dir.optimizer_state import load_tensors, tensors_of

PHASES = ("sft", "rl")
ACTION_NAMES = "actions.json"
"""Beside actions.safetensors: what its rows stand for."""
ADAPTER_FOLDER = "adapter"
TRAINER_FOLDER = "trainer"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    phase: str
    step: int

    def state(self) -> dict[str, Any]:
        """What the loop wrote down: scores, cursors, metrics so far."""
        return json.loads((self.path / "state.json").read_text(encoding="utf-8"))

    def restore(self, learner: Learner) -> None:
        """Optimizers, critic and random states (the policy's weights were loaded with the model, its
        adapters when they were made)."""
        if not (self.path / TRAINER_FOLDER).is_dir():
            raise RunStopped(
                f"{self.path} has no folder {TRAINER_FOLDER!r}: an older version of graft wrote it. Its "
                "weights are fine: start a new run with model.path set to it"
            )
        with learner.processes.together("everybody's part of the optimizer's state"):
            load_tensors(
                tensors_of(learner), self.path / TRAINER_FOLDER, alone=learner.processes.world == 1
            )
        saved = torch.load(self.path / "trainer.pt", map_location="cpu", weights_only=False)
        learner.optimizer.resume(saved["steps"])
        if learner.critic_optimizer is not None:
            learner.critic_optimizer.resume(saved["critic_steps"])
        if learner.anchor is not None:
            learner.anchor = {
                name: value.to(learner.policy.device) for name, value in saved["anchor"].items()
            }
        set_random_states(saved["random"])


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All complete ones, oldest first."""
    found: list[Checkpoint] = []
    for state in folder.glob("*-*/state.json"):
        phase, _, step = state.parent.name.partition("-")
        if phase in PHASES and step.isdigit():
            found.append(Checkpoint(state.parent, phase, int(step)))
    return sorted(found, key=lambda c: (PHASES.index(c.phase), c.step))


def located(path: str, weights: bool = True) -> Path:
    """The run, checkpoint or model that a person means: here, or the copy of a model on the hub.

    weights   False: the hub's configs and tokenizer will do
    """
    where = named(path)
    return where if where.exists() else find_model(path, weights)


def latest_model(path: str, weights: bool = True) -> Path:
    """The model behind a path, a run's name or one on the hub: of a run its newest checkpoint."""
    where = located(path, weights)
    found = checkpoints(where / "checkpoints")
    return found[-1].path if found else where


def action_names(source: Path | None) -> list[str]:
    """What the extra head rows of a checkpoint stand for; empty where it does not say."""
    file = None if source is None else source / ACTION_NAMES
    return [] if file is None or not file.exists() else read_json(file)["actions"]


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
