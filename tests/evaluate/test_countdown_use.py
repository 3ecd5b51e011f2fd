"""EARL's analysis of countdown: calls, invalid numbers and planning phrases, from its files and ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.expa.countdown import countdown_report, main
from graft.data.errors import DataError
from graft.envs import make
from graft.rewards.countdown_use import CountdownUse, countdown_use


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("", (0, 0, 0)),
        (" calculate 5 + 7 = 12\n calculate 12 / 3 = 4\n", (2, 1, 0)),  # 12 was not given
        (" calculate (5 + 7) / 3 = 4\n", (1, 0, 0)),
        (" calculate 5 / 7 = 0.714\n", (1, 0, 0)),
        (" calculate 5 / 0 = Error: division by zero", (0, 0, 0)),
        ("<calculator> 5 + 7 </calculator> <result> 12 </result>", (1, 0, 0)),
        ("<calculator> 5 + 8 </calculator> <result> 13 </result> Not close.", (1, 1, 1)),
        ("<calculator> 5 + </calculator> <result> Error: no </result>", (0, 0, 0)),
        ("far from it, so a different approach; still far from it", (0, 0, 3)),
        ("calculate " + " " * 50_000, (0, 0, 0)),
    ],
)
def test_what_is_counted(text: str, use: tuple[int, int, int]):
    assert countdown_use(text, [3, 5, 7]) == CountdownUse(*use)


def earl_file(path: Path, *attempts: tuple[str, float]) -> Path:
    asked = (
        "Using the numbers [3, 5, 7], create an equation that equals 4. (For example [1, 2, 3].)"
    )
    rows = [{"input": asked, "output": text, "score": r, "reward": r} for text, r in attempts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_files_of_earls_validation(tmp_path: Path, capsys):
    right, wrong = " calculate (5 + 7) / 3 = 4\n", " calculate 9 + 9 = 18\n far from 4"
    first = earl_file(tmp_path / "0.jsonl", (right, 1.0), (wrong, 0.0))
    other = earl_file(tmp_path / "1.jsonl", (wrong, 0.0), (right, 1.0))
    report = countdown_report(first)
    assert (report.attempts, report.right, report.calls, report.invalid) == (2, 0.5, 1.0, 0.5)
    report = countdown_report(first, "wrong")
    assert (report.attempts, report.invalid, report.phrases) == (1, 1.0, 1)
    assert countdown_report(first, phrases=["calculate"]).phrases == 2
    main([str(first), str(other), "--same-tasks"])
    lines = capsys.readouterr().out.splitlines()
    assert "1 attempts, 100.0% right" in lines[0] and "1 attempts, 0.0% right" in lines[1]


def test_samples_of_an_evaluation(tmp_path: Path):
    env = make("earl:countdown-1", split="test")
    env.reset(7)
    a, b, *_ = env.given_numbers
    settings = {"env": "earl:countdown-1", "args": {"split": "test"}}
    sample = {"task": "earl:countdown-1:test:7", "seed": 7, "text": "", "reward": 1.0}
    sample["text"] = f" calculate {a} + {b} = {a + b}\n calculate 1 + 123456 = 123457\n"
    file = tmp_path / "rl-000001.countdown.jsonl"
    rows = [{"of": {"checkpoint": "rl-000001", "settings": settings}}, sample]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = countdown_report(file)
    assert (report.calls, report.invalid) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not JSON"),
        ('{"output": "x", "input": "no list"}', "no list of numbers"),
        ('{"of": {"settings": {"env": "earl:sort", "args": {}}}}\n{"seed": 1, "text": "", "task": ""}',
         "earl:sort poses no countdown task"),
        ('{"question": "?"}', "line 1: neither"),
        ("", "no attempt that is left"),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, text: str, said: str):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=said):
        countdown_report(file)
    with pytest.raises(DataError, match="no file"):
        countdown_report(tmp_path / "gone")
