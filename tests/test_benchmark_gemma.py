"""A run of Gemma 3 270M becomes rows of docs/numbers.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.evidence import gemma


def test_a_run_becomes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "numbers.json"
    store.write_text("[]")
    monkeypatch.setattr(record, "FILE", store)
    monkeypatch.setenv("GRAFT_COMMIT", "1234567")
    scores = {"sampled": 0.25, "greedy": 0.75, "tool_rate": 0.5}
    summary = {
        "before": scores,
        "after": {**scores, "sampled": 0.75},
        "seconds_per_phase": {"sft": 66.2, "rl": 60.1},
        "standard_error": {"tasks": 100},
        "machine": {"threads": 1, "architecture": "x86_64"},
        "versions": {"torch": "2.13.0"},
    }
    steps = [
        {"phase": phase, "num_trained_tokens": tokens, f"{gemma.GAP}/max": gap}
        for phase, tokens, gap in (("sft", 9.0, 9.0), ("rl", 5.0, 0.0), ("rl", 6.0, 1e-6))
    ]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    gemma.main([str(tmp_path), "--record"])
    rows = {row["name"]: row for row in json.loads(store.read_text())}
    assert rows["gemma.sampled.after"]["value"] == 0.75
    assert (rows["gemma.tokens"]["value"], rows["gemma.gap"]["value"]) == (11, 1e-6)
    assert rows["gemma.rl"]["command"] == "graft train gemma"
    assert rows["gemma.rl"]["machine"] == "1 thread on a busy x86_64 host, torch 2.13.0"
