"""Several environments in one run: the mix of tasks, what each has of its own, metrics, resumption."""

from collections import Counter

import pytest

from graft.config import ConfigError, load_config
from graft.recipe.attempt_keys import EnvItem
from graft.train.build import build_run
from graft.train.tasks import TaskStream, held_out_tasks
from tests.training import metrics_of, train_recipe

SHAPE = {
    "width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 32,
    "max_positions": 256,
}  # fmt: skip
MIX = [
    {"env": "calculator", "weight": 3, "eval_args": {"split": "test"}},
    {"env": "arithmetic", "name": "sums"},
]


def recipe(folder, envs=MIX, **sections):
    known = {
        "run": {
            "dir": str(folder),
            "name": "run",
            "save_every": 1,
            "eval_tasks": 2,
            "trackers": [],
        },
        "model": {"shape": SHAPE, "alphabet": "bytes"},
        "task": {"env": envs},
        "rollout": {"tasks": 4, "samples": 2, "max_tokens": 6, "max_turns": 2, "max_context": 200},
        "train": {"steps": 2, "lr": 1e-3},
    }
    return {**known, **{name: {**known.get(name, {}), **keys} for name, keys in sections.items()}}


def mix(*weights):
    return [EnvItem(env=f"e{i}", weight=weight) for i, weight in enumerate(weights)]


def drawn(envs, count, seed=0, cursor=0):
    return [next(stream) for stream in [TaskStream(envs, seed, cursor)] for _ in range(count)]


def test_one_environment_has_the_tasks_it_always_had():
    by_id = drawn("calculator", 3, seed=2)
    assert [task.id for task in by_id] == [f"calculator:train:{2000006 + i}" for i in range(3)]
    assert by_id == drawn([EnvItem(env="calculator", weight=5)], 3, seed=2)
    assert [task.seed for task in held_out_tasks("calculator", 2)] == [1 << 50, (1 << 50) + 1]


def test_weights_give_the_share_of_every_stretch_of_tasks():
    names = [task.env for task in drawn(mix(2, 1), 6)]
    assert names == ["e0", "e1", "e0", "e0", "e1", "e0"]
    shares = (0.7, 0.2, 0.1)
    for seed in range(3):
        names = [task.env for task in drawn(mix(*shares), 400, seed)]
        for start in range(0, 384, 5):
            counted = Counter(names[start : start + 16])
            assert all(abs(counted[f"e{i}"] - 16 * share) < 2 for i, share in enumerate(shares))


def test_each_environment_has_its_own_numbers_without_a_gap():
    tasks = drawn(mix(3, 1), 12, seed=1)
    for name, count in (("e0", 9), ("e1", 3)):
        seeds = [task.seed for task in tasks if task.env == name]
        assert seeds == [1_000_003 + number for number in range(count)]


def test_a_stream_continues_at_its_cursor():
    envs = mix(5, 2, 1)
    assert drawn(envs, 40)[23:] == drawn(envs, 17, cursor=23)
    assert [task.env for task in drawn(envs, 20)] != [task.env for task in drawn(envs, 20, seed=4)]


def test_what_an_item_leaves_out_comes_from_the_section(tmp_path):
    section = {"args": {"split": "train"}, "prefill": "1", "reward": "f1"}
    items = ["arithmetic", {"env": "calculator", "args": {}, "prefill": "2"}]
    config = load_config(recipe(tmp_path, items, task=section | {"env": items}))
    first, second = config.task.envs
    assert (first.args, first.prefill, first.reward) == ({"split": "train"}, "1", "f1")
    assert (second.args, second.prefill, second.reward) == ({}, "2", "f1")
    setup = build_run(config).setup
    prefills = [setup.for_task(task).prefill for task in drawn(config.task.envs, 2)]
    assert sorted(prefills) == ["1", "2"]
    assert config.task.label == "arithmetic, calculator"


@pytest.mark.parametrize(
    ("envs", "message"),
    [
        (["calculator", "calculator"], "'calculator' is there 2 times"),
        (["calculator", {"env": "arithmetic", "wieght": 2}], "item 2, wieght: no such key"),
        ([{"env": "calculator", "weight": 0}], "item 1, weight: input should be greater than 0"),
        ([7], "item 1 is 7; give an environment's id"),
        ([{"name": "sums"}], "item 1, env: field required"),
    ],
)
def test_a_mix_that_cannot_work_is_refused_with_the_item(tmp_path, envs, message):
    with pytest.raises(ConfigError, match=message):
        load_config(recipe(tmp_path, envs))


def test_actions_are_refused_by_the_environment_that_takes_none(tmp_path):
    envs = [
        {"env": "calculator", "args": {"syntax": "actions"}},
        {"env": "calculator", "name": "texts"},
    ]
    config = load_config(
        recipe(tmp_path, envs, actions={"file": "compact"}, model={"alphabet": ""})
    )
    with pytest.raises(ConfigError, match="texts looks for them in the text"):
        build_run(config)


def test_an_environment_and_a_component_of_a_reward_cannot_share_a_metric(tmp_path):
    reward = ["f1", {"exact_match": {}, "weight": 0.5}]
    envs = ["calculator", {"env": "arithmetic", "name": "f1"}]
    config = load_config(recipe(tmp_path, task={"env": envs, "reward": reward}))
    with pytest.raises(ConfigError, match="'f1' names an environment"):
        build_run(config)


def test_a_run_of_a_mix_reports_each_environment_and_resumes_exactly(tmp_path):
    whole = train_recipe(recipe(tmp_path / "whole", train={"steps": 3, "lr": 1e-3}))
    train_recipe(recipe(tmp_path / "parts", train={"steps": 1, "lr": 1e-3}))
    train_recipe(recipe(tmp_path / "parts", train={"steps": 3, "lr": 1e-3}))
    whole_log, parts_log = (metrics_of(tmp_path / name / "run") for name in ("whole", "parts"))
    assert whole_log == parts_log
    assert {"reward/calculator", "reward/sums"} <= whole_log[0].keys()
    after = whole["after"]
    parts = [after["calculator/sampled"], after["sums/sampled"]]
    assert after["sampled"] == pytest.approx(sum(parts) / 2)
    assert {"calculator/greedy", "sums/greedy"} <= after.keys()
