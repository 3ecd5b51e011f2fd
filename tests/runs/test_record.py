"""Reading the folder of a run: what grows, what was cut back, which process holds it, its state."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.config import ConfigError
from graft.runs import GrowingJsonl, RunRecord, RunStatus, find_run, find_runs, is_held, numbers
from graft.types import Author, Episode, Leaf, Span, Task

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""


def step(number: int, phase: str = "rl", **metrics: Any) -> str:
    return json.dumps({"phase": phase, "step": number, **metrics}) + "\n"


def make_run(
    folder: Path,
    *lines: str,
    train: int = 4,
    sft: int = 0,
    summary: dict[str, Any] | None = None,
    episodes: dict[int, list[Episode]] | None = None,
    config: str = "",
) -> RunRecord:
    """A folder as a run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = config or f"train: {{steps: {train}}}\nsft: {{steps: {sft}, epochs: 0}}\n"
    (folder / "config.yaml").write_text(recipe)
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / ".lock").touch()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    for number, trees in (episodes or {}).items():
        (folder / "episodes").mkdir(exist_ok=True)
        text = "".join(tree.dumps() + "\n" for tree in trees)
        (folder / "episodes" / f"step_{number:06d}.jsonl").write_text(text)
    return RunRecord(folder)


def save(record: RunRecord, name: str, **state: Any) -> None:
    folder = record.path / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))


def attempt(text: str = "5", reward: float = 1.0, task: str = "sum/1") -> Episode:
    one = Episode(Task(task, "calc", answer="5"))
    root = one.append(Span(None, Author.TASK, [1], text="2+3="))
    call = one.append(Span(root, Author.POLICY, [2], text="[2+3]", info={"tool_calls": 1}))
    result = one.append(Span(call, Author.ENV, [3], text="5;"))
    tip = one.append(Span(result, Author.POLICY, [4], text=text))
    one.leaves.append(Leaf((tip,), reward, metrics={"tool_calls": 1.0}))
    return one


