"""`graft runs` and `graft watch`, on folders made by hand and on processes that really run."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from graft.commands.runs import runs, size_in_words, watch
from graft.config import ConfigError
from graft.runs.follower import Follower, StepClock, ago
from graft.train.monitor.display import Display
from graft.train.monitor.labels import RUN_COLUMNS
from tests.runs.test_record import attempt, held, make_run, save, step

app = typer.Typer()
app.command("runs")(runs)
app.command("watch")(watch)

WRITER = """
import fcntl, json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
lock = (folder / ".lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
for number in (2, 3):
    time.sleep(0.4)
    with (folder / "metrics.jsonl").open("a") as file:
        line = json.dumps({"phase": "rl", "step": number, "reward": number / 4}) + "\\n"
        file.write(line[:9])
        file.flush()
        time.sleep(0.1)
        file.write(line[9:])
    if number == 2:
        with (folder / "alarms.jsonl").open("a") as file:
            alarm = {"phase": "rl", "step": 2, "metric": "entropy", "level": "warn", "text": "fell"}
            file.write(json.dumps(alarm) + "\\n")
summary = {"before": {"sampled": 0.25}, "after": {"sampled": 0.75}, "checkpoint": "x/rl-000003"}
(folder / "summary.json").write_text(json.dumps(summary))
"""

CLI = """
import sys, typer
from graft import cli
from graft.commands.runs import runs, watch
cli.app.command("runs")(runs)
cli.app.command("watch")(watch)
cli.main()
"""


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_has_a_line_per_run_the_latest_first(tmp_path):
    old = make_run(tmp_path / "old", step(60, "sft", loss=1.636), train=4, sft=400)
    for path in old.path.iterdir():
        os.utime(path, (time.time() - 200, time.time() - 200))
    new = make_run(
        tmp_path / "new",
        step(4, reward=0.5),
        summary={
            "before": {"sampled": 0.31, "greedy": 0.4},
            "after": {"sampled": 0.952},
            "checkpoint": "c/rl-000004",
        },
    )
    (new.path / "weights").write_bytes(b"x" * 3_000_000)
    titles, first, second = output_of("runs", str(tmp_path)).splitlines()
    assert re.split("  +", titles) == [*RUN_COLUMNS]
    assert re.split("  +", first) == [
        *(
            "new",
            "done",
            "reinforce 4/4",
            "reward 0.500",
            "0.310 -> 0.952",
            "steps 0",
            "now",
            "3 MB",
        )
    ]
    assert second.startswith("old  stopped  warm-up 60/400  loss 1.636    ? -> ?")
    assert "3 min ago" in second and "steps 400" in second


def test_columns_are_even_where_characters_take_two_of_them(tmp_path):
    for name in ("plain", "数据"):  # five columns and four
        make_run(tmp_path / name, step(4, reward=0.5))
    lines = sorted(output_of("runs", str(tmp_path)).splitlines()[1:])
    assert [line.partition("reinforce")[0].count(" ") for line in lines] == [4, 5]


def test_settings_in_which_runs_differ_have_a_column_and_json_has_all(tmp_path):
    recipe = "algo: {{name: {}}}\nrun: {{name: {}, seed: {}}}\ntrain: {{steps: 4, lr: {}}}\n"
    for name, algo, seed, lr in (
        ("a", "grpo", 0, 1e-3),
        ("b", "ppo", 0, 0.5),
        ("c", "ppo", 1, 0.5),
    ):
        make_run(tmp_path / name, step(1), config=recipe.format(algo, name, seed, lr))
    lines = sorted(output_of("runs", str(tmp_path)).splitlines()[1:])
    assert [re.split("  +", line)[5] for line in lines] == [
        "algo grpo, lr 0.001, seed 0",
        "algo ppo, lr 0.5, seed 0",
        "algo ppo, lr 0.5, seed 1",
    ]
    report = json.loads(output_of("runs", str(tmp_path), "--json"))
    assert report["differing"] == ["algo.name", "train.lr", "run.seed"]  # what is learned first
    ours = {row["name"]: row["settings"] for row in report["runs"]}
    assert ours["b"] == {
        "algo.name": "ppo",
        "run.name": "b",
        "run.seed": 0,
        "train.steps": 4,
        "train.lr": 0.5,
    }


def test_runs_that_do_not_differ_have_no_column_of_settings(tmp_path):
    for name in "ab":
        make_run(tmp_path / name, step(1))
    assert "settings" not in output_of("runs", str(tmp_path)).splitlines()[0]


def test_settings_that_json_cannot_hold_are_written_as_text(tmp_path):
    make_run(tmp_path / "a", step(1), config="train: {lr: .inf, since: 2026-01-02}\n")
    (row,) = json.loads(output_of("runs", str(tmp_path), "--json"))["runs"]
    assert row["settings"] == {"train.lr": "inf", "train.since": "2026-01-02"}


def test_json_has_every_number_and_no_nan(tmp_path):
    record = make_run(tmp_path / "group" / "a", step(3, reward=None, loss=0.5), train=8)
    save(record, "rl-000002", before={"sampled": 0.25})
    with held(record.path / ".lock"):
        report = json.loads(output_of("runs", str(tmp_path), "--json").splitlines()[-1])
    (row,) = report["runs"]
    assert (row["name"], row["status"], row["phase"]) == ("group/a", "running", "rl")
    assert (row["step"], row["steps"], row["reward"], row["loss"]) == (3, 8, None, 0.5)
    assert row["before"] == {"sampled": 0.25}
    assert (row["after"], row["checkpoint"], row["silent"]) == ({}, "rl-000002", False)


def test_an_empty_folder_prints_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "graft train quickstart" in output_of("runs")
    (tmp_path / "mine").mkdir()
    assert "no runs in mine/" in output_of("runs", "mine")
    with pytest.raises(ConfigError, match="no folder 'other'"):
        runs("other")


def test_a_name_cannot_steer_the_terminal(tmp_path):
    make_run(tmp_path / "a\x1b[2J", step(1))
    assert "\x1b" not in output_of("runs", str(tmp_path))


def test_times_and_sizes_are_short_texts():
    assert [ago(s) for s in (0.4, 45, 119, 150, 7300, 200_000)] == [
        *("now", "45 s ago", "119 s ago", "2 min ago", "2 h ago", "2 days ago")
    ]
    assert [size_in_words(b) for b in (0, 5000, 3_200_000, 1_260_000_000)] == [
        *("1 kB", "5 kB", "3 MB", "1.3 GB")
    ]


# watch


def test_a_run_that_is_over_is_printed_and_the_watch_ends(tmp_path):
    record = make_run(tmp_path / "a", *(step(n, reward=n / 100) for n in range(1, 31)), train=60)
    save(record, "rl-000025")
    lines = output_of("watch", str(record.path)).splitlines()
    assert lines[0] == "reinforce: 60 steps"
    assert [line.split()[1] for line in lines[1:11]] == [f"{n}/60" for n in range(21, 31)]
    assert "stopped after rl 30" in lines[11]
    assert "goes on from checkpoint rl-000025" in lines[11]


def test_what_another_process_writes_is_seen_and_its_end_ends_the_watch(tmp_path):
    record = make_run(tmp_path / "a", step(1, reward=0.25, step_time=0.5), train=3)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(record.path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "held\n"
    out, clock = io.StringIO(), StepClock()
    try:
        with Display(0, stream=out, clock=clock, plain_seconds=0) as display:
            Follower(record, display, clock).follow(every=0.05)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    text = out.getvalue()
    lines = text.splitlines()
    assert lines[1].startswith("reinforce 1/3  reward 0.250")
    assert "left 0:01" in lines[1]  # two steps of the half second that the first one took
    assert [line for line in lines if line.startswith("reinforce 2/3  reward 0.500")]
    assert "warning at step 2: fell" in lines
    assert lines.index("reinforce 3/3  reward 0.750") < lines.index(f"{record.path} is done")
    assert ["sampled", "0.250", "0.750", "+0.500"] in [line.split() for line in lines]


def test_a_silent_run_is_reported_once(tmp_path):
    record = make_run(tmp_path / "a", step(1, reward=0.5))
    with held(record.path / ".lock") as process:
        for path in record.path.iterdir():
            os.utime(path, (time.time() - 300, time.time() - 300))
        looks = 0

        def sleep(_: float) -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                process.kill()
                process.wait()

        out, clock = io.StringIO(), StepClock()
        with Display(0, stream=out, clock=clock, plain_seconds=0) as display:
            Follower(record, display, clock).follow(sleep=sleep)
    assert out.getvalue().count("silent since ") == 1
    assert "(5 min ago)" in out.getvalue()


def test_a_run_that_goes_back_is_followed_from_there(tmp_path):
    record = make_run(tmp_path / "a", *(step(n, reward=0.5) for n in (1, 2, 3)))
    with held(record.path / ".lock") as process:

        def sleep(_: float) -> None:
            make_run(record.path, step(1, reward=0.5), step(2, reward=0.125))
            process.kill()
            process.wait()

        out, clock = io.StringIO(), StepClock()
        with Display(0, stream=out, clock=clock, plain_seconds=0) as display:
            Follower(record, display, clock).follow(sleep=sleep)
    after = out.getvalue().partition("the run resumed from")[2]
    assert "reinforce 2/4  reward 0.125" in after


def test_ctrl_c_ends_the_watch_with_130_and_not_the_run(tmp_path):
    record = make_run(tmp_path / "a", step(1, reward=0.5))
    with held(record.path / ".lock") as process:
        watcher = subprocess.Popen(
            [sys.executable, "-c", CLI, "watch", str(record.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "reinforce: 4 steps\n"
        assert watcher.stdout.readline().startswith("reinforce 1/4  reward 0.500")
        watcher.send_signal(signal.SIGINT)
        _, errors = watcher.communicate(timeout=20)
        assert watcher.returncode == 130
        assert errors == ""
        assert process.poll() is None


def test_json_leaves_the_last_line_of_stdout_to_the_result(tmp_path):
    record = make_run(tmp_path / "a", step(1, reward=0.5), episodes={1: [attempt()]})
    done = CliRunner().invoke(app, ["watch", str(record.path), "--json"], catch_exceptions=False)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["status"], report["step"], report["reward"]) == ("stopped", 1, 0.5)
    assert "reinforce 1/4" in done.stderr


def test_runs_that_were_refused_before_their_first_step_are_not_listed(tmp_path: Path):
    make_run(tmp_path / "good", step(1, reward=0.5))
    refused = tmp_path / "refused"
    refused.mkdir()
    (refused / "config.yaml").write_text("run: {name: refused}\n")
    listed = CliRunner().invoke(app, ["runs", str(tmp_path)], catch_exceptions=False).output
    assert "refused" in listed  # it may be starting
    (refused / "stopped.json").write_text(json.dumps({"reason": "no such env", "time": 1.0}))
    listed = CliRunner().invoke(app, ["runs", str(tmp_path)], catch_exceptions=False).output
    assert "good" in listed and "refused" not in listed


def test_a_run_that_failed_shows_the_reason(tmp_path: Path):
    folder = make_run(tmp_path / "dead", step(1, reward=0.5)).path
    reason = "no attempt could be made: the tool is gone"
    (folder / "stopped.json").write_text(json.dumps({"reason": reason, "time": 1.0}))
    done = CliRunner().invoke(app, ["watch", str(folder)])
    assert done.exit_code == 0
    assert f"failed after rl 1: {reason}" in done.output
