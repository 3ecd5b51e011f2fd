"""The blank that some tokenizers put before a text, as those made from SentencePiece do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

FIRST, EVERYWHERE = "first", "everywhere"
"""Where a tokenizer adds a blank before a text: at the very beginning only, or also after each added
token."""


def prefix_of(backend: tokenizers.Tokenizer) -> str:
    """FIRST or EVERYWHERE; "" if nothing is added before a text."""
    kinds = {
        _prefix_kind(node)
        for part in (backend.normalizer, backend.pre_tokenizer)
        for node in parts_of(part)
    }
    return EVERYWHERE if EVERYWHERE in kinds else FIRST if FIRST in kinds else ""


def parts_of(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder and those inside it, as in a tokenizer.json."""
    return _nodes(None if part is None else json.loads(part.__getstate__()))


def _nodes(spec: Any) -> Iterator[dict[str, Any]]:
    if isinstance(spec, dict):
        yield spec
    if isinstance(spec, dict | list):
        for child in spec.values() if isinstance(spec, dict) else spec:
            yield from _nodes(child)


def _prefix_kind(node: Mapping[str, Any]) -> str:
    if node.get("type") == "Prepend":
        return EVERYWHERE
    if node.get("type") == "Metaspace":
        scheme = node.get("prepend_scheme", "always" if node.get("add_prefix_space") else "never")
        return {"always": EVERYWHERE, "first": FIRST}.get(scheme, "")
    return EVERYWHERE if node.get("type") == "ByteLevel" and node.get("add_prefix_space") else ""


def without_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json that neither puts a blank before a text nor takes one away."""

    def changed(node: Any) -> Any:
        if isinstance(node, list):
            return [changed(child) for child in node if not _is_prepend(child)]
        if not isinstance(node, dict):
            return node
        node = {key: changed(value) for key, value in node.items()}
        if node.get("type") == "Metaspace":
            node = {**node, "prepend_scheme": "never"}
            node.pop("add_prefix_space", None)
        elif node.get("type") == "ByteLevel":
            node["add_prefix_space"] = False
        elif node.get("type") == "Strip" and "start" in node:  # a decoder's
            node["start"] = 0
        return node

    parts = {key: spec[key] for key in ("normalizer", "pre_tokenizer", "decoder")}
    return spec | {key: None if _is_prepend(part) else changed(part) for key, part in parts.items()}


def _is_prepend(node: Any) -> bool:
    return isinstance(node, dict) and node.get("type") == "Prepend"
