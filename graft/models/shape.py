"""The sizes of a decoder (`families` reads them from a `config.json`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from graft.models.recurrence import Recurrence

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""Families with a native decoder: model_type -> Hugging Face class."""

EXTRA_MULTIPLE = 64
"""Rows beyond the vocabulary are padded to a multiple of this, which keeps products and masks aligned."""


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
NOT_COMPUTED = {
    "dynamic": "changes the rotation of all positions once a text exceeds max_position_embeddings "
    "tokens, so cached keys become wrong. Up to that length it changes nothing: if no "
    "context exceeds it (rollout.max_context), delete the entry from config.json",
    "longrope": "has two sets of frequencies and chooses between them by the length of the "
    "text, so cached keys become wrong when it grows",
}
"""Why our decoder does not compute a rope type."""


LARGEST = {
    "vocab_size": 1 << 24,
    "width": 1 << 20,
    "layers": 10_000,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "ff": 1 << 24,
}
"""The largest sizes: a file that names larger ones is damaged, or made to fill the memory."""


class UnsupportedModel(ValueError):
    """A checkpoint that the native decoder cannot compute exactly; the message says why."""


def check_size(name: str, size: object, limit: int) -> None:
    """Refuse a size that is no whole number from 1 to `limit`."""
    if not isinstance(size, int) or not 1 <= size <= limit:
        raise UnsupportedModel(f"{name}={str(size)[:40]}: must be from 1 to {limit:,}")


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a layer whose MLP is many experts, of which a router chooses some for each token."""

    count: int
    top_k: int
    """Experts of each token."""
    ff: int
    """Width of one expert."""
    renormalise: bool = False
    """Whether the weights of a token's experts add up to 1."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How scores become probabilities. sigmoid: a correction for each expert, which is not trained by
    gradients, takes part in the choice and not in the weights."""
    corrected: bool = True
    """Whether a sigmoid router has these corrections."""
    sum_eps: float = 1e-20
    """What is added to the sum of the weights before they are divided by it."""
    scaling: float = 1.0
    """Factor on the weights of a token's experts."""
    groups: int = 1
    """Groups of equally many experts, of which a token's are in the `top_groups` best."""
    top_groups: int = 1
    shared_ff: int = 0
    """Width of an MLP that every token passes through beside its experts; 0: none."""
    shared_gate: bool = False
    """Whether the result of that MLP is multiplied by a number from 0 to 1 of each token."""
    biased: bool = False
    """Whether router and experts have biases."""
    swiglu_limit: float = 0.0
    """With it the gate is `ops.clamped_gate`, and rows of gate and up alternate; 0: silu(gate) * up."""
    swiglu_alpha: float = 1.702
    """Factor inside that gate's sigmoid."""

    def __post_init__(self) -> None:
        if self.router not in ("softmax", "sigmoid"):
            raise UnsupportedModel(f"experts.router={self.router!r}: must be softmax or sigmoid")
        if not 0 < self.scaling < math.inf:
            raise UnsupportedModel(f"experts.scaling={self.scaling}: must be a number above 0")
        if self.count % max(self.groups, 1) or not 1 <= self.top_groups <= self.groups:
            raise UnsupportedModel(
                f"experts.groups={self.groups}, top_groups={self.top_groups}: groups must divide the "
                f"{self.count} experts, and a token chooses from 1 to all of them"
            )
        if self.groups > 1 and self.router != "sigmoid":
            raise UnsupportedModel(
                f"experts.groups={self.groups}: only a sigmoid router has groups"
            )
        for name in ("swiglu_limit", "swiglu_alpha", "sum_eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UnsupportedModel(
                    f"experts.{name}={getattr(self, name)}: must be a number that is 0 or more"
                )
        if self.shared_ff:
            check_size("experts.shared_ff", self.shared_ff, LARGEST["ff"])
        limits = {"count": 1 << 16, "top_k": self.count, "ff": LARGEST["ff"]}
        for name, limit in limits.items():
            check_size(f"experts.{name}", getattr(self, name), limit)

    @property
    def has_correction(self) -> bool:
        return self.router == "sigmoid" and self.corrected


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of a decoder."""

    family: str = "qwen3"
    vocab_size: int = 256
    width: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    ff: int = 512
    tied: bool = True
    qk_norm: bool = True
    joint_norm: bool = False
    """Whether the norms of queries and keys are over all heads of a token together."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rotary_share: float = 1.0
    """Share of each head that is rotated by position; the rest of it is not. 0: nothing is."""
    max_positions: int = 4096
    experts: Experts | None = None
    """In place of the MLP, in all layers but `dense_layers`."""
    dense_layers: tuple[int, ...] = ()
    recurrence: Recurrence | None = None
    """In place of attention, in `recurrent_layers`."""
    recurrent_layers: tuple[int, ...] = ()
    mlp_layers: tuple[int, ...] | None = None
    """Layers that are an MLP alone, where the others have none; None: every layer has attention, or a
    recurrence, and an MLP."""
    attention_gate: bool = False
    """Whether the result of attention is multiplied by the sigmoid of a gate, number by number."""
    windows: tuple[int, ...] = ()
    """How many positions each layer's tokens see, their own included; 0: all. Empty: all, in every layer."""
    sinks: bool = False
    """Whether each head has a score without a value, which takes its share of the attention."""
    local_theta: float = 0.0
    """`rope_theta` of layers with a window, without scaling; 0: they are rotated as the others."""
    query_scale: float = 1.0
    """Factor on queries, beside 1 / sqrt(head_dim)."""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """The function of an MLP's gate; relu2: the square of relu, in an MLP without a gate."""
    norm_offset: bool = False
    """Whether the weights of norms are stored as their distance from 1."""
    sandwich: bool = False
    """Whether the result of a sublayer is normed too, before it is added."""
    scales_embedding: bool = False
    """Whether embedded tokens are multiplied by sqrt(width)."""
    embedding_scale: float = 1.0
    """A further factor on embedded tokens."""
    residual_scale: float = 1.0
    """Factor on the result of a sublayer, before it is added."""
    logits_divisor: float = 1.0
    extra: int = 0
    """Actions beyond the vocabulary: rows of the head that are never embedded. They are not in
    `config.json`; `graft.models.extra_actions` adds them to a model."""
    extra_bias: bool = False
    """Whether these actions have a bias beside their rows."""

    def __post_init__(self) -> None:
        if self.family not in ARCHITECTURES:
            raise UnsupportedModel(
                f"model family {self.family!r} has no native decoder; known: "
                f"{', '.join(ARCHITECTURES)}"
            )
        for name, limit in LARGEST.items():
            check_size(name, getattr(self, name), limit)
        if self.heads % self.kv_heads:
            raise UnsupportedModel(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: each key-value "
                "head serves the same number of query heads"
            )
        has_pairs = self.rotary_dim > 0 and self.rotary_dim % 2 == 0
        if not 0 <= self.rotary_share <= 1 or (self.rotary_share and not has_pairs):
            raise UnsupportedModel(
                f"head_dim={self.head_dim} with rotary_share={self.rotary_share} rotates {self.rotary_dim} "
                "numbers of a head by position, and these must be pairs"
            )
        if self.extra < 0:
            raise UnsupportedModel(f"extra={self.extra}: must be 0 or more")
        if self.windows and (
            len(self.windows) != self.layers
            or not all(isinstance(window, int) and window >= 0 for window in self.windows)
        ):
            raise UnsupportedModel(
                f"windows={list(self.windows)[:20]}: need a number for each of the {self.layers} layers, 0 "
                "where all positions are seen"
            )
        for name in ("query_scale", "embedding_scale", "residual_scale", "logits_divisor"):
            if not 0 < getattr(self, name) < math.inf:
                raise UnsupportedModel(f"{name}={getattr(self, name)}: must be a number above 0")
        if self.joint_norm and not self.qk_norm:
            raise UnsupportedModel("joint_norm=True: only with qk_norm are queries and keys normed")
        if self.activation not in ("silu", "gelu_tanh", "relu2"):
            raise UnsupportedModel(
                f"activation={self.activation!r}: must be silu, gelu_tanh or relu2"
            )
        self._check_recurrence()
        with_mlp = filter(self.has_mlp, range(self.layers)) if self.experts else ()
        if set(self.dense_layers) - set(with_mlp):
            raise UnsupportedModel(
                f"dense_layers={list(self.dense_layers)}: name layers from 0 to {self.layers - 1} of a "
                "model with experts, and of its mlp_layers if it has any"
            )
        if self.experts is not None and self.experts.swiglu_limit and not self.is_gated:
            raise UnsupportedModel(f"experts.swiglu_limit: {self.activation} has no gate")

    def _check_recurrence(self) -> None:
        layers, alone = self.recurrent_layers, self.mlp_layers or ()
        if (self.recurrence is None) != (not layers):
            raise UnsupportedModel(
                f"recurrent_layers={list(layers)[:20]}, recurrence={self.recurrence}: give both, or neither"
            )
        if sorted(set(layers)) != list(layers) or not all(0 <= i < self.layers for i in layers):
            raise UnsupportedModel(
                f"recurrent_layers={list(layers)[:20]}: name layers from 0 to {self.layers - 1}, in order"
            )
        if sorted(set(alone)) != list(alone) or not set(alone) <= set(range(self.layers)) - set(
            layers
        ):
            raise UnsupportedModel(
                f"mlp_layers={list(alone)[:20]}: name layers from 0 to {self.layers - 1}, in order, that are "
                "no recurrent_layers"
            )
        if not self.attention_layers:
            raise UnsupportedModel(
                f"recurrent_layers={list(layers)[:20]}, mlp_layers={list(alone)[:20]}: at least one of "
                f"{self.layers} layers must attend"
            )
        if self.mlp_layers is not None and (any(self.windows) or self.sandwich):
            raise UnsupportedModel("windows and sandwich: not beside mlp_layers")
        if layers and (any(self.windows) or self.sinks):
            raise UnsupportedModel("windows and sinks: not beside recurrent layers")

    @property
    def head_rows(self) -> int:
        """Rows of the head: tokens, actions beyond them, padding that is never sampled.

        >>> ModelShape(vocab_size=256).head_rows, ModelShape(vocab_size=256, extra=18).head_rows
        (256, 320)
        """
        return self.vocab_size + -(-self.extra // EXTRA_MULTIPLE) * EXTRA_MULTIPLE

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None: it has a plain MLP, or no MLP at all."""
        has_some = layer not in self.dense_layers and self.has_mlp(layer)
        return self.experts if has_some else None

    def window_of(self, layer: int) -> int:
        """How many positions the tokens of a layer see; 0: all."""
        return self.windows[layer] if self.windows else 0

    def is_recurrent(self, layer: int) -> bool:
        return layer in self.recurrent_layers

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer attends or is recurrent."""
        return self.mlp_layers is None or layer not in self.mlp_layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    def ordinal(self, layer: int) -> int:
        """The number of the layer among those with the same kind of mixer: its place in a cache."""
        before = sum(i < layer for i in self.recurrent_layers)
        alone = sum(i < layer for i in self.mlp_layers or ())
        return before if self.is_recurrent(layer) else layer - before - alone

    @property
    def attention_layers(self) -> int:
        """The number of layers that keep keys and values."""
        return self.layers - len(self.recurrent_layers) - len(self.mlp_layers or ())

    @property
    def feed_forward_layers(self) -> int:
        """The number of layers with an MLP or experts."""
        return self.layers if self.mlp_layers is None else len(self.mlp_layers)

    @property
    def expert_layers(self) -> list[int]:
        """The layers with experts."""
        return [layer for layer in range(self.layers) if self.experts_of(layer) is not None]

    @property
    def is_gated(self) -> bool:
        """Whether an MLP has a gate, and so three matrices."""
        return self.activation != "relu2"

    def kind_of(self, layer: int) -> tuple[Any, ...]:
        """What distinguishes a layer from others of this model."""
        kind = self.experts_of(layer), self.window_of(layer), self.is_recurrent(layer)
        return kind if self.mlp_layers is None else (*kind, self.has_mlp(layer))

    @property
    def kinds(self) -> list[int]:
        """The first layer of each kind: what holds for these holds for all."""
        return list({self.kind_of(i): i for i in reversed(range(self.layers))}.values())

    @property
    def active_ff(self) -> int:
        """Width of the MLP that a token passes through, or of its experts together, in the widest layer."""
        chosen = [self.experts_of(layer) for layer in self.kinds if self.has_mlp(layer)]
        widths = (
            self.ff if experts is None else experts.top_k * experts.ff + experts.shared_ff
            for experts in chosen
        )
        return max(widths, default=0)

    @property
    def layer_key(self) -> str:
        """The same text for shapes whose layers are of the same kinds."""
        kinds = [self.kind_of(layer) for layer in self.kinds]
        no_layers: dict[str, Any] = {"dense_layers": (), "windows": (), "recurrent_layers": ()}
        alike = replace(self, layers=1, recurrence=None, mlp_layers=None, **no_layers)
        return f"{alike} {kinds} {self.recurrence}"

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Count the weights of all products."""
        return self._num_params(lambda experts: experts.count)

    @property
    def num_active_params(self) -> int:
        """Count the weights that one token is multiplied by."""
        return self._num_params(lambda experts: experts.top_k)

    def _num_params(self, used: Callable[[Experts], int]) -> int:
        attention = self.width * ((2 + self.attention_gate) * self.q_size + 2 * self.kv_size)
        ends = self.head_rows + (0 if self.tied else self.vocab_size)
        total = self.attention_layers * attention + ends * self.width
        if self.recurrence is not None:
            total += len(self.recurrent_layers) * self.recurrence.num_products(self.width)
        for layer in filter(self.has_mlp, range(self.layers)):
            experts = self.experts_of(layer)
            if experts is None:
                total += (2 + self.is_gated) * self.width * self.ff
            else:
                width = used(experts) * experts.ff + experts.shared_ff
                total += self.width * (experts.count + (2 + self.is_gated) * width)
        return total


def make_recurrence(**sizes: Any) -> Recurrence:
    """A recurrence of these sizes; those that cannot be are refused as other sizes of a model."""
    try:
        return Recurrence(**sizes)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from None


def rope_frequencies(shape: ModelShape) -> tuple[list[float], float]:
    """Radians per position for each pair of a head, and the factor on cos and sin.

    Unscaled: theta**(-2i/d). Scaling lowers some or all of them so that positions beyond the
    trained window get angles inside it.
    """
    half = shape.rotary_dim // 2
    if shape.rope_theta <= 0:
        raise UnsupportedModel(f"rope_theta={shape.rope_theta}: need a number above 0")
    plain = [shape.rope_theta ** (-i / half) for i in range(half)]
    scaling = shape.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return plain, 1.0
    if kind not in ROPE_TYPES:
        why = NOT_COMPUTED.get(kind, "is not known")
        raise UnsupportedModel(
            f"rope_type={kind!r} {why}. Supported are {', '.join(ROPE_TYPES)}: use a variant of the "
            "model with one of these"
        )
    factor = _positive(scaling, "factor")
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "yarn":
        return _yarn(shape, plain, factor)
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    window = _positive(scaling, "original_max_position_embeddings", shape.max_positions)

    def stretch(frequency: float) -> float:
        turns = window * frequency / (2 * math.pi)  # full rotations inside the trained window
        # with equal factors there is no ramp but a step
        ramp = (turns - low) / (high - low) if high > low else float(turns >= low)
        keep = min(max(ramp, 0.0), 1.0)
        return keep * frequency + (1 - keep) * frequency / factor

    return [stretch(f) for f in plain], 1.0


def _positive(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling[key] if default is None else scaling.get(key, default)
    if not is_number(value) or not 0 < value < math.inf:
        raise UnsupportedModel(
            f"rope scaling with {key}={value!r}: need a number above 0; correct the entry"
        )
    return float(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _yarn(shape: ModelShape, plain: list[float], factor: float) -> tuple[list[float], float]:
    scaling = shape.rope_scaling
    window = _positive(scaling, "original_max_position_embeddings", shape.max_positions)
    half = len(plain)
    if shape.rope_theta == 1:
        raise UnsupportedModel(
            "rope_theta=1.0 with yarn: all pairs rotate alike; use another theta"
        )

    def pair_turning(turns: float) -> float:  # index of the pair with this number of rotations
        return half * math.log(window / (turns * 2 * math.pi)) / math.log(shape.rope_theta)

    first = pair_turning(_positive({"beta_fast": scaling.get("beta_fast") or 32}, "beta_fast"))
    last = pair_turning(_positive({"beta_slow": scaling.get("beta_slow") or 1}, "beta_slow"))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, shape.rotary_dim - 1)
    width = last - first or 1e-3  # negative where beta_fast < beta_slow, as in transformers

    def blend(i: int) -> float:
        slow = min(max((i - first) / width, 0.0), 1.0)
        return plain[i] / factor * slow + plain[i] * (1 - slow)

    def temper(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        weight, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if weight and all_dims:
            attention = temper(factor, weight) / temper(factor, all_dims)
        else:
            attention = temper(factor, 1.0)
    return [blend(i) for i in range(half)], float(attention)
