"""Qwen3 with experts (30B-A3B, 235B-A22B, Coder): a softmax router; some layers may have a plain MLP."""

from __future__ import annotations

from typing import Any

from graft.models.families import qwen3
from graft.models.families.entries import read_count, read_switch, wrong_entry
from graft.models.families.family import Config, Family
from graft.models.shape import Experts, ModelShape


def read(config: Config) -> dict[str, Any]:
    # transformers reads either name
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts = Experts(
        count=read_count(config, count, 128),
        top_k=read_count(config, "num_experts_per_tok", 8),
        ff=read_count(config, "moe_intermediate_size", 768),
        renormalise=read_switch(config, "norm_topk_prob"),
    )
    return {
        **{name: value for name, value in qwen3.read(config).items() if name != "head_dim"},
        "experts": experts,
        "dense_layers": read_dense_layers(config),
    }


def read_dense_layers(config: Config) -> tuple[int, ...]:
    """The layers that have a plain MLP."""
    plain, step = config.get("mlp_only_layers") or [], read_count(config, "decoder_sparse_step", 1)
    layers = read_count(config, "num_hidden_layers")
    if not isinstance(plain, list) or not all(isinstance(layer, int) for layer in plain):
        raise wrong_entry("mlp_only_layers", plain, "need a list of layer numbers")
    return tuple(i for i in range(layers) if i in plain or (i + 1) % step)


def write(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    if experts is None:  # a family of experts without any: read back it would not be this shape
        return qwen3.write(shape)
    return {
        **qwen3.write(shape),
        "num_experts": experts.count,
        "num_local_experts": experts.count,  # what newer readers look for
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ff,
        "norm_topk_prob": experts.renormalise,
        "mlp_only_layers": list(shape.dense_layers),
        "decoder_sparse_step": 1,
    }


FAMILY = Family(read, write, has_experts=True)
