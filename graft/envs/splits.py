"""Training and test instances that never overlap, whatever the seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

SPLITS = ("train", "test")
TEST_SHARE = 10  # per cent


def split_of(instance: str) -> str:
    """The split of an instance, decided by its text alone: one in ten is "test".

    The same on every machine and Python (the built-in hash() is not), so a model never meets a test
    instance in training, whatever the seeds.
    """
    digest = hashlib.sha256(instance.encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") % 100 < TEST_SHARE else "train"


def check_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: must be one of {', '.join(SPLITS)}")
    return split


def check_range(name: str, bounds: Sequence[int], least: int) -> tuple[int, int]:
    """`bounds` as (low, high), or a ValueError that says what a right one looks like."""
    is_pair = isinstance(bounds, Sequence) and len(bounds) == 2
    if not is_pair or not least <= bounds[0] <= bounds[1]:
        raise ValueError(
            f"{name}={bounds!r}: must be two numbers (low, high) with {least} <= low <= high"
        )
    return bounds[0], bounds[1]