@contextmanager
def held(lock: Path, by: str = "flock"):
    """A process of its own that holds the file."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock), by],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


# lines of a file that grows


def test_each_line_comes_once_and_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = GrowingJsonl(path)
    assert list(lines.new()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(lines.new()) == [{"step": 1}]
    assert list(lines.new()) == []
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(lines.new()) == [{"step": 2}]


def test_lines_without_an_object_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'nonsense\n[1]\n{"a": 1}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    assert list(GrowingJsonl(path).new()) == [{"a": 1}, {"a": 2}]


def test_a_line_longer_than_what_is_read_at_a_time_comes_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"a": "x" * 3_000_000}) + '\n{"b": 1}\n')
    first, second = GrowingJsonl(path).new()
    assert len(first["a"]) == 3_000_000
    assert second == {"b": 1}


def test_a_file_that_was_cut_back_is_read_anew(tmp_path):
    record = make_run(tmp_path / "a", *(step(n, reward=n / 10) for n in (1, 2, 3)))
    assert record.refresh() == 3
    (record.path / "metrics.jsonl").write_text(step(1, reward=0.1))
    assert record.refresh() == 1
    assert list(record.curves["rl"].steps) == [1]
    (record.path / "metrics.jsonl").write_text("")
    assert record.refresh() == 0
    assert len(record.curves["rl"]) == 0


def test_a_file_that_was_cut_back_and_grew_beyond_is_seen_too(tmp_path):
    record = make_run(tmp_path / "a", step(1, reward=0.1), step(2, reward=0.2))
    record.refresh()
    again = [step(n, reward=0.7) for n in (1, 2, 3)]
    (record.path / "metrics.jsonl").write_text("".join(again))
    record.refresh()
    assert list(record.curves["rl"]["reward"]) == [0.7, 0.7, 0.7]


@pytest.mark.slow
def test_200_000_lines_are_read_in_seconds_and_then_only_what_is_new(tmp_path):
    row = {f"area/metric_{n}": n / 7 for n in range(20)}
    rest = step(0, **row).removeprefix('{"phase": "rl", "step": 0, ')
    lines = (f'{{"phase": "rl", "step": {n}, {rest}' for n in range(1, 200_001))
    record = make_run(tmp_path / "a", *lines)
    started = time.process_time()
    assert record.refresh() == 200_000
    assert time.process_time() - started < 30
    with (record.path / "metrics.jsonl").open("a") as file:
        file.write(step(200_001, **row))
    started = time.process_time()
    assert record.refresh() == 1
    last = RunRecord(record.path).last
    assert time.process_time() - started < 0.5
    assert last is not None and last["step"] == 200_001
    assert record.curves["rl"]["area/metric_14"][-1] == 2.0


def test_a_metric_of_some_steps_only_is_nan_at_the_others(tmp_path):
    record = make_run(
        tmp_path / "a", step(1, loss=1.0), step(2, loss=2.0, eval=0.5), step(3, loss=None)
    )
    record.refresh()
    curves = record.curves["rl"]
    assert [math.isnan(value) for value in curves["eval"]] == [True, False, True]
    assert list(curves["loss"])[:2] == [1.0, 2.0]
    assert math.isnan(curves["loss"][2])


def test_numbers_leave_out_what_is_none():
    row = {"phase": "rl", "step": 3, "reward": 1, "big": 10**400, "nonfinite": ["x"]}
    found = numbers(row)
    assert found["reward"] == 1.0
    assert math.isnan(found["big"])
    assert set(found) == {"reward", "big"}


def test_the_last_whole_line_is_found_from_the_end(tmp_path):
    record = make_run(tmp_path / "a", step(1), step(2), '{"phase": "rl", "step": 3, "rew')
    assert record.last == {"phase": "rl", "step": 2}
    long = step(3, note="x" * 200_000)
    make_run(tmp_path / "a", step(2), long, "no json\n")
    assert record.last is not None and record.last["step"] == 3
    make_run(tmp_path / "a", '{"phase": "rl", "step": 1}')
    assert record.last is None


# who holds it


@pytest.mark.parametrize("by", ["flock", "lockf"])  # lockf: what a network file system shows
def test_a_lock_of_another_process_is_seen_and_ends_with_it(tmp_path, by):
    lock = tmp_path / ".lock"
    assert not is_held(lock)
    lock.touch()
    assert not is_held(lock)
    with held(lock, by) as process:
        assert is_held(lock)
        process.kill()
        process.wait()
        assert not is_held(lock)


def test_looking_never_takes_the_lock(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_: Any) -> None:
        raise AssertionError("a starting run could fail at this lock")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    (tmp_path / ".lock").touch()
    assert not is_held(tmp_path / ".lock")


# how it stands


def test_a_run_that_is_held_is_running_and_a_killed_one_stopped(tmp_path):
    record = make_run(tmp_path / "a", step(1))
    with held(record.path / ".lock") as process:
        assert record.status is RunStatus.RUNNING
        process.kill()
        process.wait()
        assert record.status is RunStatus.STOPPED


@pytest.mark.parametrize(
    ("lines", "train", "saved", "failed", "status"),
    [
        ([step(3), step(4)], 4, "rl-000004", 0, RunStatus.DONE),
        ([step(4), step(5)], 8, "rl-000004", 0, RunStatus.STOPPED),
        ([step(4)], 8, "rl-000004", 0, RunStatus.STOPPED),  # more steps were set after its end
        ([step(25, "sft")], 0, "sft-000025", 0, RunStatus.DONE),  # the warm-up may end early
        ([step(1), step(2)], 4, "", 3, RunStatus.FAILED),  # its next batch is among the failed
        ([step(1), step(2), step(3)], 4, "", 3, RunStatus.STOPPED),  # it went on
        ([step(60, "sft")], 4, "", 1, RunStatus.FAILED),
    ],
)
def test_the_end_of_a_run_is_read_from_its_summary_and_failed_batches(
    lines, train, saved, failed, status, tmp_path
):
    summary = {"checkpoint": f"runs/a/checkpoints/{saved}"} if saved else None
    record = make_run(tmp_path / "a", *lines, summary=summary, train=train, sft=60)
    if saved:
        os.utime(record.path / "summary.json", (1, 1))  # a copied folder has any times
    if failed:
        (record.path / "failed").mkdir()
        (record.path / "failed" / f"step_{failed:06d}.jsonl").touch()
    assert record.status is status


def test_a_summary_that_names_no_checkpoint_is_judged_by_its_time(tmp_path):
    record = make_run(tmp_path / "a", step(4), summary={"after": {}})
    os.utime(record.path / "metrics.jsonl", (100, 100))
    os.utime(record.path / "summary.json", (200, 200))
    assert record.status is RunStatus.DONE
    os.utime(record.path / "summary.json", (50, 50))
    assert record.status is RunStatus.STOPPED


def test_silence_is_five_steps_and_more_than_a_minute(tmp_path):
    record = make_run(tmp_path / "a", step(1, step_time=100.0))
    for path in record.path.iterdir():
        os.utime(path, (1000, 1000))
    assert record.silent_for(now=1000 + 499) == 0.0
    assert record.silent_for(now=1000 + 501) == 501.0
    (record.path / "metrics.jsonl").write_text(step(1, step_time=0.1))
    os.utime(record.path / "metrics.jsonl", (1000, 1000))
    assert record.silent_for(now=1059) == 0.0
    assert record.silent_for(now=1061) == 61.0


def test_steps_in_all_come_from_the_recipe_or_from_the_epochs_done(tmp_path):
    record = make_run(tmp_path / "a", train=60, sft=400)
    assert (record.total_steps("rl"), record.total_steps("sft")) == (60, 400)
    epochs = make_run(tmp_path / "b", config="sft: {steps: 0, epochs: 2}\n")
    row = {"phase": "sft", "step": 30, "epoch": 0.25}
    assert epochs.total_steps("sft", row) == 240
    assert epochs.total_steps("sft") is None


def test_scores_before_come_from_the_checkpoint_until_there_is_a_summary(tmp_path):
    record = make_run(tmp_path / "a", step(1))
    save(record, "rl-000000", before={"sampled": 0.25})
    assert record.scores == ({"sampled": 0.25}, {})
    save(record, "rl-000004", before={"sampled": 0.5})
    save(record, ".rl-000006.partial", before={"sampled": 0.9})
    assert record.scores[0] == {"sampled": 0.5}


def test_a_damaged_folder_reads_as_an_empty_one(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "alarms.jsonl"):
        (folder / name).write_bytes(b"\xff{[: nonsense\n")
    record = RunRecord(folder)
    assert (record.config, record.summary, record.last, record.alarms) == ({}, {}, None, [])
    assert record.status is RunStatus.STOPPED


# finding runs


def test_runs_are_found_in_folders_of_folders_but_not_in_runs(tmp_path):
    for name in ("b", "arpo/a", "b/inner", ".hidden"):
        make_run(tmp_path / name)
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["arpo/a", "b"]


def test_a_run_is_named_by_its_folder_or_by_its_name_in_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "first")
    assert find_run("first").path == Path("runs/first")
    assert find_run("runs/first").name == "first"
    with pytest.raises(ConfigError, match="no such folder"):
        find_run("second")
    with pytest.raises(ConfigError, match=r"is a folder of runs \(runs/first\)"):
        find_run("runs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither config"):
        find_run("empty")


def test_reading_runs_loads_no_torch():
    code = "import sys, graft.runs, graft.viewer.saved, graft.commands.runs; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "graft.viewer.saved" in done.stdout.split()
    assert "torch" not in done.stdout.split()
