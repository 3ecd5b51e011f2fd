"""Entries of a parsed `config.json` that many families have, each read as transformers reads it.

The rule for entries: one that changes the function is computed, or the model is refused. Entries of
other families that would change it (`final_logit_softcapping`) are refused too unless their value
changes nothing, since readers differ in whether they count. Anything else (`my_note`, dropouts, which
training does without) is no part of the function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graft.models.shape import ModelShape, UnsupportedModel, is_number

LOOKS_AHEAD = "a token would also attend to later ones, and a policy writes from left to right"
NOT_OURS = "it scales or caps numbers in other families, and our decoder would leave that out"
NOT_ROTATED = "it rotates positions in another way than our decoder does"
ONE_FOR_ALL = "layers would differ from each other, and our decoder computes all of them alike"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_causal": ((True,), LOOKS_AHEAD),
    "use_bidirectional_attention": ((False, None), LOOKS_AHEAD),
    "attention_chunk_size": ((None,), "only full attention is computed"),
    "attn_temperature_tuning": ((False, None), NOT_OURS),
    "attn_logit_softcapping": ((None,), NOT_OURS),
    "final_logit_softcapping": ((None,), NOT_OURS),
    "query_pre_attn_scalar": ((None,), NOT_OURS),
    "attention_multiplier": ((None,), NOT_OURS),
    "embedding_multiplier": ((None, 1), NOT_OURS),
    "residual_multiplier": ((None, 1), NOT_OURS),
    "logits_scaling": ((None, 1), NOT_OURS),
    "logit_scale": ((None, 1), NOT_OURS),
    "rope_interleave": ((None, False), NOT_ROTATED),
    "rope_interleaved": ((None, False), NOT_ROTATED),
    "rope_traditional": ((None, False), NOT_ROTATED),
    "no_rope_layer_interval": ((None, 0), ONE_FOR_ALL),
    "per_layer_config": ((None, {}, []), ONE_FOR_ALL),
}
"""Entries that change the function somewhere: the values under which they do not, and what they do."""


def read_rope(config: Mapping[str, Any], positions: int) -> tuple[float, dict[str, Any]]:
    """(theta, scaling), chosen among the possible entries as transformers does.

    `rope_scaling` wins over `rope_parameters`; inside, `rope_type` over `type`, and `rope_theta` over
    the one beside; but `original_max_position_embeddings` beside wins over the one inside.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise wrong_entry(key, rope, "need a JSON object")
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise wrong_entry(key, f"{{{', '.join(nested)}}}", ONE_FOR_ALL)
    rope = dict(rope)
    rope.pop("partial_rotary_factor", None)
    theta = rope.pop("rope_theta", config.get("rope_theta", 10_000.0))
    if not is_number(theta):
        raise wrong_entry("rope_theta", theta, "need a number above 0")
    named = rope.pop("type", "default")
    kind = rope.setdefault("rope_type", named)
    if kind == "default":
        return float(theta), {}
    if kind in ("llama3", "yarn"):
        beside = {"original_max_position_embeddings": positions} | rope
        rope["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", beside["original_max_position_embeddings"]
        )
    if kind == "yarn" and rope["factor"] is None:
        rope["factor"] = positions / rope["original_max_position_embeddings"]
    return float(theta), rope


