"""The bank of canary secrets finds nothing, and finds what is planted."""

from __future__ import annotations

import pytest

from trust import secrets

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_no_canary_is_found():
    rows = list(secrets.run(secrets.FULL, 0))
    assert [row.failures for row in rows] == [[], []]
    assert sum(row.count for row in rows) == secrets.FULL


def test_a_planted_leak_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("graft.http.mask", lambda text: text)
    monkeypatch.setattr("graft.tools.errors.mask", lambda text: text)
    monkeypatch.setattr("graft.http.refuse_other_origin", lambda url, location: None)
    (row,) = secrets.run(4, 0)
    assert any("in the message of a client" in failure for failure in row.failures)
    assert any("another server got a request" in failure for failure in row.failures)
