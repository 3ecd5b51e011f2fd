"""A finished LoRA adapter in PEFT's format, which is merged into its base.

    W = W0 + s B A        A [r, in], B [out, r], s = alpha / r

Adapters in training are `lora.training.Lora`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.models.io.load import (
    ModelFileError,
    StoredModel,
    UnsupportedModel,
    open_tensors,
    read_json,
    read_tensor,
)
from graft.models.io.tensor_names import expert_parts, hf_rows
from graft.models.io.tensors import check_finite
from graft.models.lora.files import ADAPTER, ADAPTER_CONFIG
from graft.models.lora.training import PREFIX


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank changes of some weights, by Hugging Face's tensor names: (A [r, in], B [out, r])."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float
    origin: str

    def check(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise unless every change fits a weight of the base."""
        for name, (down, up) in self.pairs.items():
            if name not in sizes:
                raise ModelFileError(
                    f"{self.origin} changes {name}, which the base model does not have; pass the "
                    f"base it was trained on"
                )
            if down.shape[0] != up.shape[1] or (up.shape[0], down.shape[1]) != sizes[name]:
                raise ModelFileError(
                    f"{self.origin}: the change of {name} is {list(up.shape)} x {list(down.shape)}, "
                    f"and the base's weight is {list(sizes[name])}; pass the base it was trained on"
                )

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """W0 + s B A in fp32; a weight without a change is returned unchanged."""
        if name not in self.pairs:
            return weight
        down, up = self.pairs[name]
        return torch.addmm(weight.float(), up.float(), down.float(), alpha=self.scale)

    def merge_into(self, stored: StoredModel) -> StoredModel:
        """The stored model with these changes; they may be of one expert in a tensor of all."""
        parts, rows = expert_parts(stored.shape), hf_rows(stored.shape)
        sizes = dict(stored.sizes)
        for name, inside in parts.items():
            if name in sizes:
                total, width = rows[name].flat(torch.empty(sizes[name], device="meta")).shape
                sizes |= {
                    part: (len(range(total)[where.rows]), width) for part, where in inside.items()
                }
        self.check(sizes)

        def read(name: str) -> Tensor:
            weight = stored.read(name)
            inside = {
                part: where for part, where in parts.get(name, {}).items() if part in self.pairs
            }
            if not inside:
                return self.merge(name, weight)
            whole = rows[name].flat(weight).to(torch.float32, copy=True)
            for part, where in inside.items():
                whole[where.rows] = self.merge(part, whole[where.rows])
            return rows[name].view(whole)

        return replace(stored, read=read)


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a PEFT folder; variants of LoRA other than W0 + s B A are refused."""
    config = read_json(folder / ADAPTER_CONFIG)
    file = folder / ADAPTER
    if not file.exists():
        raise ModelFileError(f"'{folder}' has {ADAPTER_CONFIG} but no {ADAPTER}; copy it there")
    tensors: dict[str, Tensor] = {}
    with open_tensors(file) as stored:
        for name in stored.keys():  # noqa: SIM118  # not a mapping
            tensors[name] = read_tensor(stored, name, folder)
    check_finite(tensors, f"'{file}'")
    return make_adapter(tensors, config, f"'{file}'")


def make_adapter(tensors: Mapping[str, Tensor], config: Mapping[str, Any], origin: str) -> Adapter:
    """Make an adapter from PEFT's tensor names and config.

    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" and its lora_B are the change of
    "model.layers.0.mlp.up_proj.weight".
    """
    for entry in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out"):
        if config.get(entry):
            raise UnsupportedModel(f"{origin}: {entry}={config[entry]!r} is not merged here")
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(f"{origin}: bias={config['bias']!r} is not merged here")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ModelFileError(
            f"{origin}: r={rank!r}, lora_alpha={alpha!r}: both must be numbers, because "
            f"they give the scale of the adapters; correct {ADAPTER_CONFIG}"
        )
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(PREFIX).replace(".default.weight", ".weight")
        module, found, half = plain.removesuffix(".weight").rpartition(".lora_")
        if not found or half not in ("A", "B") or tensor.ndim != 2:
            raise UnsupportedModel(
                f"{origin}: {name} is not A or B of an adapter, so it is not merged"
            )
        if tensor.shape[half == "B"] != rank:
            raise ModelFileError(
                f"{origin}: {name} is {list(tensor.shape)}, and the config says r={rank}"
            )
        halves.setdefault(f"{module}.weight", {})[half] = tensor
    if alone := [name for name, pair in halves.items() if len(pair) != 2]:
        raise ModelFileError(
            f"{origin} has only one of A and B for {alone[0]}; copy the whole adapter file"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter({name: (p["A"], p["B"]) for name, p in halves.items()}, scale, origin)
