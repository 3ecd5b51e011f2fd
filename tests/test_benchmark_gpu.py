"""The GPU benchmark: its bounds by hand, its verdicts, and a tiny run on the CPU."""

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.works import ANCHOR, LONG, Work
from benchmarks.shapes import SHAPES
from graft.engine.native.kv.pages import kv_bytes


def test_the_byte_bounds_are_what_a_hand_calculation_gives():
    shape, dtype, read = SHAPES["0.6B"], torch.bfloat16, 4.58e12
    assert kv_bytes(shape, dtype) == 114_688
    assert shape.num_params == pytest.approx(596e6, rel=1e-2)

    def bound(work: Work, is_shared: bool) -> float:
        return work.sampled * read / work.decode_bytes(shape, dtype, is_shared=is_shared)

    assert bound(ANCHOR, False) == pytest.approx(75e3, rel=0.03)
    assert bound(ANCHOR, True) == pytest.approx(130e3, rel=0.03)
    assert bound(LONG, True) == pytest.approx(50e3, rel=0.05)


def test_a_work_counts_a_shared_prompt_once():
    assert (ANCHOR.sampled, ANCHOR.unique) == (262_144, 278_528)
    assert ANCHOR.title == "64x8 256->512"
    # 110k unique tokens a second are 44% of 989 TFLOP/s
    seconds = ANCHOR.unique / 110e3
    used = ANCHOR.training_flops(SHAPES["0.6B"]) / seconds / 989e12
    assert used == pytest.approx(0.44, abs=0.01)


@pytest.mark.parametrize(
    ("value", "less", "verdict"),
    [
        (70, False, "must"),
        (95, False, "aim"),
        (59, False, "short"),
        (None, False, "failed"),
        (96, True, "short"),
        (70, True, "aim"),
    ],
)
def test_a_verdict_is_the_best_goal_that_is_met(value, less, verdict):
    must, aim = (95, 80) if less else (60, 95)
    assert Row("x", "tok/s", value, must, aim, less).verdict == verdict


def test_a_tiny_run_writes_its_rows_and_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    from benchmarks.gpu import rollouts

    def broken(*_):
        raise RuntimeError("no | forks\ntoday")

    monkeypatch.setattr(rollouts, "forks", broken)
    arguments = ["--device", "cpu", "--shapes", "tiny", "--quick", "--out", str(tmp_path)]
    main([*arguments, "--only", "rollouts,step,forks"])
    capsys.readouterr()
    again = Report.load(tmp_path / "gpu.json")
    rows = {row.name: row for row in again.rows}
    assert rows["tiny rollouts 4x2 24->8"].value > 0
    assert len(rows["tiny full step 4x2 24->8"].rounds) == 2
    assert rows["tiny log-prob gap engine/learner"].value < 1e-5
    assert rows["forks tiny"].verdict == "failed"
    assert "no / forks today" in (tmp_path / "gpu.md").read_text()
    # a second call goes on where the first ended
    main([*arguments, "--only", "rollouts,step,forks,sync", "--resume"])
    assert "rollouts tiny" not in capsys.readouterr().out.partition("| what |")[0]
    assert [*Report.load(tmp_path / "gpu.json").jobs][-1] == "sync tiny"
