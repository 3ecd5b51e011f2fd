"""The families with a native decoder, and both directions between `config.json` and ModelShape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from graft.models.families import (
    gemma3,
    glm4_moe,
    gpt_oss,
    granitemoe,
    granitemoehybrid,
    lfm2,
    llama,
    ministral,
    mistral,
    nemotron_h,
    olmoe,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from graft.models.families.entries import (
    read_count,
    read_rope,
    read_rotary_share,
    read_switch,
    refuse_what_is_not_computed,
    wrong_entry,
)
from graft.models.families.family import Config, Family
from graft.models.families.text_part import TEXT_TYPES, text_part
from graft.models.recurrence import Recurrence
from graft.models.shape import (
    ARCHITECTURES,
    LARGEST,
    Experts,
    ModelShape,
    UnsupportedModel,
    check_size,
    is_number,
    make_recurrence,
    rope_frequencies,
)

ATTENDS_EVERY = 4
"""In a shape from a recipe that does not name its recurrent layers, every fourth and the last attend."""

SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ff": "intermediate_size",
}
"""Sizes that all families have -> their entries."""

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "ministral": ministral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "olmoe": olmoe.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "lfm2": lfm2.FAMILY,
    "lfm2_moe": lfm2.EXPERTS,
    "nemotron_h": nemotron_h.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_5_moe_text": qwen3_5.EXPERTS,
}


def why_not_native(config: Config, device: torch.device) -> str:
    """Why our decoder does not compute the model of a `config.json` on this device; empty if it does."""
    name = str(config.get("model_type", ""))
    name = TEXT_TYPES.get(name, name)
    if name in FAMILIES:
        if device.type == "cpu" or not FAMILIES[name].recurrence:
            return ""
        return f"a {name} model, whose recurrent layers the native decoder computes on a CPU only"
    return f"a {name} model, and the native decoder computes {', '.join(FAMILIES)}"


def read_shape(config: Config) -> ModelShape:
    """Read the shape from a parsed `config.json`, old (rope_theta, rope_scaling) or new (rope_parameters).

    Of a model that also reads pictures, that of its text part.
    """
    config = text_part(config)
    name = str(config.get("model_type", ""))
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"model_type {name!r} has no native decoder; known: {', '.join(FAMILIES)}"
        )
    family, whole = FAMILIES[name], config
    config = family.prepare(config)
    refuse_what_is_not_computed(config)
    sizes = _read_sizes(config)  # before a list as long as the layers is made
    positions = family.positions
    if "max_position_embeddings" in config:
        positions = read_count(config, "max_position_embeddings")
    theta, scaling = read_rope(config, positions)
    eps = config.get(family.eps_entry, family.norm_eps)
    if not is_number(eps) or not 0 <= eps < math.inf:
        raise wrong_entry(family.eps_entry, eps, "need a number that is 0 or more")
    common: dict[str, Any] = {
        "family": name,
        **sizes,
        "tied": read_switch(config, "tie_word_embeddings"),
        "norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_share": read_rotary_share(config, family.rotary_share, sizes["head_dim"]),
        "max_positions": positions,
    }
    shape = ModelShape(**common | family.read(whole))
    rope_frequencies(shape)  # a scaling that is not computed should fail now, not in the first step
    return shape


def _read_sizes(config: Config) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, entry in SIZES.items():
        default = sizes.get("heads") if name == "kv_heads" else None
        if name == "head_dim":
            default = sizes["width"] // sizes["heads"]
        sizes[name] = read_count(config, entry, default)
        check_size(entry, sizes[name], LARGEST[name])
    if sizes["heads"] % sizes["kv_heads"]:
        why = f"it must divide {sizes['heads']} heads"
        raise wrong_entry("num_key_value_heads", sizes["kv_heads"], why)
    return sizes


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The `config.json` from which graft and transformers build this decoder."""
    rope = {"rope_type": "default", **shape.rope_scaling, "rope_theta": shape.rope_theta}
    if FAMILIES[shape.family].rotary_share is not None:
        rope["partial_rotary_factor"] = shape.rotary_share
    return {
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ff,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        FAMILIES[shape.family].eps_entry: shape.norm_eps,
        "rope_parameters": rope,
        "rope_theta": shape.rope_theta,  # for readers older than rope_parameters
        "rope_scaling": dict(shape.rope_scaling) or None,
        "max_position_embeddings": shape.max_positions,
        **FAMILIES[shape.family].write(shape),
    }


