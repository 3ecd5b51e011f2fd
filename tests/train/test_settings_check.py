"""Settings that cannot learn are refused or named before the first step."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from graft.config import ConfigError, load_config
from graft.doctor.recipe import Examination
from graft.envs.calculator import Expression
from graft.models.shape import ModelShape
from graft.rollout.branches.branch import Branch
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.outcomes import missing_share
from graft.train.algorithm import preset_of
from graft.train.monitor.check import FAIL, WARN
from graft.train.monitor.settings_check import compares_attempts, positions_check, settings_checks
from graft.types import Episode, Leaf, Status, Task
from tests.training import train_recipe

RECIPES = sorted((Path(__file__).parent.parent.parent / "recipes").rglob("*.yaml"))


def verdicts(*overrides: str) -> list[tuple[str, str]]:
    found = settings_checks(load_config("quickstart", overrides))
    return [(check.verdict, f"{check.seen}; {check.remedy}") for check in found]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_bundled_recipe_passes(recipe):
    assert settings_checks(load_config(str(recipe))) == []


@pytest.mark.parametrize(
    "algo", ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "earl_grpo", "arpo", "aepo"]
)
def test_one_attempt_is_refused_where_attempts_are_compared(algo):
    ((verdict, text),) = verdicts("rollout.samples=1", f"algo.name={algo}")
    assert verdict == FAIL
    assert "rollout.samples=1" in text and "reinforce, rebn or ppo" in text


@pytest.mark.parametrize("algo", ["reinforce", "rebn", "ppo"])
def test_one_attempt_is_fine_where_they_are_not(algo):
    assert verdicts("rollout.samples=1", f"algo.name={algo}") == []
    assert compares_attempts(preset_of(load_config("quickstart", [f"algo.name={algo}"]))) == ""


def test_a_credit_of_the_recipe_counts_and_not_the_presets():
    assert verdicts("rollout.samples=1", "algo.credit=[reinforce, whiten]") == []
    own = "algo.credit=[{graft.algos.credits.groups:rloo: {}}]"
    ((verdict, text),) = verdicts("rollout.samples=1", "algo.name=reinforce", own)
    assert verdict == FAIL and "graft.algos.credits.groups:rloo" in text


@pytest.mark.parametrize(
    ("overrides", "verdict", "text"),
    [
        (
            ["algo.name=reinforce", "rollout.samples=1", "rollout.dynamic_rounds=4"],
            FAIL,
            "rollout.dynamic_rounds=1",
        ),
        (
            ["algo.name=rebn", "rollout.samples=1", "rollout.tasks=1", "rollout.max_turns=1"],
            FAIL,
            "every advantage is 0",
        ),
        (["algo.name=rebn", "rollout.samples=1", "rollout.tasks=1"], WARN, "one attempt"),
        (["train.warmup=90"], WARN, "rises to 0.000156, and train.lr=0.0002 is never reached"),
        (["train.lr=1e-12"], WARN, "changes a weight by about 7e-11 in the whole run"),
        (["rollout.temperature=0.01"], WARN, "equal attempts have no gradient"),
    ],
)
def test_what_else_cannot_learn(overrides, verdict, text):
    ((found, message),) = verdicts(*overrides)
    assert found == verdict and text in message


def test_a_recipe_without_rl_has_nothing_to_check():
    assert verdicts("rollout.samples=1", "train.steps=0") == []


def test_temperature_zero_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"temperature=0.0: must be more than 0: training needs"):
        load_config("quickstart", ["rollout.temperature=0.0"])


def test_a_context_beyond_the_models_positions_is_named_with_the_number():
    config = load_config("quickstart", ["rollout.max_context=4096", "sft.steps=0", "sft.stop_at=0"])
    assert positions_check(config, ModelShape(max_positions=4096)) is None
    check = positions_check(config, ModelShape(max_positions=2048))
    assert check is not None and check.verdict == WARN
    assert "rollout.max_context=4096 is more than the 2048 positions" in check.seen
    assert check.remedy == "set rollout.max_context=2048"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    check = positions_check(config, ModelShape(max_positions=2048, rope_scaling=yarn))
    assert check is not None and "Its rope scaling reaches 8192" in check.remedy


SHAPE = "{width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 40}"
TINY = [
    "run.name=run", "run.eval_tasks=0", "run.trackers=[]", f"model.shape={SHAPE}", "rollout.tasks=2",
    "rollout.samples=2", "rollout.max_tokens=8", "rollout.max_turns=2", "rollout.max_context=64",
    "train.steps=2", "train.warmup=5", "sft.steps=0", "sft.stop_at=0",
]  # fmt: skip


def test_a_run_prints_warnings_at_every_start_and_records_them_once(tmp_path):
    screen = io.StringIO()
    train_recipe("quickstart", f"run.dir={tmp_path}", *TINY, quiet=False, stream=screen)
    printed = " ".join(screen.getvalue().split())
    assert "warning at step 0: train.warmup=5 does not end within train.steps=2" in printed
    assert "rollout.max_context=64 is more than the 40 positions of the model" in printed

    def alarms() -> list[dict]:
        lines = (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["metric"] == "settings"]

    assert [(line["step"], line["level"]) for line in alarms()] == [(0, "warn"), (0, "warn")]
    again = io.StringIO()
    more = [*TINY, "train.steps=3"]
    train_recipe("quickstart", f"run.dir={tmp_path}", *more, quiet=False, stream=again)
    assert "does not end within" in again.getvalue() and len(alarms()) == 2


def test_a_run_that_cannot_learn_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout.samples=1 with algo.name=grpo"):
        train_recipe("quickstart", f"run.dir={tmp_path}", *TINY, "rollout.samples=1")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_doctor_shows_them(tmp_path):
    config = load_config("quickstart", [*TINY, "rollout.samples=1"])
    examination = Examination(config, tmp_path)
    found = [*examination._settings(), *examination._positions()]
    assert [(check.name, check.verdict) for check in found] == [
        ("settings", FAIL),
        ("settings", WARN),
        ("positions", WARN),
    ]
    fine = list(Examination(load_config("quickstart"), tmp_path)._settings())
    assert [check.verdict for check in fine] == ["pass"]


class Shaky(Expression):
    """At every third task no attempt can begin."""

    def fork(self) -> Shaky:
        if self.seed % 3 == 0:
            raise KeyError("price")
        return super().fork()


def lazy(samples: int) -> Branch:
    """Grows one attempt fewer than `samples`, and declares that it may."""

    async def branch(builder: EpisodeBuilder) -> None:
        for _ in range(samples - 1):
            await (await builder.root()).finish()

    vars(branch)["any_number"] = True
    return branch


def alarms_of(folder: Path) -> dict[str, dict]:
    lines = (folder / "run" / "alarms.jsonl").read_text().splitlines()
    return {line["metric"]: line for line in map(json.loads, lines)}


def test_a_run_with_failed_attempts_names_the_reason_and_where_to_look(tmp_path):
    env = [f"task.env={__name__}:Shaky", "task.eval_args={}", "model.alphabet=0123456789+-*="]
    env += ["rollout.tasks=6", "rollout.max_context=40", "sft.demo_args={}"]
    train_recipe("quickstart", f"run.dir={tmp_path}", *TINY, "train.warmup=0", *env)
    alarm = alarms_of(tmp_path)["rollout/failed"]
    assert alarm["level"] == "alarm" and alarm["step"] == 1
    assert "33% of the attempts of this step failed, mostly: env" in alarm["text"]
    assert "KeyError: 'price'" in alarm["text"] and "graft view" in alarm["text"]


def test_a_branch_that_makes_too_few_attempts_raises_an_alarm(tmp_path):
    branch = [f"rollout.branch={__name__}:lazy", "rollout.samples=4", "rollout.max_context=40"]
    train_recipe("quickstart", f"run.dir={tmp_path}", *TINY, "train.warmup=0", *branch)
    alarm = alarms_of(tmp_path)["rollout/missing"]
    assert (alarm["level"], alarm["step"]) == ("warn", 1)
    assert "25% fewer attempts than rollout.samples" in alarm["text"]


def test_a_task_that_could_not_be_posed_is_not_the_branchs_doing():
    whole = Episode(Task("a", "e"), leaves=[Leaf((0,), metrics={"turns": 1.0})] * 4)
    twin = Leaf((0,), metrics={"turns": 1.0}, twin=0)
    unposed = Episode(Task("b", "e"), leaves=[Leaf((0,), status=Status.ENV_ERROR)])
    assert missing_share([whole, unposed], samples=4) == 0.0
    half = Episode(Task("c", "e"), leaves=[*whole.leaves[:2], twin])
    assert missing_share([whole, half], samples=4) == 0.25
    assert missing_share([Episode(Task("d", "e"))], samples=4) == 1.0
