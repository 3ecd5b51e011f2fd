"""The sizes of a model that transformers computes, as the learner and the planner use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNBOUNDED = 2**20
"""Positions of a model without a limit, such as a recurrent one."""


@dataclass(frozen=True, slots=True)
class TransformersShape:
    """Sizes under the names of `ModelShape`; 0 for those that a family does not have."""

    family: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    """Width of the MLP that one token passes through; with experts, of all its active ones."""
    tied: bool
    max_positions: int
    num_params: int
    extra: int = 0
    """Actions beyond the vocabulary; always 0, because the head is transformers' own."""

    @property
    def head_rows(self) -> int:
        return self.vocab_size

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @classmethod
    def of(cls, module: Any) -> TransformersShape:
        """Read from a transformers module and its config, under the names of any family."""
        config = module.config.get_text_config()
        head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
        width, heads = embedding.weight.shape[1], _number(config, "num_attention_heads")
        experts = _number(config, "num_experts_per_tok")
        ff = _number(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * width)
        if experts:
            ff = experts * _number(config, "moe_intermediate_size", default=ff)
        return cls(
            family=module.config.model_type,
            vocab_size=(embedding if head is None else head).weight.shape[0],
            width=width,
            layers=_number(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads", default=heads),
            head_dim=_number(config, "head_dim", default=width // heads if heads else 0),
            ff=ff,
            tied=head is None or head.weight is embedding.weight,
            max_positions=fixed_length(config)
            or _number(config, "max_position_embeddings", "max_seq_len", default=UNBOUNDED),
            num_params=sum(parameter.numel() for parameter in module.parameters()),
        )


def fixed_length(config: Any) -> int:
    """Length up to which the rotary frequencies are the same for every text; 0: no such limit.

    Beyond it transformers changes them for all rows of a call, by the longest row.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    limits = {
        "dynamic": lambda part: config.max_position_embeddings,
        "longrope": lambda part: part["original_max_position_embeddings"],
    }
    found = [limits[kind](part) for part in parts if (kind := part.get("rope_type")) in limits]
    return min(found, default=0)


def _number(config: Any, *names: str, default: int = 0) -> int:
    """The first of these entries that is a number."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value), default)
