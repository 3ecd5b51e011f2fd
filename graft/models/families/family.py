"""What a family adds to the entries that all have: how its config.json is read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.models.shape import ModelShape

Config = Mapping[str, Any]
"""A parsed `config.json`."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a checkpoint names the experts of a layer: a matrix each, or one tensor of all."""

    block: str = "mlp"
    router: str = "gate"
    """Inside the block, as all that follow."""
    gate_up: str = ""
    """The tensor [E, 2F, D] of all experts; empty: `experts.0.gate_proj.weight` and so on."""
    down: str = ""
    """The tensor [E, D, F] of all experts; biases of either are the same name with `_bias`."""
    is_transposed: bool = False
    """Whether these are [E, D, 2F] and [E, F, D]."""


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type` that the decoder computes."""

    read: Callable[[Config], dict[str, Any]]
    """The fields of ModelShape that this family's own entries decide."""
    write: Callable[[ModelShape], dict[str, Any]]
    """The entries that only this family's config.json has."""
    prepare: Callable[[Config], Config] = dict
    """The config as the readers of common entries understand it."""
    has_experts: bool = False
    experts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of Experts whose value in this family is not the default, for a shape from a recipe."""
    expert_names: ExpertNames = ExpertNames()
    ff_is_of_experts: bool = False
    """Whether intermediate_size is the width of an expert, since no layer has a plain MLP."""
    rotary_share: float | None = None
    """transformers' default of partial_rotary_factor; None: whole heads are rotated."""
    norm_eps: float = 1e-6
    """transformers' default of rms_norm_eps."""
    has_later_layers: bool = False
    """Whether checkpoints may hold layers after the last one, for predicting several tokens: left out."""
    positions: int = 32_768
    """transformers' default of max_position_embeddings."""
    switches: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of ModelShape whose value in this family is not the default, for a shape from a recipe."""
