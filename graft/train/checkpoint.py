"""Checkpoints: Hugging Face folders with the trainer's state beside the weights.

Each is written aside and renamed into place when it is complete, so the newest one that has its name
can be trusted. `rl-000040` holds the state *after* step 40 of the phase `rl`.

A run that trains adapters writes them into the folder `adapter`, in PEFT's form. The weights beside it
are the merged ones, so its checkpoints are models like any other; in a folder of their own, because
transformers would put an adapter that lies beside weights on its base a second time.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graft.models.load import read_json
from graft.models.save import save_model, sync_folder, write_json, write_whole
from graft.train.folder import out_of_disk
from graft.train.learner import Learner

PHASES = ("sft", "rl")
ACTION_NAMES = "actions.json"
"""Beside actions.safetensors: what its rows stand for."""
ADAPTER_FOLDER = "adapter"


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
        saved = torch.load(self.path / "trainer.pt", map_location="cpu", weights_only=False)
        learner.optimizer.load_state_dict(saved["optimizer"])
        if learner.critic is not None and learner.critic_optimizer is not None:
            learner.critic.load_state_dict(saved["critic"])
            learner.critic_optimizer.load_state_dict(saved["critic_optimizer"])
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


def latest_model(path: str) -> Path:
    """The model behind a path: a run folder's newest checkpoint, or the path itself."""
    found = checkpoints(Path(path) / "checkpoints")
    return found[-1].path if found else Path(path)


def action_names(source: Path | None) -> list[str]:
    """What the extra head rows of a checkpoint stand for; empty where it does not say."""
    file = None if source is None else source / ACTION_NAMES
    return [] if file is None or not file.exists() else read_json(file)["actions"]


def save_checkpoint(
    folder: Path,
    phase: str,
    step: int,
    learner: Learner,
    tokenizer: Any,
    state: Mapping[str, Any],
    *,
    keep_last: int,
    source: str = "",
    names: Sequence[str] = (),
) -> Checkpoint:
    """Write `folder/phase-step`, then forget what is neither recent nor best.

    `names` are those of the actions beyond the vocabulary, in the order of their head rows.
    """
    target = folder / f"{phase}-{step:06d}"
    aside = folder / f".{target.name}.partial"
    with out_of_disk(folder.parent):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            special = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
            special = {name: value for name, value in special.items() if value is not None}
            save_model(learner.policy, aside, special=special, source=source or None)
            tokenizer.save(aside)
            if names:
                write_json(aside / ACTION_NAMES, {"actions": list(names)})
            trainer: dict[str, Any] = {
                "optimizer": learner.optimizer.state_dict(),
                "random": get_random_states(),
            }
            if learner.critic is not None and learner.critic_optimizer is not None:
                trainer["critic"] = learner.critic.state_dict()
                trainer["critic_optimizer"] = learner.critic_optimizer.state_dict()
            if learner.lora is not None:
                learner.lora.save(aside / ADAPTER_FOLDER)
            if learner.anchor is not None:
                trainer["anchor"] = {name: value.cpu() for name, value in learner.anchor.items()}
            write_whole(aside / "trainer.pt", lambda to: _save(trainer, to))
            write_json(aside / "state.json", {"phase": phase, "step": step, **state})
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
            sync_folder(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    _forget(folder, keep_last)
    return Checkpoint(target, phase, step)


def _forget(folder: Path, keep_last: int) -> None:
    """Keep the last few, the best by held-out score, and nothing else."""
    everything = checkpoints(folder)
    scored = [(c.state().get("score"), c) for c in everything]
    known = [(score, c.step, c) for score, c in scored if score is not None]
    best = max(known, key=lambda item: item[:2])[2] if known else None
    for old in everything[:-keep_last]:
        if best is None or old.path != best.path:
            shutil.rmtree(old.path, ignore_errors=True)


def _save(values: dict[str, Any], path: Path) -> None:
    try:
        torch.save(values, path)
    except RuntimeError as error:  # how torch's own writer reports a disk that takes no more
        raise OSError(f"torch could not write {path.name}: {error}") from error


def get_random_states() -> dict[str, Any]:
    """Graft's own draws are keyed and need none of these; a user's env or reward may."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
