"""The bank of fuzzed outputs: it finds nothing here, and it finds what is planted."""

from __future__ import annotations

import random
import time

import pytest

from trust import outputs


@pytest.mark.slow
def test_fuzzed_outputs_neither_break_a_reader_nor_are_paid():
    rows = list(outputs.run(2_000, seed=1))
    assert [row.failures for row in rows] == [[] for _ in rows]
    assert sum(row.count for row in rows) == 2_000


def test_planted_faults_are_reported(monkeypatch: pytest.MonkeyPatch):
    def broken(text: str, draw: random.Random) -> str:
        if "boxed" in text:
            raise RecursionError("deep")
        return "exact_match 1" if "answer" in text else ""

    row = outputs.fuzz("planted", broken, 200, seed=0)
    assert any(failure.startswith("RecursionError: deep") for failure in row.failures)
    assert any(failure.startswith("paid: exact_match 1") for failure in row.failures)

    monkeypatch.setattr(outputs, "DEADLINE", 0.02)
    hung = outputs.fuzz("planted", lambda text, draw: time.sleep(9) or "", 1, seed=0)
    assert any("Late: no answer" in failure for failure in hung.failures)


def test_the_same_seed_gives_the_same_texts():
    first, again, other = (
        [outputs.text_of(draw) for _ in range(50)]
        for draw in (random.Random("a"), random.Random("a"), random.Random("b"))
    )
    assert first == again != other
