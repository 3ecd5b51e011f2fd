"""What a recipe needs of this machine: memory, space for checkpoints, packages of its trackers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from graft.config import Config, RunSection
from graft.models.device_choice import choose_device, choose_dtype
from graft.models.lora.training import num_trained
from graft.registry import resolve
from graft.train.memory.device_memory import device_memory_of
from graft.train.memory.footprint import gigabytes, num_parameters, optimizer_state_bytes
from graft.train.memory.plan import has_reference, plan_memory, remedy
from graft.train.model import is_transformers_only, recipe_shape, source_of
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.run_dir.trackers import TRACKERS

NARROW = 0.9
"""Share of the memory above which a plan that fits is called close."""


def memory_check(config: Config, is_split: bool) -> tuple[Check, bool]:
    """Whether the recipe fits into one process; too little is a warning if the recipe has several."""
    if is_transformers_only(config, source_of(config)):
        return Check("memory", WARN, "not counted: the model has no native decoder"), True
    device = choose_device(config.model.device)
    dtype, _ = choose_dtype(config.model.dtype, device)
    shape, memory_here = recipe_shape(config), device_memory_of(device)
    memory = plan_memory(config, shape, dtype, memory_here)
    share = memory.total / max(memory.usable, 1)
    seen = (
        f"needs {gigabytes(memory.total)} of the {gigabytes(memory.usable)} that "
        f"{memory_here.name or device.type} has to use ({share:.0%})"
    )
    if memory.fits and share <= NARROW:
        return Check("memory", PASS, seen), True
    if memory.fits:
        return Check("memory", WARN, seen, "close: `graft plan RECIPE` shows what takes it"), True
    if is_split:
        return Check("memory", WARN, f"{seen} in one process"), False
    way_out = remedy(config, shape, dtype, memory_here)
    return Check(
        "memory", FAIL, seen, f"{way_out}, or split it over several devices with torchrun"
    ), False


def checkpoint_check(config: Config, run: RunSection) -> Check:
    """Checkpoints on the disk: those that are kept, the best one, and the one being written."""
    where = Path(run.dir).resolve()
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    seen = f"{gigabytes(free)} free at {where}"
    if is_transformers_only(config, source_of(config)):
        return Check("checkpoints", PASS, f"{seen}; checkpoints not counted")
    dtype, _ = choose_dtype(config.model.dtype, choose_device(config.model.device))
    shape, lora = recipe_shape(config), config.lora
    params = num_parameters(shape)
    if lora.rank:
        state = 12 * num_trained(shape, lora.rank, lora.targets)
    else:
        state = optimizer_state_bytes(params, dtype)
    one = params * dtype.itemsize + state
    kept = run.keep_last + 2
    needed = kept * one
    if has_reference(config) and not lora.rank:
        needed += params * dtype.itemsize
    seen += (
        f"; a checkpoint is {gigabytes(one)}, and up to {kept} are there at a time "
        f"({gigabytes(needed)})"
    )
    if free < 2 * one:  # the last one stays until the next is complete
        way_out = "free some space, or set run.dir to a larger disk"
        return Check("checkpoints", FAIL, seen, way_out)
    if free < needed:
        way_out = f"free some space, or lower run.keep_last={run.keep_last}"
        return Check("checkpoints", WARN, seen, way_out)
    return Check("checkpoints", PASS, seen)


def tracker_check(names: Sequence[str]) -> Check:
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    for name in names:
        resolve(name, TRACKERS, "tracker")
        try:
            import_module(modules.get(name, "graft"))
        except ImportError as error:
            way_out = f"pip install {name}, or leave it out of run.trackers"
            return Check("trackers", FAIL, f"{name} cannot be imported: {error}", way_out)
    return Check("trackers", PASS, ", ".join(["metrics.jsonl", *names]))
