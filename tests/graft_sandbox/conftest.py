"""The sandbox's tests run once for every kind of isolation that works on this machine."""

from __future__ import annotations

import pytest

from graft_sandbox.choice import STRONGEST_FIRST, probe


@pytest.fixture(params=STRONGEST_FIRST)
def method(request: pytest.FixtureRequest) -> str:
    tried = probe(request.param)
    if not tried.works:
        pytest.skip(f"{tried.name} does not work here: {tried.why}")
    return tried.name
