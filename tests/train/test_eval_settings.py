"""The section `eval`: held-out attempts with their own draws, lengths, environments and numbers."""

import json

import pytest

from graft.config import ConfigError, load_config
from graft.envs import make
from graft.rollout.collector import RolloutRequest, SyncCollector
from graft.train.build import build_run
from graft.train.memory.workload import smallest_pool
from graft.train.phases.evaluation import (
    by_group,
    mean_reward,
    overall,
    passed,
    standard_error,
)
from graft.train.rollouts.episode_groups import groups_of, rewards_by_group
from graft.types import Episode, Leaf, Sampling, Status, Task
from tests.model_calls import evaluate_model
from tests.train.test_mix import recipe
from tests.training import train_recipe

EASY = {"prompt": [{"role": "user", "content": "1+1="}], "ground_truth": "2"}


def easy(source, k):
    """A row in EasyRL's columns."""
    return EASY | {"extra_info": {"data_source": source, "pass@k": k}}


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "val.jsonl", [easy("aime", 3), easy("math", 1), easy("aime", 3)])


def episode(env, source, *rewards, **meta):
    leaves = [Leaf((0,), reward) for reward in rewards]
    return Episode(Task("t", env, data_source=source, meta=meta), leaves=leaves)


def test_held_out_attempts_have_the_settings_of_the_section(tmp_path):
    section = {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1,
        "max_tokens": 9, "max_turns": 3, "max_context": 240,
    }  # fmt: skip
    components = build_run(load_config(recipe(tmp_path, "calculator", eval=section)))
    held_out, setup = components.held_out, components.setup
    wanted = Sampling(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=9
    )
    assert (held_out.sampling, held_out.max_turns, held_out.max_context) == (wanted, 3, 240)
    assert setup.sampling == Sampling(temperature=1.0, max_tokens=6)
    assert (setup.max_turns, setup.max_context) == (2, 200)
    assert smallest_pool(components.config, 16) == 240 + 16
    plain = build_run(load_config(recipe(tmp_path, "calculator")))
    assert plain.held_out.sampling == plain.setup.sampling


def test_other_environments_take_the_held_out_tasks(tmp_path):
    envs = [{"env": "arithmetic", "name": "sums", "prefill": "So "}, "calculator"]
    components = build_run(load_config(recipe(tmp_path, "calculator", eval={"env": envs})))
    tasks = components.held_out_tasks(2)
    assert [task.env for task in tasks] == ["sums", "sums", "calculator", "calculator"]
    assert [components.held_out.for_task(task).prefill for task in tasks[1:3]] == ["So ", ""]
    assert components.held_out.make_env(tasks[0]).unwrapped.env_id == "arithmetic"


def test_a_row_sets_its_attempts_and_no_row_is_used_twice(tmp_path, rows):
    task = {"env": "prompts", "args": {"data": rows}}
    components = build_run(load_config(recipe(tmp_path, task=task)))
    tasks = components.held_out_tasks(200)
    assert len(tasks) == 3
    collector = SyncCollector(components.collector_config)
    request = RolloutRequest(tasks, "held-out", held_out=True, samples=None)
    episodes = collector.submit(request).result()
    collector.close()
    made = sorted((one.task.data_source, len(one.leaves)) for one in episodes)
    assert made == [("aime", 3), ("aime", 3), ("math", 1)]


@pytest.mark.parametrize("k", [0, "many", 1.5])
def test_a_row_that_asks_for_no_number_of_attempts_is_bad(k):
    with pytest.raises(ValueError, match="'pass@k' is"):
        make("prompts", rows=[easy("aime", k)])


def test_pandas_floats_and_empty_values_are_read_as_numbers_of_attempts():
    env = make("prompts", rows=[easy("aime", 8.0), easy("aime", None), EASY])
    assert [env.attempts_at(idx) for idx in range(3)] == [8, 1, 1]


def test_scores_by_source_with_pass_at_k():
    """aime: rewards (0, 1) and (0, 0) pass one of two; math has one attempt, and it is right."""
    sampled = [
        episode("prompts", "aime", 0.0, 1.0, **{"pass@k": 2}),
        episode("prompts", "aime", 0.0, 0.0, **{"pass@k": 2}),
        episode("prompts", "math", 1.0, **{"pass@k": 1}),
    ]
    assert mean_reward(sampled) == pytest.approx((0.5 + 0 + 1) / 3)
    assert passed(sampled) == {"pass@1": 1.0, "pass@2": 0.5}
    greedy = [episode("prompts", "aime", 1.0), episode("prompts", "math", 0.0)]
    assert by_group(sampled, greedy, ["prompts"]) == {
        "aime/sampled": 0.25, "math/sampled": 1.0, "aime/greedy": 1.0, "math/greedy": 0.0,
        "aime/pass@2": 0.5, "math/pass@1": 1.0,
    }  # fmt: skip
    # one source: its pass@k, and no mean that says the same as the whole
    assert by_group(sampled[:2], greedy[:1], ["prompts"]) == {"aime/pass@2": 0.5}
    # failed attempts solve nothing, and one attempt that nobody asked for is no pass@1
    broken = Episode(Task("t", "e"), leaves=[Leaf((0,), 1.0, Status.TOOL_ERROR), Leaf((0,), 0.0)])
    assert passed([broken, episode("e", "e", 1.0)]) == {"pass@2": 0.0}


