"""The text part of models that also read pictures, as a config of its own."""

from __future__ import annotations

from collections.abc import Mapping

from graft.models.families.entries import wrong_entry
from graft.models.families.family import Config

TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""model_type of a whole model -> that of its text part."""
OTHER_PARTS = (
    *("text_config", "vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)


def text_part(config: Config) -> Config:
    """The config of the text part; any other config as it is.

    {model_type: qwen3_5, tie_word_embeddings: true, text_config: {hidden_size: 64}}
    -> {model_type: qwen3_5_text, tie_word_embeddings: true, hidden_size: 64}

    Entries inside win, except for the head, which belongs to the whole model.
    """
    name = TEXT_TYPES.get(str(config.get("model_type")))
    if name is None:
        return config
    inside = config.get("text_config")
    if not isinstance(inside, Mapping):
        raise wrong_entry("text_config", inside, "need the config of the text part")
    beside = {key: value for key, value in config.items() if key not in OTHER_PARTS}
    named = {key: value for key, value in inside.items() if value is not None}
    tied = config.get("tie_word_embeddings", inside.get("tie_word_embeddings", False))
    return {**inside, **beside, **named, "model_type": name, "tie_word_embeddings": tied}
