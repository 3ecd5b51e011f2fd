"""Granite 4: Mamba-2 in most layers, attention in the others, rotated by position or not, Granite's factors,
and in every layer an MLP, beside experts or without them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graft.models.families import granitemoe
from graft.models.families.entries import read_count, read_switch, wrong_entry
from graft.models.families.family import Config, Family
from graft.models.recurrence import Recurrence
from graft.models.shape import ModelShape, is_number, make_recurrence

MAMBA, ATTENTION = "mamba", "attention"
TYPES = {MAMBA: MAMBA, "linear_attention": MAMBA, ATTENTION: ATTENTION, "full_attention": ATTENTION}
"""Names of layers in a config.json, older and newer -> ours, which both generations read."""


def prepare(config: Config) -> Config:
    """The entries of all families: `read` takes those of the layers."""
    taken = ("layer_types", "layers_block_type")
    return {n: value for n, value in granitemoe.prepare(config).items() if n not in taken}


def read(config: Config) -> dict[str, Any]:
    fields = granitemoe.read_common(config)
    shared = read_count(config, "shared_intermediate_size", 1024)
    if config.get("num_local_experts", 8) == 0:
        fields["ff"] = shared
    else:
        fields["experts"] = experts = granitemoe.read_experts(config, shared_ff=shared)
        fields["ff"] = experts.ff
    if config.get("position_embedding_type") != "rope":
        fields |= {"rotary_share": 0.0, "rope_scaling": {}}
    layers = _read_layers(config)
    sizes = _read_sizes(config) if layers else None
    return {**fields, "recurrence": sizes, "recurrent_layers": layers}


def _read_layers(config: Config) -> tuple[int, ...]:
    """The layers that do not attend; by default none does."""
    layers = read_count(config, "num_hidden_layers")
    kinds = config.get("layer_types", config.get("layers_block_type"))
    kinds = [MAMBA] * layers if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - set(TYPES):
        raise wrong_entry("layer_types", kinds, f"need one of {', '.join(TYPES)} for each layer")
    if ATTENTION not in map(TYPES.get, kinds):
        raise wrong_entry("layer_types", kinds, "at least one layer must attend")
    return tuple(layer for layer, kind in enumerate(kinds) if TYPES[kind] == MAMBA)


def _read_sizes(config: Config) -> Recurrence:
    inner = read_count(config, "mamba_expand", 2) * read_count(config, "hidden_size")
    heads = read_count(config, "mamba_n_heads", 128)
    size = config.get("mamba_d_head", "auto")
    size = inner // heads if size == "auto" else read_count(config, "mamba_d_head")
    if heads * size != inner:
        raise wrong_entry("mamba_d_head", size, f"{heads} heads must have {inner} numbers together")
    least, greatest = read_steps(config)
    return make_recurrence(
        kind="mamba",
        taps=read_count(config, "mamba_d_conv", 4),
        key_heads=read_count(config, "mamba_n_groups", 1),
        key_dim=read_count(config, "mamba_d_state", 256),
        value_heads=heads,
        value_dim=size,
        conv_bias=read_switch(config, "mamba_conv_bias", True),
        bias=read_switch(config, "mamba_proj_bias"),
        least_step=least,
        most_step=greatest,
    )


def read_steps(config: Config) -> tuple[float, float]:
    """The limits of time steps; JSON has no infinity, so transformers writes an object for it."""
    limits = config.get("time_step_limit", [0.0, math.inf])
    pair = list(limits) if isinstance(limits, list | tuple) else []
    pair = [float(x["__float__"]) if isinstance(x, Mapping) else x for x in pair]
    if len(pair) != 2 or not all(is_number(x) for x in pair) or not 0 <= pair[0] < pair[1]:
        raise wrong_entry(
            "time_step_limit", limits, "need two numbers from 0 on, the lower one first"
        )
    return float(pair[0]), float(pair[1])


def write_steps(sizes: Recurrence) -> dict[str, Any]:
    limits = [sizes.least_step, sizes.most_step]
    if limits == [0.0, math.inf]:
        return {}
    return {"time_step_limit": [x if x < math.inf else {"__float__": "Infinity"} for x in limits]}


def write(shape: ModelShape) -> dict[str, Any]:
    kinds = [MAMBA if shape.is_recurrent(i) else ATTENTION for i in range(shape.layers)]
    experts, sizes = shape.experts, shape.recurrence
    entries = {
        **granitemoe.write_common(shape),
        "layer_types": kinds,
        "position_embedding_type": "rope" if shape.rotary_share else None,
        "num_local_experts": 0 if experts is None else experts.count,
        "num_experts_per_tok": 0 if experts is None else experts.top_k,
        "shared_intermediate_size": shape.ff if experts is None else experts.shared_ff,
    }
    if sizes is None:  # transformers compares the defaults all the same
        return {**entries, "mamba_n_heads": 1}
    return {
        **entries,
        "mamba_expand": max(sizes.value_size // shape.width, 1),
        "mamba_n_heads": sizes.value_heads,
        "mamba_d_head": sizes.value_dim,
        "mamba_n_groups": sizes.key_heads,
        "mamba_d_state": sizes.key_dim,
        "mamba_d_conv": sizes.taps,
        "mamba_conv_bias": sizes.conv_bias,
        "mamba_proj_bias": sizes.bias,
        **write_steps(sizes),
    }


FAMILY = Family(
    read,
    write,
    prepare=prepare,
    has_experts=True,
    needs_experts=False,
    experts=granitemoe.ROUTER,
    shares_expert=True,
    ff_is_of_experts=True,
    positions=granitemoe.POSITIONS,
    recurrence={"kind": "mamba"},
    switches={"qk_norm": False, "rotary_share": 0.0},
)
