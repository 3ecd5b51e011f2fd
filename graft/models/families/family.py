"""What a family adds to the entries that all have: how its config.json is read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.models.shape import ModelShape

Config = Mapping[str, Any]
"""A parsed `config.json`."""


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
    """Whether a model may have experts."""
    needs_experts: bool = True
    """Whether a model of a family with experts cannot be without."""
    shares_expert: bool = False
    """Whether every token passes through a shared expert too, as wide as the others unless told otherwise."""
    experts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of Experts whose value in this family is not the default, for a shape from a recipe."""
    ff_is_of_experts: bool = False
    """Whether intermediate_size is the width of an expert, since no layer has a plain MLP."""
    rotary_share: float | None = None
    """transformers' default of partial_rotary_factor; None: whole heads are rotated."""
    norm_eps: float = 1e-6
    """transformers' default of the entry below."""
    eps_entry: str = "rms_norm_eps"
    has_later_layers: bool = False
    """Whether checkpoints may hold layers after the last one, for predicting several tokens: left out."""
    has_single_layers: bool = False
    """Whether a layer is one sublayer alone."""
    positions: int = 32_768
    """transformers' default of max_position_embeddings."""
    recurrence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of Recurrence that this family decides, for a shape from a recipe; empty: it has none."""
    switches: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of ModelShape whose value in this family is not the default, for a shape from a recipe."""
