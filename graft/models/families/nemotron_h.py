"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention without positions, an MLP, or experts, of which
none has a gate."""

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
from graft.models.shape import Experts, ModelShape, make_recurrence

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
TYPES = {
    MAMBA: MAMBA,
    "mamba": MAMBA,
    ATTENTION: ATTENTION,
    "attention": ATTENTION,
    MLP: MLP,
    EXPERTS: EXPERTS,
}
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}
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
ROUTER: dict[str, Any] = {"router": "sigmoid", "renormalise": True}
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
    kinds = _read_kinds(config)
    if EXPERTS in kinds and (latent := config.get("moe_latent_size")) is not None:
        raise wrong_entry("moe_latent_size", latent, "experts of another width are not computed")
    if EXPERTS in kinds and read_switch(config, "mlp_bias"):
        raise wrong_entry("mlp_bias", True, "beside experts only False is computed")
    head_dim = config.get("head_dim", HEAD_DIM)
    if config.get("attention_head_dim", head_dim) != head_dim:
        raise wrong_entry(
            "attention_head_dim", config["attention_head_dim"], f"head_dim is {head_dim}"
        )
    others = {name: value for name, value in config.items() if name not in KINDS}
    layers = {"num_hidden_layers": len(kinds)}  # whatever the entry says
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
    refuse_window(config, POSITIONS)
    kinds = _read_kinds(config)
    layers = _layers_of(kinds, MAMBA)
    has_experts = EXPERTS in kinds
    return {
        **SWITCHES,
        "experts": _read_experts(config) if has_experts else None,
        "dense_layers": _layers_of(kinds, MLP) if has_experts else (),
        "rope_scaling": {},
        "mlp_bias": read_switch(config, "mlp_bias"),
        "mlp_layers": _layers_of(kinds, MLP, EXPERTS),
        "recurrence": _read_sizes(config) if layers else None,
        "recurrent_layers": layers,
    }


def _layers_of(kinds: list[str], *wanted: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in wanted)


def _read_experts(config: Config) -> Experts:
    return Experts(
        count=read_count(config, "n_routed_experts", 8),
        top_k=read_count(config, "num_experts_per_tok", 2),
        ff=read_count(config, "moe_intermediate_size", 7688),
        scaling=float(read_number(config, "routed_scaling_factor", 1.0)),
        groups=read_count(config, "n_group", 1),
        top_groups=read_count(config, "topk_group", 1),
        shared_ff=read_count(config, "moe_shared_expert_intermediate_size", 7688),
        **{**ROUTER, "renormalise": read_switch(config, "norm_topk_prob", True)},
    )


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
    sizes, experts, kinds = shape.recurrence, shape.experts, [ATTENTION] * shape.layers
    mlps = shape.mlp_layers or ()
    for layers, kind in (
        (shape.recurrent_layers, MAMBA),
        (mlps, MLP),
        (shape.expert_layers, EXPERTS),
    ):
        for layer in layers:
            kinds[layer] = kind
    entries: dict[str, Any] = {"layers_block_type": kinds, "mlp_bias": shape.mlp_bias}
    if experts is not None:
        entries |= {
            "n_routed_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.ff,
            "moe_shared_expert_intermediate_size": experts.shared_ff,
            "norm_topk_prob": experts.renormalise,
            "routed_scaling_factor": experts.scaling,
            "n_group": experts.groups,
            "topk_group": experts.top_groups,
        }
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
    has_experts=True,
    needs_experts=False,
    experts=ROUTER,
    shares_expert=True,
    positions=POSITIONS,
    norm_eps=NORM_EPS,
    eps_entry="layer_norm_epsilon",
    has_later_layers=True,
    has_single_layers=True,
    recurrence={"kind": "mamba", "by_group": True},
    switches=SWITCHES,
)
