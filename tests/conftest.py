"""Where Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before imports


@pytest.fixture
def kernel_device() -> torch.device:
    """The device whose tensors kernels take here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
