"""Qwen3-Next: three of four layers are gated delta nets; attention has an output gate, norms are stored as
their distance from 1, and every layer has experts, with a shared one behind a gate of its own."""

from __future__ import annotations

from typing import Any

from graft.models.families import qwen3_moe
from graft.models.families.entries import read_count, read_switch, wrong_entry
from graft.models.families.family import Config, Family
from graft.models.shape import Experts, ModelShape, make_recurrence

FULL, LINEAR = "full_attention", "linear_attention"
HEAD_DIM, EVERY = 256, 4
SWITCHES = {"norm_offset": True, "attention_gate": True, "qk_norm": True}


def prepare(config: Config) -> Config:
    """The entries of all families: `read` takes those of the layers."""
    taken = ("layer_types", "full_attention_interval")
    others = {name: value for name, value in config.items() if name not in taken}
    return {"head_dim": HEAD_DIM, **others}


def read_hybrid(config: Config, by_key_head: bool) -> dict[str, Any]:
    """What every family of gated delta nets has."""
    is_biased = read_switch(config, "attention_bias")
    sizes = make_recurrence(
        kind="delta",
        taps=read_count(config, "linear_conv_kernel_dim", 4),
        key_heads=read_count(config, "linear_num_key_heads", 16),
        key_dim=read_count(config, "linear_key_head_dim", 128),
        value_heads=read_count(config, "linear_num_value_heads", 32),
        value_dim=read_count(config, "linear_value_head_dim", 128),
        by_key_head=by_key_head,
    )
    layers = read_recurrent_layers(config)
    if len(layers) == read_count(config, "num_hidden_layers"):
        entry = "full_attention_interval" if config.get("layer_types") is None else "layer_types"
        raise wrong_entry(entry, config.get(entry, EVERY), "at least one layer must attend")
    return {
        **SWITCHES,
        "qkv_bias": is_biased,
        "out_bias": is_biased,
        "recurrence": sizes if layers else None,
        "recurrent_layers": layers,
    }


def read_recurrent_layers(config: Config, other: str = LINEAR) -> tuple[int, ...]:
    """The layers whose type is `other`, the rest attend; by default one attends in every four."""
    layers, kinds = read_count(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        every = read_count(config, "full_attention_interval", EVERY)
        kinds = [other if (layer + 1) % every else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {other, FULL}:
        raise wrong_entry("layer_types", kinds, f"need {other} or {FULL} for each layer")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == other)


def write_hybrid(shape: ModelShape) -> dict[str, Any]:
    kinds = [LINEAR if shape.is_recurrent(i) else FULL for i in range(shape.layers)]
    entries: dict[str, Any] = {"attention_bias": shape.qkv_bias, "layer_types": kinds}
    if (sizes := shape.recurrence) is not None:
        entries |= {
            "linear_conv_kernel_dim": sizes.taps,
            "linear_num_key_heads": sizes.key_heads,
            "linear_key_head_dim": sizes.key_dim,
            "linear_num_value_heads": sizes.value_heads,
            "linear_value_head_dim": sizes.value_dim,
        }
    return entries


def read_experts(config: Config, **defaults: Any) -> Experts:
    """Experts, and one that every token passes through behind a gate."""
    return Experts(
        count=read_count(config, "num_experts", defaults["count"]),
        top_k=read_count(config, "num_experts_per_tok", defaults["top_k"]),
        ff=read_count(config, "moe_intermediate_size", 512),
        renormalise=defaults["renormalise"],
        shared_ff=read_count(config, "shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def write_experts(experts: Experts) -> dict[str, Any]:
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ff,
        "shared_expert_intermediate_size": experts.shared_ff,
    }


def read(config: Config) -> dict[str, Any]:
    renormalise = read_switch(config, "norm_topk_prob", True)
    experts = read_experts(config, count=512, top_k=10, renormalise=renormalise)
    dense = qwen3_moe.read_dense_layers(config)
    return {**read_hybrid(config, by_key_head=True), "experts": experts, "dense_layers": dense}


def write(shape: ModelShape) -> dict[str, Any]:
    entries = write_hybrid(shape)
    if (experts := shape.experts) is not None:
        entries |= write_experts(experts)
        entries |= {
            "norm_topk_prob": experts.renormalise,
            "mlp_only_layers": list(shape.dense_layers),
            "decoder_sparse_step": 1,
        }
    return entries


FAMILY = Family(
    read,
    write,
    prepare=prepare,
    has_experts=True,
    experts={"renormalise": True, "shared_gate": True},
    shares_expert=True,
    recurrence={"kind": "delta", "by_key_head": True},
    rotary_share=0.25,
    has_later_layers=True,
    switches=SWITCHES,
)
