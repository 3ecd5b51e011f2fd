"""Groups of processes, and a port at which each of them meets as torchrun's would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import Processes, free_port


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Processes, int]]:
    with Processes(2, deadline=100.0) as group:
        yield group, free_port()


@pytest.fixture(scope="module")
def four() -> Iterator[tuple[Processes, int]]:
    with Processes(4, deadline=170.0) as group:
        yield group, free_port()
