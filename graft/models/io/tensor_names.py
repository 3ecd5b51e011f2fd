"""Hugging Face's tensor names as rows of our parameters: one map for reading and for writing.

Our decoder stores q|k|v and gate|up as one matrix each; in a checkpoint they are separate tensors.
With 4 query heads and 2 KV heads of size 8, layer 0 reads

    model.layers.0.self_attn.q_proj.weight   blocks.0.qkv.weight[0:32]
    model.layers.0.self_attn.k_proj.weight   blocks.0.qkv.weight[32:48]
    model.layers.0.self_attn.v_proj.weight   blocks.0.qkv.weight[48:64]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.models.action_rows import extra_rows
from graft.models.decoder import Decoder
from graft.models.parallel.shards import is_sharded
from graft.models.shape import ModelShape

ACTION_ROWS, ACTION_BIAS = "actions.rows", "actions.bias"
"""Names of the rows of actions and their bias among weights for engines; no Hugging Face tensor has them."""


class ParameterRows(NamedTuple):
    """Rows `start` to `stop` of one of our parameters; None is the open end."""

    parameter: str
    start: int | None = None
    stop: int | None = None


def hf_rows(shape: ModelShape) -> dict[str, ParameterRows]:
    """Every tensor of a Hugging Face checkpoint of this shape, in the order of the computation."""
    rows = {"model.embed_tokens.weight": ParameterRows("embed.weight", None, shape.vocab_size)}
    for index in range(shape.layers):
        block = f"blocks.{index}"
        rows |= {
            f"model.layers.{index}.{name}": ParameterRows(f"{block}.{where.parameter}", *where[1:])
            for name, where in _block_rows(shape).items()
        }
    rows["model.norm.weight"] = ParameterRows("norm.weight")
    if not shape.tied:
        rows["lm_head.weight"] = ParameterRows("head.weight", None, shape.vocab_size)
    return rows


def _block_rows(shape: ModelShape) -> dict[str, ParameterRows]:
    q, k = shape.q_size, shape.q_size + shape.kv_size
    linears = {
        "self_attn.q_proj": ("qkv", 0, q, shape.qkv_bias),
        "self_attn.k_proj": ("qkv", q, k, shape.qkv_bias),
        "self_attn.v_proj": ("qkv", k, None, shape.qkv_bias),
        "self_attn.o_proj": ("out", None, None, shape.out_bias),
        "mlp.gate_proj": ("gate_up", 0, shape.ff, shape.mlp_bias),
        "mlp.up_proj": ("gate_up", shape.ff, None, shape.mlp_bias),
        "mlp.down_proj": ("down", None, None, shape.mlp_bias),
    }
    rows = {"input_layernorm.weight": ParameterRows("attn_norm.weight")}
    for name, (parameter, start, stop, is_biased) in linears.items():
        rows[f"{name}.weight"] = ParameterRows(f"{parameter}.weight", start, stop)
        if is_biased:
            rows[f"{name}.bias"] = ParameterRows(f"{parameter}.bias", start, stop)
    if shape.qk_norm:
        rows["self_attn.q_norm.weight"] = ParameterRows("q_norm.weight")
        rows["self_attn.k_norm.weight"] = ParameterRows("k_norm.weight")
    rows["post_attention_layernorm.weight"] = ParameterRows("mlp_norm.weight")
    return rows


def whole_views(shape: ModelShape, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face names of a state dict, with every row of embedding and head: for a trainer's state.

    Parameters that are not there are left out, with all that is of them.
    """
    ends = ("embed.weight", "head.weight")
    return {
        name: parameters[where.parameter].detach()[
            slice(None) if where.parameter in ends else slice(where.start, where.stop)
        ]
        for name, where in hf_rows(shape).items()
        if where.parameter in parameters
    }


def hf_names(decoder: Decoder) -> dict[str, Tensor]:
    """Hugging Face names -> views of the decoder's own memory; writing to one changes the model.

    A tied head is the embedding itself and has no name of its own; actions beyond the vocabulary
    have none in any model.
    """
    parameters = dict(decoder.named_parameters())
    return {
        name: parameters[where.parameter].detach()[where.start : where.stop]
        for name, where in hf_rows(decoder.shape).items()
    }


def named_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Whole tensors by Hugging Face name; rows of actions beyond the vocabulary come last."""
    rows = {ACTION_ROWS: extra_rows(decoder)} if decoder.shape.extra else {}
    if decoder.action_bias is not None:
        rows[ACTION_BIAS] = decoder.action_bias.detach()
    return {**hf_names(decoder), **rows}


def weights_of(policy: Any) -> Mapping[str, Tensor]:
    """`named_weights` of any policy: each tensor of a sharded one is gathered when it is read."""
    if not isinstance(policy, Decoder):
        return policy.hf_weights(whole_state(policy))
    sharded: Any = policy
    return named_weights(policy) if policy.is_whole else sharded.hf_weights()


def whole_state(policy: Any) -> dict[str, Tensor]:
    """The state dict of a transformers model, gathered if it is sharded."""
    return {
        name: tensor.full_tensor() if is_sharded(tensor) else tensor
        for name, tensor in policy.state_dict().items()
    }


def hf_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The size of each tensor of a Hugging Face checkpoint of this shape."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in hf_names(Decoder(shape)).items()}
