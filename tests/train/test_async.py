"""Sampling ahead of learning: the same numbers where nothing is ahead, known ages where something is."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

from graft.config import Config, ConfigError, check
from graft.envs.calculator import CalculatorTask
from graft.rollout.async_collector import AsyncCollector
from graft.rollout.collector import CollectorConfig
from graft.train import build, rl
from graft.train import session as run
from graft.train.algorithm import STALE_CAP, preset_of
from graft.train.build import build_run
from graft.train.errors import RunStopped
from graft.train.monitor.display import Display
from graft.types import Author, Status, Turn
from tests.command_line import start
from tests.train.test_resume import run as run_command
from tests.train.test_resume import wait_for_lines
from tests.training import metrics_of

SHAPE = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 32}
SHAPE["max_positions"] = 96
HERE = "tests.train.test_async"  # as other processes find it
IMPORTANCE = "sampling/importance_sampling_ratio"


class Dawdling(CalculatorTask):
    """The calculator, on a thread that sleeps now and then."""

    def __init__(self, **given) -> None:
        super().__init__(**given)
        self.blocking = True

    def step(self, action: str) -> Turn:
        time.sleep(random.random() ** 4 * 0.05)
        return super().step(action)


def digits(task, row) -> float:
    """The share of digits: something that a model from random weights has, now more, now less."""
    return sum(letter.isdigit() for letter in row.text) / max(len(row.text), 1)


def recipe(folder: Path, **sections) -> Config:
    given = {
        "run": {
            "dir": str(folder), "name": "run", "save_every": 0, "eval_tasks": 8, "trackers": [],
            "seed": 3, "log_episodes": 1,
        },
        "model": {"shape": SHAPE},
        "task": {"env": "calculator", "eval_args": {"split": "test"}, "reward": f"{HERE}:digits"},
        "rollout": {"tasks": 4, "samples": 4, "max_tokens": 10, "max_turns": 4, "max_context": 64},
        "algo": {"name": "grpo"},
        "train": {"steps": 6, "lr": 1.0e-3, "warmup": 2},
    }  # fmt: skip
    for name, changes in sections.items():
        given[name] = {**given.get(name, {}), **changes}
    return check(given)


def trained(config: Config) -> list[dict]:
    """The metrics of a run's RL steps."""
    with Display(config.train.steps, quiet=True) as display:
        run.Session(config, display).train()
    return metrics_of(Path(config.run.dir) / "run", "rl")


def tasks_of_steps(folder: Path) -> dict[int, list[int]]:
    """Step -> seeds of the tasks that it has learned from."""
    return {
        int(path.stem.removeprefix("step_")): [
            json.loads(line)["task"]["seed"] for line in path.read_text().splitlines()
        ]
        for path in sorted((folder / "episodes").glob("step_*.jsonl"))
    }


# nothing ahead


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[dict]:
    return trained(recipe(tmp_path_factory.mktemp("here"), run={"eval_every": 2}))


@pytest.mark.parametrize("copies", [False, True], ids=["the learner's weights", "a copy of them"])
def test_with_nothing_ahead_a_collector_on_a_thread_gives_the_same_numbers_as_the_loop(
    tmp_path, monkeypatch, copies, expected
):
    made = []

    def background(components, processes):
        made.append(
            AsyncCollector(
                CollectorConfig(components.setup, components.held_out, components.algo.branch)
            )
        )
        return made[-1]

    monkeypatch.setattr(run, "make_collector", background)
    if copies:
        monkeypatch.setattr(build, "shares_weights", lambda config, processes: False)
    found = trained(recipe(tmp_path / "apart", run={"eval_every": 2}))
    assert len(made) == 1 and not made[0]._thread.is_alive()
    assert {line.pop("rollout/discarded") for line in found} == {0.0}
    assert found == expected
    assert len(expected) == 6 and "eval/sampled" in expected[1]
    assert {line["staleness/max"] for line in expected} == {0.0}
    assert all(line["grad_norm"] > 0 for line in expected)


# something ahead


def watched(monkeypatch) -> list[dict]:
    """What each step learned from, and the learner's own log-probs before it did."""
    seen: list[dict] = []
    learn = rl.learn

    def looking(step, rollouts, algo, learner):
        learned = learn(step, rollouts, algo, learner)
        batch = learned.batch
        seen.append(
            {
                "step": step,
                "age": (step - 1 - batch.versions)[batch.mask],
                "ratio": (learner.logprobs - batch.logprobs)[batch.mask].exp(),
                "metrics": dict(learned.metrics),
                "episodes": rollouts.episodes,
            }
        )
        return learned

    monkeypatch.setattr(rl, "learn", looking)
    return seen


