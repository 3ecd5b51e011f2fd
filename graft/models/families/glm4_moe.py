"""GLM-4.5 and 4.6: a sigmoid router with corrections, a shared expert, plain MLPs in the first layers, and
rotation of a part of each head."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import read_count, read_number, read_switch
from graft.models.families.family import Config, Family
from graft.models.shape import Experts, ModelShape


def read(config: Config) -> dict[str, Any]:
    ff = read_count(config, "moe_intermediate_size", 1408)
    shared = read_number(config, "n_shared_experts", 1)
    # transformers reads either name
    count = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
    experts = Experts(
        count=read_count(config, count, 128),
        top_k=read_count(config, "num_experts_per_tok", 8),
        ff=ff,
        renormalise=read_switch(config, "norm_topk_prob", True),
        router="sigmoid",
        scaling=float(read_number(config, "routed_scaling_factor", 1.0)),
        groups=read_count(config, "n_group", 1),
        top_groups=read_count(config, "topk_group", 1),
        shared_ff=int(shared) * ff,
    )
    first = int(read_number(config, "first_k_dense_replace", 1))
    return {
        "qk_norm": read_switch(config, "use_qk_norm"),
        "qkv_bias": read_switch(config, "attention_bias"),
        "experts": experts,
        "dense_layers": tuple(range(min(first, read_count(config, "num_hidden_layers")))),
    }


def write(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    assert experts is not None
    return {
        "attention_bias": shape.qkv_bias,
        "use_qk_norm": shape.qk_norm,
        "partial_rotary_factor": shape.rotary_share,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ff,
        "norm_topk_prob": experts.renormalise,
        "routed_scaling_factor": experts.scaling,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "n_shared_experts": experts.shared_ff // experts.ff,
        "first_k_dense_replace": len(shape.dense_layers),
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    read,
    write,
    has_experts=True,
    experts={"router": "sigmoid"},
    positions=131_072,
    rotary_share=0.5,
    norm_eps=1e-5,
    has_later_layers=True,
    switches={"qk_norm": False},
)
