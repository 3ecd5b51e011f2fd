"""The record of a run: what a line holds, what a kill may cost, what a broken mirror may not."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from graft.registry import UnknownName
from graft.train.run_dir import trackers
from graft.train.run_dir.metrics_log import MetricsLog, read_metrics, record
from graft.types import Author, Episode, Leaf, Span, Task


def episode(task_id: str = "sum/1", logprob: float = -0.5) -> Episode:
    one = Episode(Task(task_id, "calc"))
    root = one.append(Span(None, Author.TASK, [1, 2], text="2+3="))
    tip = one.append(
        Span(root, Author.POLICY, [5], [5], [logprob], [0.1], [0], [True], text="5 → ✓")
    )
    one.leaves.append(Leaf((tip,), reward=1.0))
    return one


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Broken:
    """A mirror that fails from its second line on."""

    def __init__(self, folder, config):
        self.seen = 0

    def log(self, step, metrics, phase):
        self.seen += 1
        if self.seen >= 2:
            raise ConnectionError("the server is gone")

    def truncate_after(self, phase, step): ...

    def close(self): ...


class FullDisk(Broken):
    def log(self, step, metrics, phase):
        raise OSError(errno.ENOSPC, "No space left on device")


class NotLoggedIn(Broken):
    def __init__(self, folder, config):
        raise RuntimeError("api_key not configured")


class Absent(Broken):
    def __init__(self, folder, config):
        import a_library_that_is_missing  # noqa: F401  # pyright: ignore[reportMissingImports]


def test_a_line_opens_with_phase_and_step_then_plain_names_then_areas():
    row = record(3, {"tools/b": 1.0, "reward": 0.5, "loss/kl": 0.0, "entropy": 2.0}, "rl")
    assert list(row) == ["phase", "step", "entropy", "reward", "loss/kl", "tools/b"]


@pytest.mark.parametrize(
    ("values", "written"),
    [
        (
            {"reward": 0.5, "loss": math.nan, "kl": math.inf},
            {"kl": None, "loss": None, "reward": 0.5, "nonfinite": ["kl", "loss"]},
        ),
        (
            {"reward": np.float32(0.25), "num_tokens": 7, "flag": np.bool_(True)},
            {"flag": 1.0, "num_tokens": 7, "reward": 0.25},
        ),
    ],
)
def test_a_line_holds_plain_numbers_and_names_those_that_json_cannot_hold(
    tmp_path, values, written
):
    track = MetricsLog(tmp_path, [])
    track.log(1, values, phase="sft")
    assert lines(tmp_path) == [{"phase": "sft", "step": 1, **written}]  # before it is closed
    track.close()


def test_a_metric_may_not_take_the_name_of_the_step():
    with pytest.raises(ValueError, match="may not be named step"):
        record(1, {"step": 2.0}, "rl")


def test_a_killed_process_leaves_every_line_it_logged(tmp_path):
    code = (
        "import os, signal, sys; from graft.train.run_dir.metrics_log import MetricsLog\n"
        "track = MetricsLog(sys.argv[1], [])\n"
        "for step in range(1, 4): track.log(step, {'reward': step / 4})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [row["reward"] for row in lines(tmp_path)] == [0.25, 0.5, 0.75]


def test_truncating_after_an_rl_step_keeps_sft_and_earlier_rl(tmp_path):
    with MetricsLog(tmp_path, []) as track:
        track.log(9, {"loss": 1.0}, phase="sft")
        for step in (1, 2, 3):
            track.log(step, {"reward": float(step)})
        track.truncate_after("rl", 2)
        track.log(3, {"reward": 30.0})
    found = [(row["phase"], row["step"], row.get("reward")) for row in lines(tmp_path)]
    assert found == [("sft", 9, None), ("rl", 1, 1.0), ("rl", 2, 2.0), ("rl", 3, 30.0)]
    with MetricsLog(tmp_path, []) as track:  # all of RL is behind any step of SFT
        track.truncate_after("sft", 9)
    assert [(row["phase"], row["step"]) for row in lines(tmp_path)] == [("sft", 9)]


def test_a_half_written_line_is_dropped_when_the_record_is_opened_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n{"phase": "rl", "st')
    with MetricsLog(tmp_path, []) as track:
        track.log(2, {})
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]


def test_a_garbled_line_is_dropped_by_truncating(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"phase": "rl", "step": 1}\n\x00\x00oops\n{"phase": "rl", "step": 2}\n')
    with MetricsLog(tmp_path, []) as track:
        track.truncate_after("rl", 5)
    assert read_metrics(path) == [{"phase": "rl", "step": 1}, {"phase": "rl", "step": 2}]
    assert len(path.read_text().splitlines()) == 2
    assert not list(tmp_path.glob(".*.partial"))


def test_a_truncation_that_is_cut_short_leaves_the_old_record(tmp_path, monkeypatch):
    track = MetricsLog(tmp_path, [])
    track.log(1, {})
    track.log(2, {})

    def cut(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", cut)
    with pytest.raises(KeyboardInterrupt):
        track.truncate_after("rl", 1)
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]
    track.close()


def test_episodes_come_back_equal_from_their_file(tmp_path):
    first, second = episode("sum/1"), episode("sum/2")
    with MetricsLog(tmp_path, []) as track:
        path = track.episodes(12, iter([first, second]))
    assert path == tmp_path / "episodes" / "step_000012.jsonl"
    assert [Episode.loads(line) for line in path.read_text("utf-8").splitlines()] == [first, second]


def test_an_episode_with_a_nan_names_its_task_and_leaves_no_file(tmp_path):
    with MetricsLog(tmp_path, []) as track, pytest.raises(ValueError, match=r"'sum/9'.*NaN"):
        track.episodes(1, [episode(), episode("sum/9", logprob=math.nan)])
    assert not (tmp_path / "episodes" / "step_000001.jsonl").exists()


def test_truncating_drops_later_episodes_and_half_written_ones(tmp_path):
    with MetricsLog(tmp_path, []) as track:
        for step in (1, 2, 3):
            track.episodes(step, [episode()])
        (tmp_path / "episodes" / ".step_000001.jsonl.partial").write_text("{")
        track.truncate_after("rl", 2)
        left = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert left == ["step_000001.jsonl", "step_000002.jsonl"]


def test_a_broken_tracker_warns_once_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "broken", Broken)
    track = MetricsLog(tmp_path, ["broken"])
    track.log(1, {"reward": 0.1})
    with pytest.warns(RuntimeWarning, match="'broken' failed.*the server is gone"):
        track.log(2, {"reward": 0.2})
    track.log(3, {"reward": 0.3})  # warnings are errors here: a second one would raise
    track.close()
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]


def test_a_tracker_that_cannot_start_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", NotLoggedIn)
    with pytest.warns(RuntimeWarning, match="api_key"):
        track = MetricsLog(tmp_path, ["wandb"])
    track.log(1, {})
    track.close()


def test_a_full_disk_is_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "full", FullDisk)
    with MetricsLog(tmp_path, ["full"]) as track, pytest.raises(OSError, match="No space left"):
        track.log(1, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_disk_under_the_record_names_the_file(tmp_path):
    track = MetricsLog(tmp_path, [])
    track._log.close()
    track._log._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        track.log(1, {})
    track._log.close()


def test_a_tracker_whose_library_is_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Absent)
    with pytest.raises(ImportError, match=r"graft-rl\[wandb\]"):
        MetricsLog(tmp_path, ["wandb"])


def test_an_unknown_tracker_lists_the_known_ones(tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'tensorboard'"):
        MetricsLog(tmp_path, ["tensorbord"])


def test_users_bring_their_own_tracker(tmp_path):
    with MetricsLog(tmp_path, [f"{__name__}:Broken"]) as track:
        track.log(1, {})
        assert [type(t).__name__ for t in track._trackers.values()] == ["Broken"]


def test_tensorboard_holds_one_curve_per_metric_and_phase_and_hides_what_was_redone(
    tmp_path, monkeypatch
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # file names are sorted, and 10 comes before 8: those of the first log are 8 and 9
    numbers = SimpleNamespace(get=itertools.count(8).__next__)
    monkeypatch.setattr(event_file_writer, "_global_uid", numbers)
    with MetricsLog(tmp_path, ["tensorboard"]) as track:
        track.log(7, {"loss": 2.0}, phase="sft")
        for step in (1, 2, 3):
            track.log(step, {"reward": step / 4})
    with MetricsLog(tmp_path, ["tensorboard"]) as track:  # resumed from a checkpoint of step 1
        track.truncate_after("rl", 1)
        track.log(2, {"reward": 0.75})

    def curve(phase: str, name: str) -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard" / phase)).Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert curve("sft", "loss") == [(7, 2.0)]
    assert curve("rl", "reward") == [(1, 0.25), (2, 0.75)]


class StandInRun:
    def __init__(self):
        self.rows, self.metrics = [], []

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.rows.append("finished")


def test_wandb_gets_a_step_per_phase_and_resumes_under_the_same_id(tmp_path, monkeypatch):
    """Against a stand-in with the three calls we use: the real one needs an account."""

    run, inits, ids = StandInRun(), [], iter(["abc123", "another"])
    stand_in = SimpleNamespace(
        util=SimpleNamespace(generate_id=lambda: next(ids)),
        init=lambda **options: inits.append(options) or run,
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    with MetricsLog(tmp_path, ["wandb"], {"lr": 0.1}) as track:
        track.log(4, {"loss": 1.5}, phase="sft")
    with MetricsLog(tmp_path, ["wandb"]) as track:
        track.log(1, {"reward": 0.5})
    assert [options["id"] for options in inits] == ["abc123", "abc123"]
    assert inits[0]["config"] == {"lr": 0.1}
    assert ("rl/*", "rl/step") in run.metrics
    assert run.rows == [
        {"sft/loss": 1.5, "sft/step": 4},
        "finished",
        {"rl/reward": 0.5, "rl/step": 1},
        "finished",
    ]