@pytest.mark.parametrize("unfinished", ["continue", "discard"])
def test_no_trained_token_is_older_than_the_bound_and_each_is_weighed(
    tmp_path, monkeypatch, unfinished
):
    seen = watched(monkeypatch)
    config = recipe(
        tmp_path,
        task={"env": f"{HERE}:Dawdling"},
        rollout={"staleness": 2, "unfinished": unfinished},
        train={"lr": 5.0e-2, "steps": 8, "warmup": 0},  # so large that a version makes a difference
    )
    lines = trained(config)
    assert [line["step"] for line in lines] == list(range(1, 9))
    for one, line in zip(seen, lines, strict=True):
        age, ratio = one["age"], one["ratio"]
        assert age.min() >= 0 and age.max() <= min(2, one["step"] - 1)
        assert line["staleness/max"] == age.max() and line["staleness/mean"] <= 2
        fresh = ratio[age == 0]  # the present weights drew them: the weight is 1 to rounding
        torch.testing.assert_close(fresh, torch.ones_like(fresh), atol=1e-3, rtol=0)
        weight = ratio.clamp(max=STALE_CAP)
        assert line[f"{IMPORTANCE}/mean"] == pytest.approx(float(weight.mean()), rel=1e-4)
        share = float(weight.mean() ** 2 / weight.square().mean())
        assert line[f"{IMPORTANCE}/ess"] == pytest.approx(share, rel=1e-4)
        versions = [
            {s.version for s in episode.spans if s.author is Author.POLICY and len(s)}
            for episode in one["episodes"]
        ]
        if unfinished == "discard":
            assert all(len(several) <= 1 for several in versions)
    old = torch.cat([one["ratio"][one["age"] > 0] for one in seen])
    assert len(old) and float((old - 1).abs().mean()) > 0.01
    assert max(float(one["ratio"].max()) for one in seen) > STALE_CAP  # something was cut
    discarded = sum(line["rollout/discarded"] for line in lines)
    assert discarded > 0 if unfinished == "discard" else discarded == 0
    seeds = [seed for step in tasks_of_steps(tmp_path / "run").values() for seed in step]
    first = 3 * 1_000_003
    assert seeds == list(range(first, first + 8 * 4))  # none lost, none twice, in order
    assert all(
        leaf.status in (Status.DONE, Status.TRUNCATED)
        for one in seen
        for episode in one["episodes"]
        for leaf in episode.leaves
    )


def test_a_reward_that_fails_for_every_attempt_ends_the_run_and_is_in_the_message(tmp_path):
    config = recipe(
        tmp_path,
        task={"reward": f"{HERE}:broken_reward"},
        rollout={"staleness": 2},
        run={"eval_tasks": 0},
    )
    started = time.perf_counter()
    with pytest.raises(RunStopped, match=r"broken_reward .* ZeroDivisionError"):
        trained(config)
    assert time.perf_counter() - started < 60


def broken_reward(task, row):
    raise ZeroDivisionError("as tests want it")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_works_ahead_and_is_killed_loses_no_task_and_repeats_none(tmp_path):
    config = recipe(
        tmp_path,
        rollout={"staleness": 2},
        train={"steps": 14},
        run={"save_every": 3, "eval_tasks": 4},
    )
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    log = tmp_path / "run" / "metrics.jsonl"
    for lines in (4, 9):
        process = start("train", str(path))
        wait_for_lines(process, log, lines)
        assert process.poll() is None
        process.kill()
        process.wait()
    run_command(path)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert max(line["staleness/max"] for line in steps) in (1, 2)
    first = 3 * 1_000_003
    expected = {
        step: list(range(first + (step - 1) * 4, first + step * 4)) for step in range(1, 15)
    }
    assert tasks_of_steps(tmp_path / "run") == expected


# what cannot be done ahead


@pytest.mark.parametrize(
    ("sections", "fragment"),
    [
        (
            {
                "algo": {"name": "cpo"},
                "actions": {"file": "compact"},
                "task": {"args": {"syntax": "actions"}},
            },
            "Counterfactual",
        ),
        (
            {"rollout": {"branch": {"arpo": {"faithful": True}}, "staleness": 1}},
            "FaithfulBranching",
        ),
        ({"algo": {"name": "dapo"}}, r"rollout\.dynamic_rounds=1"),
        ({"rollout": {"dynamic_rounds": 3, "staleness": 1}}, r"rollout\.dynamic_rounds=1"),
    ],
)
def test_what_needs_a_step_to_be_over_is_refused_with_a_way_out(tmp_path, sections, fragment):
    config = recipe(tmp_path, **{"rollout": {"staleness": 1}, **sections})
    with pytest.raises(ConfigError, match=rf"rollout\.staleness=1.*{fragment}"):
        build_run(config)


def test_dapo_without_redrawing_may_work_ahead(tmp_path):
    components = build_run(
        recipe(tmp_path, algo={"name": "dapo"}, rollout={"dynamic_rounds": 1, "staleness": 1})
    )
    assert not components.shares_weights
    components.engine.close()


def test_stale_tokens_are_weighed_by_two_at_most_unless_the_recipe_or_the_preset_sets_it(
    tmp_path,
):
    def cap(staleness: int, **algo) -> float | None:
        return preset_of(
            recipe(tmp_path, rollout={"staleness": staleness}, algo=algo)
        ).importance_cap

    assert STALE_CAP == 2.0
    assert cap(0) is None and cap(1) == 2.0 and cap(3) == 2.0
    assert cap(2, importance_cap=5.0) == 5.0 and cap(2, importance_cap=0) == 0
    assert cap(0, name="rebn") == 2.0 and cap(2, name="rebn") == 2.0


def test_a_note_of_the_run_names_the_importance_cap(tmp_path):
    def notes(**rollout) -> str:
        components = build_run(recipe(tmp_path, rollout=rollout))
        components.engine.close()
        return "\n".join(components.notes)

    stale = notes(staleness=2)
    assert "up to 2 versions old" in stale and "at most 2 (algo.importance_cap)" in stale
    assert "versions old" not in notes()
