"""The text part of Qwen3.5, dense or with experts: Qwen3-Next's layers, stored matrix by matrix."""

from __future__ import annotations

from typing import Any

from graft.models.families import qwen3_next
from graft.models.families.family import Config, Family
from graft.models.shape import ModelShape

SECTIONS = ("mrope_section", "mrope_interleaved")
"""How positions of pictures are rotated; text has the same position in all of them."""


def prepare(config: Config) -> Config:
    config = qwen3_next.prepare(config)
    ropes = {}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), dict):
            ropes[key] = {name: value for name, value in rope.items() if name not in SECTIONS}
    return {**config, **ropes}


def prepare_experts(config: Config) -> Config:
    """No layer has a plain MLP, and a width of one is not needed."""
    return {"intermediate_size": 512, **prepare(config)}


def read(config: Config) -> dict[str, Any]:
    return qwen3_next.read_hybrid(config, by_key_head=False)


def read_with_experts(config: Config) -> dict[str, Any]:
    experts = qwen3_next.read_experts(config, count=256, top_k=8, renormalise=True)
    return {**read(config), "experts": experts, "ff": experts.ff}


def write_with_experts(shape: ModelShape) -> dict[str, Any]:
    experts = {} if shape.experts is None else qwen3_next.write_experts(shape.experts)
    return {**qwen3_next.write_hybrid(shape), **experts}


FAMILY = Family(
    read,
    qwen3_next.write_hybrid,
    prepare=prepare,
    recurrence={"kind": "delta"},
    rotary_share=0.25,
    has_later_layers=True,
    switches=qwen3_next.SWITCHES,
)

EXPERTS = Family(
    read_with_experts,
    write_with_experts,
    prepare=prepare_experts,
    has_experts=True,
    experts={"renormalise": True, "shared_gate": True},
    shares_expert=True,
    ff_is_of_experts=True,
    recurrence={"kind": "delta"},
    rotary_share=0.25,
    has_later_layers=True,
    switches=qwen3_next.SWITCHES,
)
