"""GPUs, the links between them, and public models by their usual names: h100, 8B.

n GPUs of one group, g of them in each node, k nodes; S bytes that all of them need at the end

Every GPU holds a part and gathers the rest. Inside a node it receives S (n-1)/n over NVLink; a node
receives S (k-1)/k from other nodes through the network cards of its g members. Both run at once, and the
slower one decides. 16 GB among 16 H100s in two nodes:

    NVLink   16 GB x 15/16 / 450 GB/s      = 33 ms
    network  16 GB x 1/2 / (8 x 50 GB/s)   = 20 ms
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from graft.config import ConfigError
from graft.models.io.hub_names import split_name
from graft.models.io.load import read_config, shape_of
from graft.models.parallel.layout import check_sizes
from graft.models.shape import ModelShape, UnsupportedModel
from graft.planning.step_time import ROOFS
from graft.spelling import nearest
from graft.train.memory.device_memory import DeviceMemory

NODE = 8
"""GPUs that NVLink connects; the network connects nodes."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory and speed of one GPU, and of its links to others."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes read per second."""
    flops: float
    """bf16 products per second."""
    nvlink: float = 450e9
    """Bytes per second, in each direction."""
    network: float = 50e9
    """The same to GPUs of other nodes, with one network card per GPU."""

    def gather(self, size: float, ranks: int, *, per_node: int = NODE) -> float:
        """Seconds until each of `ranks` GPUs, `per_node` in a node, holds all `size` bytes.

        A reduce-scatter takes as long, and an all-reduce is both.
        """
        if ranks == 1:
            return 0.0
        members = min(ranks, per_node)
        nodes = -(-ranks // per_node)
        inside = size * (ranks - 1) / ranks / self.nvlink if members > 1 else 0.0
        return max(inside, size * (nodes - 1) / nodes / (members * self.network))

    @property
    def device_memory(self) -> DeviceMemory:
        return DeviceMemory(torch.device("cuda"), int(self.memory), fused=True, name=self.name)


GPUS = {
    "h200": Gpu("H200", 141e9, *ROOFS["H200"]),
    "h100": Gpu("H100", 80e9, *ROOFS["H100"]),
    "a100": Gpu("A100", 80e9, 1.9e12, 253e12, nvlink=300e9, network=25e9),
    "h20": Gpu("H20", 96e9, 3.8e12, 138e12),
}
"""Roofs as in `ROOFS`; an H20, whose products are slow for its power, is assumed to reach 0.93 of them."""


def _qwen3(width: int, layers: int, heads: int, ff: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        "qwen3", 151_936, width, layers, heads, 8, 128, ff, tied, rope_theta=1e6, max_positions=40_960
    )  # fmt: skip


def _qwen25(
    width: int, layers: int, heads: int, kv_heads: int, ff: int, *, head_dim: int = 128,
    tied: bool = True, vocab_size: int = 151_936,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        "qwen2", vocab_size, width, layers, heads, kv_heads, head_dim, ff, tied, qk_norm=False,
        qkv_bias=True, rope_theta=1e6, max_positions=32_768,
    )  # fmt: skip


SHAPES = {
    "135M": ModelShape(
        "llama", 49_152, 576, 30, 9, 3, 64, 1536, True, False,
        norm_eps=1e-5, rope_theta=1e5, max_positions=8192,
    ),
    "0.5B": _qwen25(896, 24, 14, 2, 4864, head_dim=64),
    "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.5B": _qwen25(1536, 28, 12, 2, 8960),
    "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "3B": _qwen25(2048, 36, 16, 2, 11_008),
    "4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "7B": _qwen25(3584, 28, 28, 4, 18_944, tied=False, vocab_size=152_064),
    "8B": _qwen3(4096, 36, 32, 12_288),
    "14B": _qwen3(5120, 40, 40, 17_408),
    "32B": _qwen3(5120, 64, 64, 25_600),
    "70B": ModelShape(
        "llama", 128_256, 8192, 80, 64, 8, 128, 28_672, False, False,
        norm_eps=1e-5, rope_theta=5e5, max_positions=131_072,
    ),
}  # fmt: skip
"""135M is SmolLM2, 70B Llama 3, 0.5B, 1.5B, 3B and 7B Qwen2.5, the others Qwen3. Numbers: vocabulary, width,
layers, heads, KV heads, size of a head, MLP; for Qwen2.5 width, layers, heads, KV heads, MLP; for Qwen3
width, layers, heads, MLP."""


def shape_named(name: str) -> ModelShape:
    """A public shape by its size, or the one of a Hugging Face folder, run or checkpoint."""
    by_name = {known.lower(): shape for known, shape in SHAPES.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    if Path(name).is_dir() or split_name(name) is not None:
        from graft.train.run_dir.checkpoint import latest_model  # imports the whole learner

        folder = latest_model(name, weights=False)
        return shape_of(read_config(folder), folder / "config.json")
    hint = nearest(name.upper(), list(SHAPES))
    meant = f"did you mean {hint}? " if hint else ""
    raise ConfigError(
        f"--shape {name}: neither a known size nor a model's folder; {meant}"
        f"known: {', '.join(SHAPES)}"
    )


def tp_sizes(shape: ModelShape) -> list[int]:
    """Ways to split layers within a node: every GPU gets whole heads, KV heads and MLP columns."""
    smallest = math.gcd(shape.heads, shape.kv_heads, shape.ff)
    return [tp for tp in (1, 2, 4, 8) if smallest % tp == 0]


def can_shard(shape: ModelShape, gpus: int, tp: int) -> bool:
    """Whether a learner of `gpus` GPUs, `tp` of which split each layer, accepts this shape."""
    if gpus % tp:
        return False
    try:
        check_sizes(shape, gpus // tp, tp)
    except UnsupportedModel:
        return False
    return True


def runs_under_torchrun(gpus: int) -> bool:
    """torchrun starts the same number of processes on every node: part of one node, or whole nodes."""
    return gpus <= NODE or gpus % NODE == 0
