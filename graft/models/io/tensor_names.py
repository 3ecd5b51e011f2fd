"""Hugging Face's tensor names as rows of our parameters: one map for reading and for writing.

Our decoder stores q|k|v and gate|up as one matrix each; in a checkpoint they are separate tensors.
With 4 query heads and 2 KV heads of size 8, layer 0 reads

    model.layers.0.self_attn.q_proj.weight   blocks.0.attention.qkv.weight[0:32]
    model.layers.0.self_attn.k_proj.weight   blocks.0.attention.qkv.weight[32:48]
    model.layers.0.self_attn.v_proj.weight   blocks.0.attention.qkv.weight[48:64]

and expert 1 of two with a width of 24

    model.layers.0.mlp.experts.1.gate_proj.weight   blocks.0.mlp.gate_up.weight[48:72]

or, in families that store the experts of a layer together, all of them

    model.layers.0.block_sparse_moe.input_linear.weight   blocks.0.mlp.gate_up.weight as [2, 48, D]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from graft.models.action_rows import extra_rows
from graft.models.decoder import Decoder
from graft.models.device import without_memory
from graft.models.parallel.shards import is_sharded
from graft.models.shape import ModelShape

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYERS, NORM = "model.layers", "model.norm.weight"
ACTION_ROWS, ACTION_BIAS = "actions.rows", "actions.bias"
"""Names of the rows of actions and their bias among weights for engines; no Hugging Face tensor has them."""


class ExpertNames(NamedTuple):
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
    correction: str = "gate.e_score_correction_bias"
    """What a sigmoid router adds to its choice."""


_GRANITE = ExpertNames(
    "block_sparse_moe", "router.layer", "input_linear.weight", "output_linear.weight"
)
EXPERT_NAMES = {
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "gpt_oss": ExpertNames(
        router="router",
        gate_up="experts.gate_up_proj",
        down="experts.down_proj",
        is_transposed=True,
    ),
    "lfm2_moe": ExpertNames(correction="expert_bias"),
}
"""The names in families that store the experts of a layer together, or name their parts in another way."""

GATED_NAMES = {"granitemoehybrid": ("shared_mlp.input_linear", "shared_mlp.output_linear")}
"""The names of an MLP, or of a shared expert, in families that store its gate and up as one matrix."""

RECURRENT_NAMES = {"delta": "linear_attn", "mamba": "mamba", "conv": "conv"}
"""The names of recurrent layers, by the kind of their recurrence."""

_LFM2 = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm.weight": "model.embedding_norm.weight",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "conv1d": "conv",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
_NEMOTRON = {
    "model.embed_tokens.weight": "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
    "model": "backbone",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",  # no layer has both
    "mamba": "mixer",
    "self_attn": "mixer",
    "mlp": "mixer",
}
OWN_NAMES = {"lfm2": _LFM2, "lfm2_moe": _LFM2, "nemotron_h": _NEMOTRON}
"""Names, or parts of them between dots: what most families say -> what one family says."""


class ParameterRows(NamedTuple):
    """Rows `start` to `stop`, or some of them, of one of our parameters; None is the open end."""

    parameter: str
    start: int | None = None
    stop: int | None = None
    step: int | None = None
    """2: every other row, since those of gate and up alternate."""
    experts: int = 0
    """In a checkpoint these rows are one tensor with so many experts as its first dimension; 0: as here."""
    is_transposed: bool = False
    """Whether the matrix of each of these experts is transposed there."""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop, self.step)

    def view(self, parameter: Tensor) -> Tensor:
        """The checkpoint's tensor, in the memory of our parameter."""
        return self.shaped(parameter[self.rows])

    def shaped(self, rows: Tensor) -> Tensor:
        """The checkpoint's tensor, of these rows of our parameter."""
        if self.experts:
            rows = rows.unflatten(0, (self.experts, -1))
        return rows.transpose(1, 2) if self.is_transposed else rows

    def flat(self, tensor: Tensor) -> Tensor:
        """The rows of our parameter, of a checkpoint's tensor."""
        tensor = tensor.transpose(1, 2) if self.is_transposed else tensor
        return tensor.flatten(0, 1) if self.experts else tensor


def hf_rows(shape: ModelShape, split_experts: bool = False) -> dict[str, ParameterRows]:
    """Every tensor of a Hugging Face checkpoint of this shape, in the order of the computation.

    With `split_experts` each expert's matrices under names of their own, as adapters change them, also
    in families that store the experts of a layer together.
    """
    embedding, layers, norm = (own_name(shape.family, name) for name in (EMBEDDING, LAYERS, NORM))
    rows = {embedding: ParameterRows("embed.weight", None, shape.vocab_size)}
    for index in range(shape.layers):
        block = f"blocks.{index}"
        rows |= {
            f"{layers}.{index}.{name}": where._replace(parameter=f"{block}.{where.parameter}")
            for name, where in block_rows(shape, index, split_experts).items()
        }
    rows[norm] = ParameterRows("norm.weight")
    if not shape.tied:
        rows[HEAD] = ParameterRows("head.weight", None, shape.vocab_size)
    return rows


