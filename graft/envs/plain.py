"""Any value as plain data: what other libraries and users return, in JSON's types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 20


def plain(value: Any, depth: int = 0) -> Any:
    """`value` in JSON's types: arrays become lists, keys texts, anything unknown its text.

    >>> plain({1: (2, {3}), "x": float("nan")})
    {'1': [2, [3]], 'x': None}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= MAX_DEPTH:
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return [plain(one, depth + 1) for one in sorted(value, key=str)]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(one, depth + 1) for one in value]
    if callable(tolist := getattr(value, "tolist", None)):  # arrays and scalars of numpy
        return plain(tolist(), depth + 1)
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic
        return plain(dump(mode="json"), depth + 1)
    return str(value)
