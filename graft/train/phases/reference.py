"""The frozen policy of a phase's KL term: the weights that the phase starts from."""

from __future__ import annotations

from typing import Any

from graft.files import make_staging, put_in_place
from graft.models.policy import save_policy
from graft.train.model import load_reference
from graft.train.phases.context import RunContext
from graft.train.run_dir.folder import out_of_disk


def frozen_policy(run: RunContext, name: str, is_new: bool) -> Any:
    """A copy of the policy, kept in the run's folder `name` for every resumption of the phase."""
    if is_new:
        keep_policy(run, name)
    return load_reference(run.folder.path / name, run.components.policy)


def keep_policy(run: RunContext, name: str) -> None:
    """Save the policy's present weights in the run's folder `name`."""
    path = run.folder.path / name
    with out_of_disk(run.folder.path):
        staging = make_staging(path) if run.processes.is_first else None
        source = run.writer.source or None
        save_policy(run.components.policy, staging, special={}, source=source)
        if staging is not None:
            put_in_place(staging, path)
        run.processes.barrier("the reference model")