def own_name(family: str, name: str) -> str:
    """The name of a tensor, a module or a matrix in this family.

    >>> own_name("lfm2", "mlp.gate_proj.weight"), own_name("qwen3", "mlp.gate_proj.weight")
    ('feed_forward.w1.weight', 'mlp.gate_proj.weight')
    """
    names = OWN_NAMES.get(family, {})
    if name in names:
        return names[name]
    return ".".join(names.get(part, part) for part in name.split("."))


def block_rows(
    shape: ModelShape, layer: int, split_experts: bool = False
) -> dict[str, ParameterRows]:
    """`hf_rows` of one layer, without its prefix in the names of a checkpoint and in ours."""
    rows = _usual_rows(shape, layer, split_experts)
    return {own_name(shape.family, name): where for name, where in rows.items()}


def _usual_rows(shape: ModelShape, layer: int, split_experts: bool) -> dict[str, ParameterRows]:
    rows: dict[str, ParameterRows] = {}
    if shape.has_mixer(layer):
        rows = {"input_layernorm.weight": ParameterRows("attention.norm.weight")}
        rows |= _recurrent_rows(shape) if shape.is_recurrent(layer) else _attention_rows(shape)
    if not shape.has_mlp(layer):
        return rows
    if shape.sandwich:
        rows["post_attention_layernorm.weight"] = ParameterRows("attention.post_norm.weight")
        rows["pre_feedforward_layernorm.weight"] = ParameterRows("mlp.norm.weight")
        rows["post_feedforward_layernorm.weight"] = ParameterRows("mlp.post_norm.weight")
    else:
        rows["post_attention_layernorm.weight"] = ParameterRows("mlp.norm.weight")
    experts = shape.experts_of(layer)
    if experts is None:
        return rows | _plain_rows(shape)
    names = EXPERT_NAMES.get(shape.family, ExpertNames())
    rows |= _linear(f"{names.block}.{names.router}", "mlp.router", None, None, experts.biased)
    if experts.has_correction:
        rows[f"{names.block}.{names.correction}"] = ParameterRows("mlp.correction")
    if experts.shared_ff and shape.family in GATED_NAMES:
        rows |= _plain_rows(shape, "shared_")
    elif experts.shared_ff:
        shared = "mlp.shared_expert" if experts.shared_gate else "mlp.shared_experts"
        rows |= _mlp_rows(shape, shared, 0, experts.shared_ff, own="shared_")
    if experts.shared_gate:
        rows["mlp.shared_expert_gate.weight"] = ParameterRows("mlp.shared_gate.weight")
    if names.gate_up and not split_experts:
        for name, parameter in ((names.gate_up, "mlp.gate_up"), (names.down, "mlp.down")):
            of_all = ParameterRows(f"{parameter}.weight", experts=experts.count)
            rows[f"{names.block}.{name}"] = of_all._replace(is_transposed=names.is_transposed)
            if experts.biased:
                biases = of_all._replace(parameter=f"{parameter}.bias")
                rows[f"{names.block}.{name}_bias"] = biases
        return rows
    for number in range(experts.count):
        name = f"{names.block}.experts.{number}"
        matrices = _mlp_rows(shape, name, number, experts.ff)
        if experts.swiglu_limit:
            matrices |= _alternating_rows(name, number, experts.ff)
        rows |= matrices
    return rows


def _attention_rows(shape: ModelShape) -> dict[str, ParameterRows]:
    q = (1 + shape.attention_gate) * shape.q_size
    k = q + shape.kv_size
    rows: dict[str, ParameterRows] = {}
    for name, start, stop in (("q", 0, q), ("k", q, k), ("v", k, None)):
        rows |= _linear(f"self_attn.{name}_proj", "attention.qkv", start, stop, shape.qkv_bias)
    rows |= _linear("self_attn.o_proj", "attention.out", None, None, shape.out_bias)
    if shape.qk_norm:
        rows["self_attn.q_norm.weight"] = ParameterRows("attention.q_norm.weight")
        rows["self_attn.k_norm.weight"] = ParameterRows("attention.k_norm.weight")
    if shape.sinks:
        rows["self_attn.sinks"] = ParameterRows("attention.sinks")
    return rows


