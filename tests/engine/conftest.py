"""The device of tests that run the engine's kernels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Of the kernels; in the interpreter they work in small pieces, and few of them."""
    if kernel_device.type == "cpu":
        from graft.engine.native.cuda import runner as burst
        from graft.engine.native.cuda.kernels import cut, draw

        monkeypatch.setattr(burst, "MOST_SPLITS", 1)
        monkeypatch.setattr(draw, "CHUNK", 16)
        monkeypatch.setattr(cut, "CHUNK", 32)
    return kernel_device
