"""Nemotron-H without experts: a layer is Mamba-2, attention without positions, or an MLP without a gate."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import (
    read_count,
    read_number,
    read_switch,
    refuse_window,
    wrong_entry,
)
from graft.models.families.family import Config, Family
from graft.models.recurrence import Recurrence
from graft.models.shape import ModelShape, make_recurrence

MAMBA, ATTENTION, MLP = "linear_attention", "full_attention", "mlp"
TYPES = {MAMBA: MAMBA, "mamba": MAMBA, ATTENTION: ATTENTION, "attention": ATTENTION, MLP: MLP}
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP}
KINDS, PATTERN = ("layers_block_type", "layer_types"), "hybrid_override_pattern"
HEAD_DIM, KV_HEADS, POSITIONS, NORM_EPS = 128, 8, 4096, 1e-5
OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
"""Older names of entries, which win."""
FIXED = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "attention_bias": False,
    "mamba_proj_bias": False,
    "tie_word_embeddings": False,
}
"""Entries of which one value is computed."""
SWITCHES: dict[str, Any] = {
    "tied": False,
    "qk_norm": False,
    "rotary_share": 0.0,
    "activation": "relu2",
}


def prepare(config: Config) -> Config:
    """The entries of all families: `read` takes those of the layers."""
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise wrong_entry(name, config[name], f"only {value!r} is computed")
    refuse_window(config, POSITIONS)
    head_dim = config.get("head_dim", HEAD_DIM)
    if config.get("attention_head_dim", head_dim) != head_dim:
        raise wrong_entry(
            "attention_head_dim", config["attention_head_dim"], f"head_dim is {head_dim}"
        )
    others = {name: value for name, value in config.items() if name not in KINDS}
    layers = {"num_hidden_layers": len(_read_kinds(config))}  # whatever the entry says
    return {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS, **others, **layers}


def _read_kinds(config: Config) -> list[str]:
    """What each layer is."""
    entry = next((name for name in KINDS if config.get(name) is not None), PATTERN)
    listed = config.get(entry)
    names: dict[str, str] = LETTERS if entry == PATTERN else TYPES
    if not isinstance(listed, str if entry == PATTERN else list) or not listed:
        raise wrong_entry(entry, listed, f"need one of {', '.join(names)} for each layer")
    if others := [each for each in listed if each not in names]:
        raise wrong_entry(entry, listed, f"{others[0]!r} is none of {', '.join(names)}")
    kinds = [names[each] for each in listed]
    if ATTENTION not in kinds:
        raise wrong_entry(entry, listed, "at least one layer must attend")
    return kinds


def read(config: Config) -> dict[str, Any]:
    kinds = _read_kinds(config)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == MAMBA)
    return {
        **SWITCHES,
        "rope_scaling": {},
        "mlp_bias": read_switch(config, "mlp_bias"),
        "mlp_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == MLP),
        "recurrence": _read_sizes(config) if layers else None,
        "recurrent_layers": layers,
    }


def _read_sizes(config: Config) -> Recurrence:
    config = {**config, **{new: config[old] for old, new in OLDER.items() if old in config}}
    return make_recurrence(
        kind="mamba",
        taps=read_count(config, "conv_kernel", 4),
        key_heads=read_count(config, "n_groups", 8),
        key_dim=read_count(config, "ssm_state_size", 128),
        value_heads=read_count(config, "mamba_num_heads", 128),
        value_dim=read_count(config, "mamba_head_dim", 64),
        conv_bias=read_switch(config, "use_conv_bias", True),
        bias=read_switch(config, "use_bias"),
        least_step=float(read_number(config, "time_step_min", 0.001)),
        by_group=True,
    )


def write(shape: ModelShape) -> dict[str, Any]:
    sizes, kinds = shape.recurrence, [ATTENTION] * shape.layers
    for layers, kind in ((shape.recurrent_layers, MAMBA), (shape.mlp_layers or (), MLP)):
        for layer in layers:
            kinds[layer] = kind
    entries: dict[str, Any] = {"layers_block_type": kinds, "mlp_bias": shape.mlp_bias}
    if sizes is not None:
        entries |= {
            "conv_kernel": sizes.taps,
            "n_groups": sizes.key_heads,
            "ssm_state_size": sizes.key_dim,
            "mamba_num_heads": sizes.value_heads,
            "mamba_head_dim": sizes.value_dim,
            "use_conv_bias": sizes.conv_bias,
            "use_bias": sizes.bias,
            "time_step_min": sizes.least_step,
        }
    return entries


FAMILY = Family(
    read,
    write,
    prepare=prepare,
    positions=POSITIONS,
    norm_eps=NORM_EPS,
    eps_entry="layer_norm_epsilon",
    has_later_layers=True,
    has_single_layers=True,
    recurrence={"kind": "mamba", "by_group": True},
    switches=SWITCHES,
)
