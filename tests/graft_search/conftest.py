"""Indexes of these tests lie in their own folder, and no service of the machine is found."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "graft-cache"))
    monkeypatch.delenv("SEARCH_URL", raising=False)
