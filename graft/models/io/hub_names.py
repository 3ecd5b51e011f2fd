"""Which texts may name a model on the Hugging Face hub; commands ask without loading a library."""

from __future__ import annotations

import re

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([^@\s]+))?")
FILES = re.compile(r"config\.json|.*\.(gguf|safetensors|ya?ml|json|jsonl)")
"""Names after the slash that are a file's rather than a model's."""


def split_name(path: str) -> tuple[str, str] | None:
    """(name, revision) of what may be a name on the hub, None of a path.

    >>> split_name("Qwen/Qwen3-0.6B"), split_name("Qwen/Qwen3-0.6B@v1.0")
    (('Qwen/Qwen3-0.6B', 'main'), ('Qwen/Qwen3-0.6B', 'v1.0'))
    >>> [split_name(path) for path in ("./x", "/x/y", "a/b/c", "models/x.gguf", "x")]
    [None, None, None, None, None]
    """
    found = NAME.fullmatch(path)
    if found is None or path.startswith("runs/") or FILES.fullmatch(found[1].partition("/")[2]):
        return None
    return found[1], found[2] or "main"
