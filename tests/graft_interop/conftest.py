"""Libraries that take seconds to import: only a process that runs a test of theirs imports them."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def vf() -> Any:
    """verifiers; without it these tests are skipped."""
    return pytest.importorskip("verifiers.v1")
