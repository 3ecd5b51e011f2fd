"""Measured figures have one source, docs/numbers.json: pages show its rows and hold no other figure."""

from __future__ import annotations

import json
import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import yaml

from benchmarks import async_tools, engines, envs, processes, quickstart, record
from benchmarks.gpu.__main__ import figures as gpu_figures
from benchmarks.gpu.report import Row
from benchmarks.record import Figure
from benchmarks.scaling import SAMPLED, SINGLE_SAMPLED
from tests.docs.pages import ROOT, prose

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "numbers.py"))
ROWS = SCRIPT["read_rows"]()

UNITS = (
    r"tok/s|tokens/s|[TG]FLOP/s|[KMGT]B/s|/s|s|ms|us|seconds?|minutes?|hours?|[KMGT]i?B|%"
    r"|tokens (?:a|per) second|(?:x|times) (?:faster|slower|as)\b"
)
NUMBER = r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(rf"{NUMBER}e-?\d+|{NUMBER}\s?(?:{UNITS})(?![\w/])|(?<![\w.,])\d+\.\d{{3,}}")
"""A number with a unit of time, size, rate or share; a score such as 0.950; a gap such as 7e-3."""

SETTINGS: dict[str, tuple[str, ...]] = {
    "README.md": ("30% of the examples",),
    "docs/performance.md": ("one process to 1e-5",),
    "docs/plan.md": (
        "a chunk of 650 MB",
        "65,536 tokens or 2 GiB",
        "5% of the memory is kept",
    ),
    "docs/quickstart.md": ("30% call the calculator", "70% guess"),
    "docs/scale.md": (
        "one process to 1e-5",
        "gives them 30 seconds",
        "after about 8 seconds",
        "the KV cache is 1 GiB",
        "buckets of 500 MB",
    ),
    "docs/data.md": (
        "256 MB of columns",
        "a jsonl of 2 GB",
        "Up to 1% of the rows",
        "65% of the cases",
    ),
    **dict.fromkeys(
        ("docs/export.md", "docs/index.md", "docs/interop.md", "docs/text.md", "docs/tools.md"), ()
    ),
}
"""Pages without hand-written figures, and their numbers that are limits or settings, not measurements."""


def strip_rendered(text: str) -> str:
    return SCRIPT["INLINE"].sub("", SCRIPT["TABLE"].sub("", text))


