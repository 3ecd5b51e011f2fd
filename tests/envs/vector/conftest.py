from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graft.envs import make_vec
from graft.envs.vector.base import VectorEnv


@pytest.fixture
def vectors() -> Iterator[Any]:
    """`make_vec` whose vectors are closed at the end."""
    made: list[VectorEnv] = []

    def build(*args: Any, **kwargs: Any) -> VectorEnv:
        made.append(make_vec(*args, **kwargs))
        return made[-1]

    yield build
    for vector in made:
        vector.close()
