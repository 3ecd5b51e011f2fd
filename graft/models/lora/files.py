"""Adapters on disk: a folder in PEFT's format, with the rows of actions in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graft.files import sync, write_json
from graft.models.extra_actions import ACTIONS, ROWS
from graft.models.io.hub_names import split_name
from graft.models.io.load import ModelFileError, open_tensors, read_json
from graft.models.io.save import save_rows, save_tensors
from graft.models.io.tensors import check_finite
from graft.models.lora.training import Lora

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names for the two files of an adapter."""
FINGERPRINT = "base"
"""Metadata key of the adapter file: a hash of the weights it was trained on."""


def save_adapters(lora: Lora, folder: Path) -> None:
    """Write the adapters in PEFT's format, in fp32, so that loading restores them exactly."""
    folder.mkdir(parents=True, exist_ok=True)
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    named = None if Path(lora.origin).exists() else split_name(lora.origin)
    name, revision = named or (lora.origin or None, None)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.names,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    save_tensors(lora.peft_tensors(), folder / ADAPTER, **{FINGERPRINT: lora.fingerprint})
    save_rows(lora.rows, folder)
    write_json(folder / ADAPTER_CONFIG, config)
    sync(folder)


@torch.no_grad()
def load_adapters(lora: Lora, folder: Path) -> None:
    """Read what `save_adapters` wrote for the same targets and rank, and merge."""
    file = folder / ADAPTER
    if not file.exists():
        raise ModelFileError(
            f"'{folder}' has no {ADAPTER}: the trained adapters are gone; resume from "
            f"another checkpoint, or start a new run"
        )
    with open_tensors(file) as stored:
        metadata = stored.metadata() or {}
        found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    if metadata.get(FINGERPRINT, lora.fingerprint) != lora.fingerprint:
        raise ModelFileError(
            f"the adapters in '{folder}' were trained on other weights than those in "
            f"'{lora.origin}' now; restore the model they were trained on"
        )
    own = lora.peft_tensors()
    if lora.rows is not None:
        with open_tensors(folder / ACTIONS) as stored:
            found[ROWS], own[ROWS] = stored.get_tensor(ROWS), lora.rows
    check_finite(found, f"'{folder}'")
    wrong = [
        name
        for name in sorted(set(own) | set(found))
        if name not in own or name not in found or own[name].shape != found[name].shape
    ]
    if wrong:
        raise ModelFileError(
            f"'{file}' does not hold adapters of rank {lora.rank} for {', '.join(lora.names)}: "
            f"{wrong[0]} and {len(wrong) - 1} more differ; use the settings it was trained with"
        )
    for name, value in own.items():
        value.copy_(found[name])
    lora.merge()


def base_of(folder: Path) -> str:
    """The path of the model that the adapters in `folder` were trained on."""
    file = folder / ADAPTER_CONFIG
    if not file.exists():
        raise ModelFileError(
            f"'{file}' is missing: the trained adapters are gone; resume from another "
            f"checkpoint, or start a new run"
        )
    return named_base(read_json(file))


def named_base(config: Mapping[str, Any]) -> str:
    """The base that an adapter_config.json names: a path, or a hub name with its revision."""
    name, revision = str(config.get("base_model_name_or_path") or ""), config.get("revision")
    return f"{name}@{revision}" if name and revision and split_name(name) else name
