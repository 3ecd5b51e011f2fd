"""The benchmark of the gap: a tiny run on the CPU."""

import pytest

from benchmarks.exact import LOADS, main


def test_every_load_runs_in_both_modes_and_the_order_leaves_no_gap():
    found = main(["--device", "cpu", "--shape", "tiny", "--quick"])
    assert list(found) == list(LOADS)
    for load, modes in found.items():
        if "on" not in modes:
            pytest.skip("no order holds with this machine's library")
        assert list(modes) == ["on", "off"]
        for mode, measured in modes.items():
            gap = max(float(gaps.max()) for gaps in measured.gaps)
            assert gap == 0.0 if mode == "on" else gap < 1e-4, (load, mode)
            assert measured.rollout[0] > 0 and measured.learner[0] > 0
