"""The long run: what must be flat, and that growth is found."""

from __future__ import annotations

import pytest

from trust import soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_unreliable_tools_ends_with_all_its_steps():
    (row,) = soak.run(40, seed=1)
    assert row.failures == []
    assert row.measured["attempts tool_error"] > 0


@pytest.mark.parametrize("name", soak.ALLOWED)
def test_growth_after_the_warm_up_is_a_failure(name):
    def rows(growth: float) -> list[dict[str, float]]:
        # the size of the folder grows by 10 KB a step in any case
        return [
            {name: 100.0 + growth * n, "disk, KB": 10.0 * n + growth * n * n} for n in range(100)
        ]

    assert soak._flat(name, rows(0.0), {}) == []
    (failure,) = soak._flat(name, rows(1.0), {})
    assert failure.startswith(f"{name} grew from ")
