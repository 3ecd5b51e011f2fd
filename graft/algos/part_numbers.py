"""Bounds of the numbers that credits, losses, weights and branches of the tables take, by name.

A name means the same wherever it is taken, so one line here bounds it everywhere; a factory checks only
what depends on its other arguments.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

SIGNED = {"right", "low_cov", "high_cov", "threshold"}
"""Numbers that may be negative: a reward, covariances, a change of an entropy."""
POSITIVE = {"eps", "norm", "cap"}
"""Divisors and the largest weight: 0 would divide by 0, or train nothing."""
ENDLESS = {"high", "cap", "clip", "dual"}
"""Upper bounds, which infinity (.inf) turns off."""
UPPER_BOUNDS = {"eps": 1.0}
"""Larger ones make all advantages 0."""


def check_numbers(signature: inspect.Signature, keywords: Mapping[str, Any]) -> None:
    """Refuse what is no number, or none to compute with: it would fail steps later, inside a formula."""
    for key, value in keywords.items():
        types = _types(signature, key)
        if not types & {"int", "float"} or (value is None and "None" in types):
            continue
        if isinstance(value, bool) and "bool" in types:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            whole = "" if "float" in types else "whole "
            raise TypeError(f"{key}={value!r}: must be a {whole}number")
        if math.isnan(value) or (math.isinf(value) and key not in ENDLESS):
            raise TypeError(f"{key}={value!r}: must be a finite number")
        if "float" not in types and value != int(value):
            raise TypeError(f"{key}={value!r}: must be a whole number")


def check_bounds(signature: inspect.Signature, keywords: Mapping[str, Any]) -> None:
    """Refuse numbers that would turn a sign or train nothing.

    >>> check_bounds(inspect.signature(grpo), {"eps": -1})
    Traceback (most recent call last):
    ValueError: eps=-1: must be above 0
    """
    for key, value in keywords.items():
        if not isinstance(value, int | float) or not _types(signature, key) & {"int", "float"}:
            continue
        if key in POSITIVE and value <= 0:
            raise ValueError(f"{key}={value!r}: must be above 0")
        if value < 0 and key not in SIGNED:
            raise ValueError(f"{key}={value!r}: must not be negative")
        if value > UPPER_BOUNDS.get(key, math.inf):
            raise ValueError(f"{key}={value!r}: must be at most {UPPER_BOUNDS[key]:g}")


def _types(signature: inspect.Signature, key: str) -> set[str]:
    """The names in the annotation of a parameter, which is a text: "float | None" -> {float, None}."""
    known = signature.parameters.get(key)
    return {*re.findall(r"'\w*'|\w+", str(known.annotation if known else ""))}