def _recurrent_rows(shape: ModelShape) -> dict[str, ParameterRows]:
    sizes = shape.recurrence
    assert sizes is not None
    module = RECURRENT_NAMES[sizes.kind]
    rows: dict[str, ParameterRows] = {}
    start = 0
    for name, (count, _) in sizes.products(shape.width).items():
        if name.startswith("in_proj"):
            part = ParameterRows("attention.inputs.weight", start, start + count)
            rows[f"{module}.{name}.weight"] = part
            start += count
    names = {"conv1d.weight": "conv", "out_proj.weight": "out.weight"}
    if sizes.has_state:
        names |= {"dt_bias": "dt_bias", "A_log": "a_log", "norm.weight": "head_norm.weight"}
    if sizes.kind == "mamba":
        names |= {"D": "skip"}
    if sizes.kind != "delta":
        names |= {"conv1d.bias": "conv_bias"} if sizes.conv_bias else {}
        biases = {"in_proj.bias": "inputs.bias", "out_proj.bias": "out.bias"}
        names |= biases if sizes.bias else {}
    return rows | {
        f"{module}.{name}": ParameterRows(f"attention.{parameter}")
        for name, parameter in names.items()
    }


def _plain_rows(shape: ModelShape, own: str = "") -> dict[str, ParameterRows]:
    """The MLP of a layer without experts, or `own` the shared expert of one with them."""
    names = GATED_NAMES.get(shape.family)
    if not shape.is_gated:
        up = _linear("mlp.up_proj", "mlp.up", None, None, shape.mlp_bias)
        return up | _linear("mlp.down_proj", "mlp.down", None, None, shape.mlp_bias)
    if names is None:
        return _mlp_rows(shape, "mlp", 0, shape.ff, shape.mlp_bias)
    first, last = names
    return {
        f"{first}.weight": ParameterRows(f"mlp.{own}gate_up.weight"),
        f"{last}.weight": ParameterRows(f"mlp.{own}down.weight"),
    }


def _mlp_rows(
    shape: ModelShape, name: str, number: int, ff: int, is_biased: bool = False, own: str = ""
) -> dict[str, ParameterRows]:
    """Gate, up and down of expert `number`; a plain MLP is number 0, and so is the shared expert."""
    into, out, width = f"mlp.{own}gate_up", f"mlp.{own}down", shape.width
    names = ("gate_proj", "up_proj") if shape.is_gated else ("up_proj",)
    rows: dict[str, ParameterRows] = {}
    for start, part in enumerate(names, number * len(names)):
        rows |= _linear(f"{name}.{part}", into, start * ff, (start + 1) * ff, is_biased)
    down = number * width, (number + 1) * width
    return rows | _linear(f"{name}.down_proj", out, *down, is_biased)


def _alternating_rows(name: str, number: int, ff: int) -> dict[str, ParameterRows]:
    """Gate and up of expert `number`, every other row each."""
    first, stop = number * 2 * ff, (number + 1) * 2 * ff
    return {
        f"{name}.gate_proj.weight": ParameterRows("mlp.gate_up.weight", first, stop, 2),
        f"{name}.up_proj.weight": ParameterRows("mlp.gate_up.weight", first + 1, stop, 2),
    }


def _linear(
    name: str, parameter: str, start: int | None, stop: int | None, is_biased: bool
) -> dict[str, ParameterRows]:
    """The weight of a linear layer, and its bias."""
    kinds = ("weight", "bias") if is_biased else ("weight",)
    return {f"{name}.{kind}": ParameterRows(f"{parameter}.{kind}", start, stop) for kind in kinds}


def expert_parts(shape: ModelShape) -> dict[str, dict[str, ParameterRows]]:
    """List the matrices of `hf_rows(split_experts=True)` in each tensor that holds all experts of a layer."""
    parts: dict[str, dict[str, ParameterRows]] = {}
    for name, where in hf_rows(shape, split_experts=True).items():
        parts.setdefault(where.parameter, {})[name] = where
    return {
        name: parts[where.parameter]
        for name, where in hf_rows(shape).items()
        if where.experts and where.parameter in parts  # biases are in one tensor alone
    }


def whole_views(shape: ModelShape, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face names of a state dict, with every row of embedding and head: for a trainer's state.

    Parameters that are not there are left out, with all that is of them.
    """
    ends = ("embed.weight", "head.weight")
    return {
        name: parameters[where.parameter].detach()[
            slice(None) if where.parameter in ends else where.rows
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
        name: where.view(parameters[where.parameter].detach())
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
    with without_memory():
        return {name: tuple(tensor.shape) for name, tensor in hf_names(Decoder(shape)).items()}
