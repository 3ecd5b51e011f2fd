"""The last phase: scores after training, and `summary.json`."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Any

import torch

from graft.models.io.load import read_json
from graft.train.model import MODEL_FILE
from graft.train.phases.context import RunContext
from graft.train.phases.evaluation import evaluate_held_out, precision
from graft.train.run_dir.checkpoint import checkpoints
from graft.version import __version__


def summarise(run: RunContext) -> dict[str, Any]:
    """Evaluate once more and write the summary of the run."""
    after = evaluate_held_out(run, "after") if run.config.task.env else {}
    error = run.state.get("standard_error", {})
    seconds = run.state["seconds"].items()
    policy = run.components.policy
    values: dict[str, Any] = {
        "name": run.config.run.name,
        "before": run.state.get("before", {}),
        "after": after,
        "leakage": run.state.get("leakage", {}),
        **({"standard_error": error | precision(run, "after")} if after else {}),
        **({"sft": run.state["sft"]} if run.state.get("sft") else {}),
        "seconds": round(time.perf_counter() - run.started, 1),
        "seconds_per_phase": {name: round(value, 1) for name, value in seconds},
        "parameters": sum(p.numel() for p in policy.parameters()),
        "processes": run.processes.world,
        "checkpoint": str(checkpoints(run.folder.checkpoints)[-1].path),
        **_hub_model(run),
        **({"kv": run.config.engine.kv} if run.config.engine.rounds_kv else {}),
        "versions": versions(),
        "machine": machine(policy.device),
    }
    if run.processes.is_first:
        run.folder.summary(values)
    return values


def _hub_model(run: RunContext) -> dict[str, Any]:
    """{"model": {"name": ..., "commit": ...}} where the run began with a model of the hub."""
    file = run.folder.path / MODEL_FILE
    known = read_json(file) if file.exists() else {}
    return {"model": {key: known[key] for key in ("name", "commit")}} if known else {}


def versions() -> Mapping[str, str]:
    return {"graft": __version__, "torch": torch.__version__, "python": platform.python_version()}


def machine(device: torch.device) -> Mapping[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "device": name or device.type,
        "threads": torch.get_num_threads(),
    }
