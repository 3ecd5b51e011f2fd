"""LFM2: gated short convolutions in most layers, attention in the others, and an MLP, or experts after the
first layers."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import (
    FULL,
    read_count,
    read_number,
    read_switch,
    wrong_entry,
)
from graft.models.families.family import Config, Family
from graft.models.families.qwen3_next import read_recurrent_layers
from graft.models.shape import Experts, ModelShape, make_recurrence

CONV = "conv"
POSITIONS, NORM_EPS, THETA, KV_HEADS = 128_000, 1e-5, 1_000_000.0, 8
ROUTER: dict[str, Any] = {"router": "sigmoid", "sum_eps": 1e-6}
SIZES = {
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
}
"""Entries of first releases that say what another entry says."""
SWITCHES = ("block_use_swiglu", "use_pos_enc")
"""Entries of first releases that were true in all of them."""


def prepare(config: Config) -> Config:
    """The entries of all families: `read` takes those of the layers."""
    for name, other in SIZES.items():
        if name in config and config[name] != config.get(other):
            raise wrong_entry(name, config[name], f"it must equal {other}, {config.get(other)}")
    for name in SWITCHES:
        if not read_switch(config, name, True):
            raise wrong_entry(name, False, "only true is computed")
    others = {name: value for name, value in config.items() if name != "layer_types"}
    tied = read_switch(config, "tie_word_embeddings", True)
    return {
        "rope_theta": THETA,
        "num_key_value_heads": KV_HEADS,
        **others,
        "tie_word_embeddings": read_switch(config, "tie_embedding", tied),
    }


def prepare_dense(config: Config) -> Config:
    """The width of the MLP under the name that other families have for it."""
    return {"intermediate_size": config.get("block_ff_dim"), **prepare(config)}


def read_common(config: Config, layers: tuple[int, ...]) -> dict[str, Any]:
    """What both families have."""
    is_biased = read_switch(config, "conv_bias")
    sizes = make_recurrence(
        kind="conv",
        taps=read_count(config, "conv_L_cache", 3),
        value_dim=read_count(config, "hidden_size"),
        conv_bias=is_biased,
        bias=is_biased,
    )
    return {"recurrence": sizes if layers else None, "recurrent_layers": layers}


def read(config: Config) -> dict[str, Any]:
    return {**read_common(config, _read_layers(config)), "ff": _read_ff(config)}


def read_with_experts(config: Config) -> dict[str, Any]:
    if config.get("layer_types") is None:
        raise wrong_entry("layer_types", None, f"need {CONV} or {FULL} for each layer")
    experts = Experts(
        count=read_count(config, "num_experts", 32),
        top_k=read_count(config, "num_experts_per_tok", 4),
        ff=read_count(config, "moe_intermediate_size", 1792),
        renormalise=read_switch(config, "norm_topk_prob", True),
        scaling=float(read_number(config, "routed_scaling_factor", 1.0)),
        corrected=read_switch(config, "use_expert_bias", True),
        **ROUTER,
    )
    first = int(read_number(config, "num_dense_layers", 2))
    return {
        **read_common(config, _read_layers(config)),
        "experts": experts,
        "dense_layers": tuple(range(min(first, read_count(config, "num_hidden_layers")))),
    }


def _read_layers(config: Config) -> tuple[int, ...]:
    """The layers that do not attend, by `layer_types` or the older `full_attn_idxs`; by default none."""
    layers, kinds = read_count(config, "num_hidden_layers"), config.get("layer_types")
    entry = "layer_types"
    if kinds is None:
        entry, numbers = "full_attn_idxs", config.get("full_attn_idxs")
        numbers = list(range(layers)) if numbers is None else numbers
        if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
            raise wrong_entry(entry, numbers, "need a list of layer numbers")
        kinds = [FULL if layer in numbers else CONV for layer in range(layers)]
    found = read_recurrent_layers({**config, "layer_types": kinds}, CONV)
    if len(found) == layers:
        raise wrong_entry(entry, config.get(entry), "at least one layer must attend")
    return found


def _read_ff(config: Config) -> int:
    """The width of the MLP, which is computed from the entry unless a switch says that it is the entry."""
    name = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    ff = read_count(config, name)
    if not read_switch(config, "block_auto_adjust_ff_dim", True):
        return ff
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:  # older readers of such a config round to no multiple
        raise wrong_entry("block_ffn_dim_multiplier", None, "need a number")
    multiple = read_count(config, "block_multiple_of", 256)
    ff = int(read_number(config, "block_ffn_dim_multiplier", 1.0) * int(2 * ff / 3))
    return multiple * -(-ff // multiple)


def write_common(shape: ModelShape) -> dict[str, Any]:
    sizes = shape.recurrence
    kinds = [CONV if shape.is_recurrent(layer) else FULL for layer in range(shape.layers)]
    entries: dict[str, Any] = {"layer_types": kinds}
    if sizes is not None:
        entries |= {"conv_L_cache": sizes.taps, "conv_bias": sizes.conv_bias}
    return entries


def write(shape: ModelShape) -> dict[str, Any]:
    return {**write_common(shape), "block_auto_adjust_ff_dim": False}


def write_with_experts(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    assert experts is not None
    return {
        **write_common(shape),
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ff,
        "norm_topk_prob": experts.renormalise,
        "routed_scaling_factor": experts.scaling,
        "use_expert_bias": experts.corrected,
        "num_dense_layers": len(shape.dense_layers),
    }


FAMILY = Family(
    read,
    write,
    prepare=prepare_dense,
    positions=POSITIONS,
    norm_eps=NORM_EPS,
    eps_entry="norm_eps",
    recurrence={"kind": "conv"},
)

EXPERTS = Family(
    read_with_experts,
    write_with_experts,
    prepare=prepare,
    has_experts=True,
    experts=ROUTER,
    positions=POSITIONS,
    norm_eps=NORM_EPS,
    eps_entry="norm_eps",
    recurrence={"kind": "conv"},
)
