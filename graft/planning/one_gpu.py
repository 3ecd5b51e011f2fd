"""The memory that a recipe needs on one GPU, which need not be here."""

from __future__ import annotations

import torch

from graft.config import Config
from graft.models.shape import ModelShape
from graft.train.memory.device_memory import DeviceMemory
from graft.train.memory.plan import MemoryPlan, plan_memory

SIZES = (24, 48, 80, 141)
"""Gigabytes of the usual GPUs: A10 or RTX 4090, L40S or RTX A6000, A100 or H100, H200."""


def plan_on_one_gpu(config: Config, shape: ModelShape, size: int) -> MemoryPlan:
    """The plan on a GPU of `size` GB with kernels, of a recipe that may be written for several."""
    alone = {"parallel.tp": 1, "parallel.offload": False, "engine.tp": 1, "cluster.address": ""}
    name = config.model.dtype
    dtype = torch.bfloat16 if name == "auto" else getattr(torch, name)
    device_memory = DeviceMemory(torch.device("cuda"), size * 10**9, fused=True)
    return plan_memory(config.changed(alone), shape, dtype, device_memory)


def least_memory(config: Config, shape: ModelShape) -> int:
    """Bytes that the recipe needs at least: with the smallest micro-batch and room for one attempt.

    These are the sizes that a plan chooses where nothing fits.
    """
    return plan_on_one_gpu(config, shape, 1).total


def fitting_gpus(config: Config, shape: ModelShape) -> list[int]:
    """Those of `SIZES` on which the recipe fits."""
    return [size for size in SIZES if plan_on_one_gpu(config, shape, size).fits]
