"""A tiny policy and its engine, fresh for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import graft
from tests.api.api_kit import new_policy


@pytest.fixture
def policy() -> graft.Policy:
    return new_policy()


@pytest.fixture
def engine(policy: graft.Policy) -> Iterator[graft.Engine]:
    with graft.Engine(policy) as engine:
        yield engine
