"""A tiny model with which recipes are started."""

from __future__ import annotations

import json

import pytest
import tokenizers

from graft.models.io.save import save_model
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from tests.actions.pieces import TAGGED
from tests.engine.engine_kit import tiny_decoder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Random weights; tokens are bytes, and " +", " A", ... as in a large model's vocabulary."""
    folder = tmp_path_factory.mktemp("recipes") / "model"
    backend = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    backend.train_from_iterator(
        [piece for piece in TAGGED for _ in range(9)],
        vocab_size=600,
        min_frequency=9,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": TEMPLATES["chatml"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocab_size = FastTokenizer.load(folder).vocab_size
    save_model(tiny_decoder(vocab_size=vocab_size), folder)
    return str(folder)
