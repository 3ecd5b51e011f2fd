"""A .gguf file as a Hugging Face folder, so that many runs need not dequantise it each.

python -m benchmarks.expa.convert smollm2.gguf models/smollm2
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.load import load_model
from graft.models.io.save import save_model

if __name__ == "__main__":
    source, folder = map(Path, sys.argv[1:])
    tokenizer = open_tokenizer(source)
    special = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    known = {name: value for name, value in special.items() if value is not None}
    save_model(load_model(source, dtype=torch.float32), folder, special=known)
    tokenizer.save(folder)