def read_rotary_share(config: Mapping[str, Any], default: float | None, head_dim: int) -> float:
    """Share of a head that is rotated; None: the family rotates whole heads, and another share is refused."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    beside = config.get("partial_rotary_factor")
    share = rope.get("partial_rotary_factor", beside) if isinstance(rope, Mapping) else beside
    if default is None:
        if share not in (None, 1):
            raise wrong_entry("partial_rotary_factor", share, "only whole heads are rotated")
        return 1.0
    share = default if share is None else share
    if not is_number(share) or not 0 < share <= 1:
        raise wrong_entry("partial_rotary_factor", share, "need a number above 0, up to 1")
    rotated = int(head_dim * share)
    if rotated % 2 or not rotated:
        why = f"it rotates {rotated} of the {head_dim} numbers of a head, and these must be pairs"
        raise wrong_entry("partial_rotary_factor", share, why)
    return float(share)


def refuse_quantised(config: Mapping[str, Any]) -> None:
    """Quantised weights, of the model or of a part of it (`text_config`)."""
    for part in [config, *(value for value in config.values() if isinstance(value, Mapping))]:
        for key in ("quantization_config", "compression_config"):
            if how := part.get(key):
                named = isinstance(how, Mapping) and how.get("quant_method")
                way = "use the model's unquantised folder"
                if named == "mxfp4":  # which `io.mxfp4` reads
                    way += ", or for gpt-oss the one that `graft export` writes of this"
                raise UnsupportedModel(
                    f"{key}: the weights are quantised ({named or 'an unnamed method'}) and cannot be "
                    f"trained; {way}"
                )


def refuse_looking_ahead(config: Mapping[str, Any]) -> None:
    """Attention to later tokens, in the model or in its text part."""
    text = config.get("text_config")
    for part in [config, *([text] if isinstance(text, Mapping) else [])]:
        _refuse_unless_neutral(part, "is_causal")
        # "vision" is about tokens of pictures, of which there are none
        if part.get("use_bidirectional_attention") != "vision":
            _refuse_unless_neutral(part, "use_bidirectional_attention")


def refuse_what_is_not_computed(config: Mapping[str, Any]) -> None:
    refuse_quantised(config)
    for key in NEUTRAL:
        _refuse_unless_neutral(config, key)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise wrong_entry("hidden_act", config["hidden_act"], "only silu is computed")
    if not all(config.get("no_rope_layers") or [True]):
        raise wrong_entry("no_rope_layers", config["no_rope_layers"], ONE_FOR_ALL)
    _refuse_windows(config)


def _refuse_unless_neutral(config: Mapping[str, Any], key: str) -> None:
    values, why = NEUTRAL[key]
    if key in config and config[key] not in values:
        raise wrong_entry(key, config[key], why)


def _refuse_windows(config: Mapping[str, Any]) -> None:
    """Attention that does not reach back to the beginning."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if window is not None and not is_number(window):
        raise wrong_entry("sliding_window", window, "need a number, or null")
    if kinds and any(kind != "full_attention" for kind in kinds):
        names = sorted(set(map(str, kinds)))
        raise wrong_entry("layer_types", names, "only full attention is computed")


FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(config: Mapping[str, Any], window: int, every: int) -> tuple[int, ...]:
    """`ModelShape.windows`, of `layer_types`; `window` and one full layer in `every` are the defaults."""
    layers, kinds = read_count(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {SLIDING, FULL}:
        raise wrong_entry("layer_types", kinds, f"need {SLIDING} or {FULL} for each layer")
    window = read_count(config, "sliding_window", window)
    windows = tuple(window if kind == SLIDING else 0 for kind in kinds)
    return windows if any(windows) else ()


def layer_types_of(shape: ModelShape) -> list[str]:
    return [SLIDING if shape.window_of(layer) else FULL for layer in range(shape.layers)]


def refuse_window(config: Mapping[str, Any], positions: int) -> None:
    """A window that is shorter than the longest text; `positions` is the default of that."""
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if window is not None and window < (longest or positions):
        raise wrong_entry("sliding_window", window, "only full attention is computed")


def refuse_late_windows(config: Mapping[str, Any]) -> None:
    """Qwen's way: from some layer on, unless `layer_types` lists what each layer has."""
    window = config.get("sliding_window", 4096)
    if config.get("layer_types") or not config.get("use_sliding_window") or window is None:
        return
    first = config.get("max_window_layers", 28)
    if not is_number(first) or first < read_count(config, "num_hidden_layers"):
        raise wrong_entry(
            "use_sliding_window",
            True,
            f"layers from {first} on would see {window} tokens, and only full attention is computed",
        )


def read_count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0; null counts as absent where there is a default."""
    value = config[key] if default is None else config.get(key) or default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong_entry(key, value, "need a whole number above 0")
    return value


def read_number(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number that is 0 or more; null counts as absent."""
    value = default if config.get(key) is None else config[key]
    if not is_number(value) or not 0 <= value < math.inf:
        raise wrong_entry(key, value, "need a number that is 0 or more")
    return value


def read_switch(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise wrong_entry(key, value, "need true or false")
    return value


def wrong_entry(key: str, value: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{key}={value!r}: {why}. If the weights were trained without this entry, correct it in "
        "config.json or delete it; else take another model"
    )
