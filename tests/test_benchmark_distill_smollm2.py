"""The comparison with SmolLM2: what it runs, in which order, and what a shallower model is."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.distill_smollm2 import METHODS, RATES, evaluations, main, start_of
from benchmarks.jobs import Job, run_jobs
from benchmarks.shallow import kept_layers, shallower
from graft.config import Config, load_config
from graft.train.algorithm import preset_of
from tests.engine.engine_kit import tiny_decoder


def write_scores(folder: Path, *scores: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"phase": "sft", "step": step, "eval/sampled": score, "eval/greedy": 1.0}
        for step, score in enumerate(scores, 1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"phase": "sf'
    (folder / "metrics.jsonl").write_text(text)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Those of the command, none of which is run."""
    found: list[Job] = []
    monkeypatch.setattr("benchmarks.distill_smollm2.run_jobs", lambda jobs, *_: found.extend(jobs))
    write_scores(tmp_path / "student", 0.05, 0.25)
    main(["--model", "m", "--out", str(tmp_path), "--seconds", "200"])
    return found


def config_of(job: Job) -> Config:
    recipe, *overrides = job.command()[4:]
    return load_config(recipe, overrides)


def test_every_method_starts_from_the_same_student_with_the_same_rows(jobs, tmp_path):
    by_name = {job.name: job for job in jobs}
    names = [f"{method}-{rate}" for rate in RATES for method in METHODS]
    assert list(by_name) == ["teacher", "shallow", "student", "rows", *names]
    for name in names:
        method, _, rate = name.partition("-")
        config = config_of(by_name[name])
        preset_of(config)
        part, rows = config.train, config.rollout.tasks * config.rollout.samples
        if method == "sft":
            part, rows = config.sft, config.sft.batch
        assert (part.steps, part.lr, part.schedule, rows) == (20, float(rate), "linear", 512)
        assert config.model.path == str(tmp_path / "student") and config.run.seed == 1
        assert bool(config.distill.teacher) == (method != "grpo")
        assert by_name[name].after == ("student", "rows" if method == "sft" else "teacher")
    teacher, student = config_of(by_name["teacher"]), config_of(by_name["student"])
    assert teacher.algo.name == "grpo" and not teacher.distill.teacher
    assert teacher.sft.demo_args == student.sft.demo_args and student.train.steps == 0
    assert by_name["teacher"].until == by_name["student"].until == 90.0


def test_a_student_that_has_learned_nothing_is_replaced_by_the_teachers_warm_up(tmp_path):
    for step in (50, 100):
        (tmp_path / "teacher" / "checkpoints" / f"sft-{step:06}").mkdir(parents=True)
    warm = tmp_path / "teacher" / "checkpoints" / "sft-000100"
    assert start_of(tmp_path) == warm
    write_scores(tmp_path / "student", 0.3, 0.05)
    assert start_of(tmp_path) == warm
    write_scores(tmp_path / "student", 0.05, 0.3)
    assert start_of(tmp_path) == tmp_path / "student"
    assert list(evaluations(tmp_path / "student"))[-1] == ("sft", 2, 0.3, 1.0)


def test_jobs_wait_for_those_they_need_and_are_stopped_in_time(tmp_path, capsys):
    def python(text: str):
        return lambda: [sys.executable, "-S", "-c", text]

    saves = ["sh", "-c", "trap 'kill $!; exit 130' TERM; sleep 60 & wait"]
    jobs = [
        Job("long", lambda: saves, until=0.6),
        Job("next", python(f"open({str(tmp_path / 'next')!r}, 'w')"), ("long",)),
        Job("wrong", python("raise SystemExit('no such model')")),
        Job("never", python("pass"), ("wrong",)),
    ]
    run_jobs(jobs, tmp_path, 20.0, 2, lambda now: None)
    printed = capsys.readouterr().out
    assert (tmp_path / "next").exists()
    assert "long was stopped" in printed and "next is done" in printed
    assert "wrong failed (1): no such model" in printed and "never begins" not in printed


def test_a_shallower_model_has_the_layers_that_stay():
    assert kept_layers(30, 5) == [0, 1, 2, 28, 29]
    assert kept_layers(3, 3) == [0, 1, 2]
    with pytest.raises(ValueError, match="1 of 30 layers"):
        kept_layers(30, 1)
    model = tiny_decoder(vocab_size=20, layers=3)
    small = shallower(model, 2)
    assert small.shape.layers == 2
    for target, source in ((0, 0), (1, 2)):
        kept, given = small.blocks[target].state_dict(), model.blocks[source].state_dict()
        assert all(torch.equal(kept[name], given[name]) for name in given)
    assert torch.equal(small.embed.weight, model.embed.weight)