def make_shape(given: Mapping[str, Any], **more: Any) -> ModelShape:
    """A shape from plain values, as a recipe has them; what its family decides need not be said."""
    family = FAMILIES.get(str(given.get("family")))
    values = {**({} if family is None else family.switches), **given, **more}
    if family is not None and family.rotary_share is not None:
        values.setdefault("rotary_share", family.rotary_share)
    if family is not None and family.has_experts and (family.needs_experts or "experts" in values):
        values["experts"] = experts = _make_experts(values.get("experts"), family)
        if family.ff_is_of_experts:
            values["ff"] = experts.ff
    if family is not None and family.has_single_layers:
        layers = values.get("layers", ModelShape().layers)
        values = {"mlp_layers": tuple(range(1, layers, 2)), **values}
    if family is not None and family.recurrence:
        values = _with_recurrence(values, family)
    for name in ("dense_layers", "windows", "recurrent_layers", "mlp_layers"):
        if name in values:
            values[name] = _read_numbers(name, values[name])
    shape = ModelShape(**values)
    check_described(shape, config_of(shape))
    return shape


def _with_recurrence(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Sizes of the recurrence, as large as those of attention unless given, and the layers that have it."""
    plain = ModelShape()
    sizes = {
        name: values.get(name, getattr(plain, name)) for name in ("heads", "kv_heads", "head_dim")
    }
    section, layers = values.get("recurrence", {}), values.get("layers", plain.layers)
    known = set(Recurrence.__dataclass_fields__) - set(family.recurrence)
    if not isinstance(section, Mapping) or not set(section) <= known or not isinstance(layers, int):
        raise UnsupportedModel(
            f"recurrence={section!r:.80}: may have {', '.join(sorted(known))}, such as "
            "{key_heads: 2, key_dim: 16, value_heads: 4, value_dim: 16}"
        )
    alike = {"key_heads": sizes["kv_heads"], "key_dim": sizes["head_dim"]}
    alike |= {"value_heads": sizes["heads"], "value_dim": sizes["head_dim"]}
    if family.recurrence["kind"] == "conv":  # as wide as the model
        alike = {"value_heads": 1, "value_dim": values.get("width", plain.width)}
    mixers = [layer for layer in range(layers) if layer not in values.get("mlp_layers", ())]
    chosen = [layer for i, layer in enumerate(mixers[:-1]) if (i + 1) % ATTENDS_EVERY]
    values = {"recurrent_layers": chosen, **values}
    if not values["recurrent_layers"] and "recurrence" not in values:
        return values
    recurrence = make_recurrence(**{**alike, **section, **family.recurrence})
    return {**values, "recurrence": recurrence}


def _read_numbers(name: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list | tuple) or not all(isinstance(each, int) for each in given):
        raise UnsupportedModel(
            f"{name}={given!r:.80}: must be a list of whole numbers, such as [0, 1]"
        )
    return tuple(given)


def _make_experts(given: Any, family: Family) -> Experts:
    if isinstance(given, Experts):
        return given
    needed, known = {"count", "top_k", "ff"}, set(Experts.__dataclass_fields__)
    if not isinstance(given, Mapping) or not needed <= set(given) <= known:
        raise UnsupportedModel(
            f"experts={given}: need {', '.join(sorted(needed))}, and may have "
            f"{', '.join(sorted(known - needed))}; such as {{count: 8, top_k: 2, ff: 64}}"
        )
    shared = {"shared_ff": given["ff"]} if family.shares_expert else {}
    return Experts(**{**shared, **family.experts, **given})


def check_described(shape: ModelShape, config: Config) -> None:
    """Refuse a shape that is not the one that readers get from its `config.json`.

    ModelShape(family="llama", qk_norm=True): Llama's config has no such entry, so the weights would be
    loaded as another model.
    """
    described = read_shape(config)
    elsewhere = ("extra", "extra_bias", "rope_scaling")  # in a file of their own; compared below
    for name in ModelShape.__dataclass_fields__:
        if name in elsewhere:
            continue
        ours, theirs = getattr(shape, name), getattr(described, name)
        if ours != theirs:
            raise UnsupportedModel(
                f"{name}={ours}: config.json of the family {shape.family!r} cannot say so, and whoever "
                f"loads the model would take {name}={theirs}; change it, or take another family"
            )
    if rope_frequencies(shape) != rope_frequencies(described):
        raise UnsupportedModel(
            f"rope_scaling={dict(shape.rope_scaling)}: config.json would be read as "
            f"{dict(described.rope_scaling)}; write it so"
        )
