"""What the tests of kernels share."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that whatever is read without having been written shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):

        def poisoned(*args: Any, fresh: Any = getattr(owner, name), **options: Any) -> torch.Tensor:
            made = fresh(*args, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(owner, name, poisoned)