def written_figures(text: str, settings: tuple[str, ...] = ()) -> list[str]:
    """Figures of a page that the script did not write; fenced blocks and code are what programs print."""
    text = re.sub(r"`[^`]*`", "", strip_rendered(text))
    for setting in settings:
        text = text.replace(setting, "")
    return [match[0] for match in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", SCRIPT["pages"](), ids=lambda page: page.name)
def test_pages_show_the_rows(page: Path):
    """Repair them with `python scripts/numbers.py`."""
    text = page.read_text(encoding="utf-8")
    assert SCRIPT["updated"](text, ROWS) == text


@pytest.mark.parametrize("name", SETTINGS)
def test_a_page_has_no_figure_that_was_typed(name: str):
    """Record it (`benchmarks/record.py`), or approve it above if it is a limit or a setting."""
    flat = re.sub(r"(?<=\S)\n(?=\S)", " ", prose(ROOT / name))  # a phrase may run over a line's end
    assert written_figures(flat, SETTINGS[name]) == []
    assert [setting for setting in SETTINGS[name] if setting not in flat] == []


FIGURES = "70,400 tok/s|2.47 s|26 GB|4%|5 times as fast|0.950|7e-3|600/s|2 minutes"
HARMLESS = "64 prompts of 256 tokens|1.1M parameters|version 0.26"


def test_typed_figures_are_noticed_and_sizes_of_a_workload_are_none():
    for figure in FIGURES.split("|"):
        assert written_figures(f"It makes {figure} here.") != [], figure
        assert written_figures(f"It makes <!--n a.b-->{figure}<!--/n--> here.") == []
        assert written_figures(f"<!-- numbers a. -->\n{figure}\n<!-- end of numbers -->\n") == []
    assert [text for text in HARMLESS.split("|") if written_figures(text)] == []


def test_a_changed_row_changes_its_pages():
    row = {**ROWS["x86.step.b"], "value": 9.99}
    pages = [path.read_text(encoding="utf-8") for path in SCRIPT["pages"]()]
    stale = [page for page in pages if SCRIPT["updated"](page, {**ROWS, row["name"]: row}) != page]
    assert len(stale) == 2  # README and performance


def test_every_row_says_where_it_comes_from():
    listed = json.loads(SCRIPT["FILE"].read_text(encoding="utf-8"))
    assert len(ROWS) == len(listed)
    for row in listed:
        assert isinstance(row["value"], int | float), row
        assert re.fullmatch(r"[0-9a-f]{7,}", row["commit"]), row
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row
        assert row["what"] and row["machine"] and isinstance(row["unit"], str), row
        if module := re.match(r"python -m (benchmarks[\w.]*)", row["command"]):
            path = ROOT / module[1].replace(".", "/")
            assert path.with_suffix(".py").exists() or path.is_dir(), row
        else:
            assert row["command"].startswith(("graft ", "make ", "pytest ", "torchrun ")), row
        low, high = row.get("spread", (row["value"], row["value"]))
        assert low <= row["value"] <= high, row


def test_every_row_is_shown():
    pages = "".join(path.read_text(encoding="utf-8") for path in SCRIPT["pages"]())
    tables = tuple(match["prefix"] for match in SCRIPT["TABLE"].finditer(pages))
    inline = {match["name"] for match in SCRIPT["INLINE"].finditer(pages)}
    assert [name for name in ROWS if not name.startswith(tables) and name not in inline] == []


def test_the_planner_is_calibrated_on_these_rows():
    """Rows that were measured again may differ by the noise of a day."""
    anchor, near = "rollouts-64x8-256-512", partial(pytest.approx, rel=0.02)
    assert near(ROWS[f"gpu.0.6B-{anchor}"]["value"]) == SAMPLED["0.6B"]
    assert near(ROWS[f"gpu.1.7B-{anchor}"]["value"]) == SAMPLED["1.7B"]
    assert near(ROWS[f"inexact.135M-{anchor}"]["value"]) == SAMPLED["135M"]
    assert near(ROWS["gpu.0.6B-rollouts-1x1-256-512"]["value"]) == SINGLE_SAMPLED


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "numbers.json"
    file.write_text("[]")
    monkeypatch.setattr(record, "FILE", file)
    monkeypatch.setenv("GRAFT_COMMIT", "1234567")
    return file


def test_a_benchmark_adds_rows_and_replaces_its_own(store: Path):
    record.record(
        [Figure("a.b", "steps", 2.4687, "s", (2.4, 2.5)), Figure("a.c", "tokens", 70_431.8)]
    )
    record.record([Figure("a.b", "steps", 1.0, "s", note="again")], command="make bench")
    first, second = json.loads(store.read_text())
    assert (first["name"], first["value"], first["note"]) == ("a.b", 1.0, "again")
    assert "spread" not in first and first["command"] == "make bench"
    assert (second["value"], second["commit"], second["unit"]) == (70_400, "1234567", "")
    assert set(first) - {"note"} <= set(ROWS["x86.step.b"])


def test_rows_of_the_gpu_benchmark_have_the_names_that_pages_use():
    rows = [Row("0.6B rollouts 64x8 256->512", "tok/s", 70_431.8, rounds=[70_100.0, 70_700.0])]
    (figure,) = gpu_figures([*rows, Row("a job that failed", "s", None)], "gpu")
    assert figure.name in ROWS
    assert record.row_of(figure, {})["spread"] == [70_100, 70_700]


def test_benchmarks_record_the_rows_that_pages_show():
    steps = [{"sampling": 2925.0, "learning": 3159.0, "handing": 0.0, "step": 1.94}]
    layouts = {name: steps for name in processes.LAYOUTS if name != "fsdp 1"}
    run = async_tools.Measured(0.2, 1387.0, 0.76, 0.75, 3.66, 1.17, 1.5, 0.0)
    engine = {"tok/s": 7120.0, "sync s": 1.03, "gap mean": 0.013}
    env = {
        "case": "reset",
        "id": "game:Sudoku-v0-hard",
        "graft_mode": "",
        "gem": 8.0,
        "ratio": 75.5,
    }
    recorded = [
        *processes.figures([layouts]),
        *async_tools.figures_of(1.0, {0: [run], 2: [run]}),
        *engines.figures_of({"engine": "sglang,http://127.0.0.1:30000,file", **engine}),
        envs.figure({**env, "graft": 600.0, "rounds": {"graft": {"": [590.0, 600.0]}}}),
    ]
    for figure in recorded:
        assert figure.what and figure.unit == ROWS[figure.name]["unit"], figure


def test_a_run_of_the_quickstart_becomes_rows(store: Path, tmp_path: Path):
    scores = {"sampled": 0.3, "greedy": 0.794, "tool_rate": 0.34}
    summary = {
        "before": scores,
        "after": {**scores, "sampled": 0.95},
        "seconds_per_phase": {"sft": 66.2, "rl": 60.1, "eval": 8.0},
        "machine": {"threads": 2, "device": "cpu", "architecture": "x86_64"},
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
    }
    run = tmp_path / "seed1"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps(summary))
    config = {"run": {"seed": 1, "name": "seed1"}, "algo": {"credit": []}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    quickstart.main([str(run), "--record"])
    rows = {row["name"]: row for row in json.loads(store.read_text())}
    assert set(rows) == {name for name in ROWS if name.startswith("quickstart.seed1.")}
    assert rows["quickstart.seed1.sampled.after"]["value"] == 0.95
    assert rows["quickstart.seed1.sft"]["command"] == (
        "graft train quickstart run.seed=1 run.name=seed1"
    )
