"""The bank of process deaths: nothing is lost, and a fault that is planted is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trust import deaths
from trust.moments import disks_in
from trust.tiny_runs import compare


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_that_died_end_as_if_nothing_had_happened():
    rows = list(deaths.run(24, seed=1))
    assert {row.group.partition(",")[0] for row in rows} == set(deaths.KINDS)
    assert all(row.count for row in rows)
    assert [failure for row in rows for failure in row.failures] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_records_that_are_not_synced_before_a_checkpoint_are_found(tmp_path, monkeypatch):
    off = "from graft.train.run_dir.journal import Journal; Journal.sync = lambda self: None\n"
    monkeypatch.setattr(deaths, "CODE", off + deaths.CODE)
    bank = deaths._Bank("sft", tmp_path / "sft", tmp_path, 0, 1000)
    found = bank._watch(tmp_path / "sft" / "whole", tmp_path / "sft" / "disks")
    late = [disk for disk in found if disk.is_power_cut and "sft-000003" in str(disk)]
    faults = [fault for disk in late for fault in bank._attempt(disk, bank._resume).faults]
    assert any("metrics of the steps" in fault for fault in faults)


def fabricated(folder: Path) -> Path:
    """The records of a run of two steps."""
    for name in ("episodes", "learned", "checkpoints/rl-000002"):
        (folder / name).mkdir(parents=True)
    lines = [{"phase": "rl", "step": n, "loss": 0.5 * n, "reward": 0.25, "kl": 0.0} for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, 2):
        span = {"parent": None, "author": "policy", "tokens": [5], "actions": [5], "version": 0}
        leaf = {"tips": [0], "reward": 1.0, "status": "done"}
        row = {"task": {"id": f"t{step}"}, "spans": [span], "leaves": [leaf]}
        (folder / "episodes" / f"step_00000{step}.jsonl").write_text(json.dumps(row) + "\n")
        weights = {"updates": step, "before": f"w{step - 1}", "after": f"w{step}"}
        (folder / "learned" / f"step_00000{step}.json").write_text(json.dumps(weights))
    (folder / "summary.json").write_text('{"before": 0.1, "after": 0.2}')
    return folder


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


FAULTS = {
    "metrics of the steps": lambda run: replaced(run / "metrics.jsonl", '"step": 2', '"step": 1'),
    "loss 1.0000001": lambda run: replaced(run / "metrics.jsonl", "1.0,", "1.0000001,"),
    "other episodes": lambda run: replaced(run / "episodes/step_000002.jsonl", "[5]", "[6]"),
    "files of one run only": lambda run: (run / "episodes/step_000001.jsonl").unlink(),
    "other weights": lambda run: replaced(run / "learned/step_000001.json", "w1", "w9"),
    "another score": lambda run: replaced(run / "summary.json", "0.2", "0.3"),
    "left behind": lambda run: (run / "checkpoints" / ".rl-000001.partial").mkdir(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_comparison_names_what_differs(tmp_path, fault):
    whole = fabricated(tmp_path / "whole")
    shutil.copytree(whole, tmp_path / "run")
    assert compare(tmp_path / "run", whole).faults == []
    FAULTS[fault](tmp_path / "run")
    assert any(fault in text for text in compare(tmp_path / "run", whole).faults)


def test_a_diagnostic_may_differ_by_a_rounding(tmp_path):
    whole = fabricated(tmp_path / "whole")
    shutil.copytree(whole, tmp_path / "run")
    replaced(tmp_path / "run" / "metrics.jsonl", '"kl": 0.0', '"kl": 1e-07')
    found = compare(tmp_path / "run", whole)
    assert found.faults == [] and found.largest == 1e-7


def test_alarms_of_a_timed_run_may_differ_and_other_files_may_not(tmp_path):
    whole = fabricated(tmp_path / "whole")
    shutil.copytree(whole, tmp_path / "run")
    for name in ("alarms.jsonl", "other.jsonl"):
        (tmp_path / "run" / name).write_text("{}\n")
    (fault,) = compare(tmp_path / "run", whole, is_timed=True).faults[:1]
    assert "other.jsonl" in fault and "alarms.jsonl" not in fault
    assert "alarms.jsonl" in compare(tmp_path / "run", whole).faults[0]


def test_disks_are_read_in_order_with_all_their_moments(tmp_path):
    rows = [
        ["before write a #1", "", 0],
        ["before write a #1", "names", 1],
        ["after sync a #1", "", 0],
    ]
    (tmp_path / "disks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = disks_in(tmp_path)
    assert first.folder == tmp_path / "0" and len(first.moments) == 2 and not first.is_power_cut
    assert second.is_power_cut and str(second) == "before write a #1, power cut (names lost)"
