"""The device of tests that run the engine's kernels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Of the kernels; in the interpreter with small chunks, and few of them."""
    if kernel_device.type == "cpu":
        from graft.engine.native.cuda import runner
        from graft.engine.native.cuda.kernels import draw, truncation

        monkeypatch.setattr(runner, "MAX_SPLITS", 1)
        monkeypatch.setattr(draw, "CHUNK", 16)
        monkeypatch.setattr(truncation, "CHUNK", 32)
    return kernel_device