def test_environments_count_the_same_whatever_their_numbers_of_tasks():
    episodes = [
        episode("qa", "nq", 1.0),
        episode("qa", "a/b", 0.0),
        episode("qa", "nq", 1.0),
        episode("sums", "sums", 0.0),
    ]
    means = overall(lambda own: {"mean": mean_reward(own)}, episodes, ["qa", "sums"])
    assert means == {"mean": pytest.approx((2 / 3 + 0) / 2)}
    assert overall(lambda own: {"mean": mean_reward(own)}, episodes, ["all"]) == {"mean": 0.5}
    several = [episode("qa", "nq", 1.0, 0.0), *episodes[1:]]
    assert overall(passed, several, ["qa", "sums"]) == {"pass@2": 1.0}
    names = {name: len(own) for name, own in groups_of(episodes, ["qa", "sums"]).items()}
    assert names == {"qa": 3, "qa.nq": 2, "qa.a_b": 1, "sums": 1}
    assert rewards_by_group(episodes[:2], ["qa"]) == {"reward/nq": 1.0, "reward/a_b": 0.0}
    many = [episode("qa", str(number), 0.0) for number in range(33)]
    assert groups_of(many, ["qa"]) == {}


def test_the_error_of_a_score_is_that_of_the_mean_over_tasks():
    four = [episode("qa", "", reward) for reward in (1.0, 1.0, 0.0, 0.0)]
    assert standard_error(four, ["qa"]) == pytest.approx((1 / 3 / 4) ** 0.5)
    assert standard_error(four[:1], ["qa"]) is None  # one task has no scatter
    two = [episode("sums", "", reward) for reward in (0.5, 0.5)]
    # environments count the same: the mean of two means, of which one does not scatter
    assert standard_error(four + two, ["qa", "sums"]) == pytest.approx((1 / 3 / 4) ** 0.5 / 2)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"temperature": 0, "samples": 4}, "eval.temperature=0 makes eval.samples=4 greedy"),
        ({"max_tokens": 200}, "200 tokens a turn in a context of 200"),
        ({"top_p": 0}, "eval.top_p=0: input should be greater than 0"),
        ({"env": ["a", "a"]}, "'a' is there 2 times"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, section, message):
    with pytest.raises(ConfigError, match=message):
        load_config(recipe(tmp_path, "calculator", eval=section))


@pytest.mark.slow
def test_a_run_and_graft_eval_use_the_section_and_the_rows(tmp_path, rows):
    task = {"env": "prompts", "args": {"data": rows}}
    summary = train_recipe(
        recipe(tmp_path, run={"eval_tasks": 9}, task=task, eval={"temperature": 0.7})
    )
    scores = summary["after"]
    assert {"aime/pass@3", "math/pass@1", "aime/sampled", "math/greedy"} <= scores.keys()
    assert summary["standard_error"].keys() == {"tasks", "before", "after"}
    assert summary["standard_error"]["tasks"] == 3  # there are no more rows
    run = str(tmp_path / "run")
    table, _, _ = evaluate_model(run, say=lambda text: None)
    assert table.measures == ["avg", "pass@1", "pass@3", "maj@3"]
    assert "at temperature 0.7" in table.caption and "pass@k, at most 3" in table.caption
    [result] = [one for results in table.rows.values() for one in results.values()]
    assert [len(rewards) for rewards in result.rewards] == [3, 1, 3]
    assert result.settings["samples"] == "pass@k"
    assert set(result.by_source()) == {"aime", "math"}
    given = {"top_k": 5, "repetition_penalty": 1.2, "max_tokens": 3, "samples": 2, "name": "two"}
    table, _, _ = evaluate_model(run, say=lambda text: None, **given)
    assert "2 attempts each, at temperature 0.7, top-k 5, repetition penalty 1.2" in table.caption
    [result] = [one for results in table.rows.values() for one in results.values()]
    assert result.settings["rollout"]["max_tokens"] == 3 and result.tokens <= 3
    with pytest.raises(ConfigError, match="top_p=2"):
        evaluate_model(run, top_p=2.0, say=lambda text: None)
