"""The bytes that each token of a vocabulary writes, for what compares a vocabulary with a grammar."""

from __future__ import annotations

import json
from typing import Any

from graft.text.tokenizer import FastTokenizer


def reads_bytes(tokenizer: FastTokenizer) -> bool:
    """Whether its own description says what bytes a token writes: byte-level, or with bytes as a fallback."""
    decoder = json.loads(tokenizer.backend_json()).get("decoder") or {}
    parts: list[dict[str, Any]] = decoder.get("decoders") or [decoder]
    return any(part.get("type") in ("ByteLevel", "ByteFallback") for part in parts)


def token_bytes(tokenizer: FastTokenizer) -> list[bytes]:
    """The text of every token, alone, as UTF-8: for alphabets, whose tokens are characters."""
    return [
        tokenizer.decode([token]).encode(errors="surrogatepass")
        for token in range(tokenizer.vocab_size)
    ]
