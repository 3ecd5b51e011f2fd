"""Claims become runs, runs become rows, rows become docs/evidence.md."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.evidence import budget
from benchmarks.evidence.__main__ import measure, missing_runs, read_rows
from benchmarks.evidence.budget import count_tokens, read_steps
from benchmarks.evidence.claims import BATCH, CLAIMS
from benchmarks.evidence.elsewhere import ELSEWHERE
from benchmarks.evidence.page import PAGE, figure, render, spread, strip, today
from graft.config import load_config
from graft.train.algorithm import branch_of, preset_of

VERDICTS = ("holds", "does not", "not shown", "seen once")
TINY = replace(
    BATCH, arms=BATCH.arms[:2], warm_up=(*BATCH.warm_up, "sft.steps=2"), tokens=600, tasks=4
)


def row(arm: str, seed: int, score: float) -> dict[str, object]:
    return {
        "claim": "batch", "arm": arm, "seed": seed, "score": score, "curve": [0.1, score], "turns": 1.0,
        "entropy": 0.5, "gap": 0.0, "steps": 7, "seconds": 60.0, "commit": "abc", "machine": "m", "tokens": 9,
    }  # fmt: skip


def test_the_page_is_what_the_results_say():
    assert PAGE.read_text(encoding="utf-8") == today()


@pytest.mark.parametrize("where", sorted({one.where for one in ELSEWHERE}))
def test_a_section_with_the_numbers_of_a_claim_links_back(where):
    """Whether the heading exists is a matter of tests/docs/test_links.py."""
    name, _, anchor = where.partition("#")
    text = (PAGE.parent / name).read_text(encoding="utf-8")
    sections = re.split(r"^#+ (.+)$", text, flags=re.M)  # text, heading, text, heading, ...
    bodies = [
        body
        for heading, body in zip(sections[1::2], sections[2::2], strict=True)
        if re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) == anchor
    ]
    assert any("](evidence.md#measured-on-other-pages)" in body for body in bodies)
    assert all(one.verdict.startswith(VERDICTS) for one in ELSEWHERE)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.name)
def test_settings_of_every_arm_fit_its_recipe(claim):
    for arm in claim.arms:
        load_config(claim.recipe, [*claim.settings, *claim.warm_up, *arm.form])
        config = load_config(claim.recipe, [*claim.settings, *claim.rl, *arm.form, *arm.settings])
        assert config.train.schedule == "constant", arm.name
        if (
            not config.actions.file
        ):  # with one, the branch needs a tokenizer: the run itself checks it
            assert callable(branch_of(config, preset_of(config), None)), arm.name
    assert len({(arm.form, arm.settings) for arm in claim.arms}) == len(claim.arms)


def test_runs_that_a_file_has_are_not_made_again():
    rows = [row("2 tasks a step", 0, 0.5), row("8 tasks a step", 1, 0.5)]
    names = [(arm.name, seed) for arm, seed in missing_runs(TINY, [0, 1], rows)]
    assert names == [("8 tasks a step", 0), ("2 tasks a step", 1)]


def test_a_run_stops_at_its_deadline_continues_and_ends_at_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GRAFT_COMMIT", "1234567")
    claim, out = replace(TINY, arms=TINY.arms[:1]), tmp_path / "rows.jsonl"
    clock = iter([0.0] * 4)  # the warm-up's two steps and two of RL pass
    stopped = SimpleNamespace(monotonic=lambda: next(clock, float("inf")))
    with monkeypatch.context() as patched:
        patched.setattr(budget, "time", stopped)
        assert not measure(claim, [0], tmp_path, out, 1e12)
    [run] = [folder for folder in tmp_path.iterdir() if "step" in folder.name]
    before = read_steps(run)
    assert 0 < count_tokens(before) < 600
    assert not out.exists()
    assert measure(claim, [0], tmp_path, out, float("inf"))
    steps, [finished] = read_steps(run), read_rows(out)
    assert steps[: len(before)] == before
    assert count_tokens(steps[:-1]) < 600 <= count_tokens(steps) == finished["tokens"]
    assert (finished["steps"], finished["commit"]) == (len(steps), "1234567")
    assert 0.0 <= finished["score"] <= 1.01
    assert measure(claim, [0], tmp_path, out, 0.0)  # nothing is missing, so no time is needed
    assert len(read_rows(out)) == 1


def test_the_page_shows_mean_spread_seeds_and_verdict():
    rows = [row("2 tasks a step", seed, score) for seed, score in enumerate((0.2, 0.4, 0.3))]
    rows += [row("8 tasks a step", 0, 0.6)]
    text = render(json.loads(json.dumps(rows)))
    assert "| 2 tasks a step | 0.300 ± 0.100 | 0.200, 0.400, 0.300 | 1.00 |" in text
    assert "| 8 tasks a step | 0.600 | 0.600 |" in text
    assert "4 minutes of steps for 4 runs" in text
    assert spread([0.5, 0.5]) == "0.500 ± 0.000"
    assert strip(rows[:3], 0.2, 0.4).replace("·", "") == "021"
    assert strip(rows[:3], 0.2, 0.4).startswith("0") and strip(rows[:3], 0.2, 0.4).endswith("1")
    assert [line.split()[-1] for line in figure({"a": rows[:3]})[1:]] == [
        "▁▆"
    ]  # of 0.1 to 0.4: 0.1, 0.3
