"""Thresholds of the garbage collector while rollouts are made."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from graft.garbage import THRESHOLDS, rare_collections
from graft.rollout.event_loop import run


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


async def seen() -> tuple[int, int, int]:
    return gc.get_threshold()


def test_a_rollout_runs_with_rare_collections() -> None:
    assert run(seen) == THRESHOLDS
    assert gc.get_threshold() == (700, 10, 10)


def test_overlapping_blocks_restore_the_first_thresholds_at_the_last_end() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(rare_collections())
    second.enter_context(rare_collections())
    first.close()
    assert gc.get_threshold() == THRESHOLDS
    second.close()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize(
    ("own", "inside"), [((0, 10, 10), (0, 10, 10)), ((50_000, 5, 5), (50_000, 10, 100))]
)
def test_own_thresholds_are_only_raised_and_collections_stay_off(
    own: tuple[int, int, int], inside: tuple[int, int, int]
) -> None:
    gc.set_threshold(*own)
    with rare_collections():
        assert gc.get_threshold() == inside
    assert gc.get_threshold() == own
