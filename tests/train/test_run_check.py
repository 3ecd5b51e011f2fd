"""Checks of a built run: each passes on a healthy one, and finds the one thing that is made faulty."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
import torch

from graft.algos.presets import PRESETS, build, resolve_preset
from graft.config import check
from graft.rollout.batching import trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.build import build_run
from graft.train.errors import RunStopped
from graft.train.learner_build import make_learner
from graft.train.monitor.check import Check
from graft.train.monitor.run_check import (
    agreement,
    answers,
    check_attempts,
    check_turn_ends,
    eos,
    first_rows,
    mask,
    micro,
    recomputed,
    spread,
)
from graft.train.monitor.settings_check import reads_rewards
from graft.train.phases import reinforcement
from graft.train.tasks import TaskStream
from graft.types import Episode, Leaf, Task
from tests.training import train_recipe

SHAPE = {
    "width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 32,
    "max_positions": 96,
}  # fmt: skip


def recipe(folder="runs", **sections):
    values = {
        "run": {"dir": str(folder), "name": "run", "eval_tasks": 12, "trackers": [], "seed": 3},
        "model": {"shape": SHAPE},
        "task": {"env": "calculator"},
        "rollout": {"tasks": 4, "samples": 2, "max_tokens": 10, "max_turns": 3, "max_context": 64},
        "train": {"steps": 2, "lr": 1e-3},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return check(values)


def built(**rollout):
    """A run's components, its learner, and attempts at four tasks."""
    components = build_run(recipe(rollout=rollout))
    learner = make_learner(components, None)
    tasks = TaskStream("calculator", 3)
    episodes = collect([next(tasks) for _ in range(4)], components.setup, independent(2))
    return components, learner, episodes


def copied(episodes: list[Episode]) -> list[Episode]:
    return [Episode.loads(episode.dumps()) for episode in episodes]


@pytest.fixture(scope="module")
def healthy():
    return built()


def verdicts(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in checks}


def test_a_healthy_run_passes_in_little_time(healthy):
    components, learner, episodes = healthy
    started = time.process_time()  # not the clock: the machine may be busy
    found = verdicts(check_attempts(learner, episodes, components.chat, 1.0, ("]",)))
    assert time.process_time() - started < 2.0
    assert list(found) == ["ends", "mask", "eos", "log-probs", "rewards"]
    assert {name: found[name] for name in ("ends", "mask", "eos", "log-probs")} == {
        "ends": "pass", "mask": "pass", "eos": "pass", "log-probs": "pass",
    }  # fmt: skip


def test_attempts_without_a_token_of_the_policy_are_not_checked(healthy):
    components, learner, _ = healthy
    assert check_attempts(learner, [Episode(Task("t", "calculator"))], components.chat, 1.0) == []


def test_a_check_that_raises_becomes_a_warning_and_the_others_run(healthy, monkeypatch):
    components, learner, episodes = healthy

    def broken(*_):
        raise KeyError("no such thing")

    monkeypatch.setattr("graft.train.monitor.run_check.agreement", broken)
    found = {check.name: check for check in check_attempts(learner, episodes, components.chat, 1.0)}
    assert found["log-probs"].verdict == "warn"
    assert "KeyError: 'no such thing'" in found["log-probs"].seen
    assert found["rewards"].name == "rewards"


def test_correct_answers_that_do_not_fit_into_a_turn_are_a_warning(healthy):
    """Characters are tokens here: "1234" and the token that ends a turn need five."""
    components, learner, _ = healthy

    def posed(*golds):
        return [Episode(Task(f"t{i}", "calculator", answer=gold)) for i, gold in enumerate(golds)]

    fine = answers(posed("1234", 12, ["123456789", "1"], None, {"tests": []}), components.chat, 5)
    assert fine.verdict == "pass" and "of 3 tasks have up to 4 tokens" in fine.seen
    short = answers(posed("1234", "1"), components.chat, 4)
    assert short.verdict == "warn"
    assert short.remedy == "1 of them do not fit into rollout.max_tokens=4; raise it"
    assert answers(posed(None), components.chat, 4).verdict == "pass"
    tasks = TaskStream("calculator", 3)
    episodes = collect([next(tasks) for _ in range(4)], components.setup, independent(2))
    found = verdicts(check_attempts(learner, episodes, components.chat, 1.0, ("]",), max_tokens=1))
    assert found["answers"] == "warn"


def test_an_engine_with_other_weights_is_found_out(healthy):
    components, learner, episodes = built()
    rows = trajectories_of(episodes)
    assert agreement(learner, rows, 1.0).verdict == "pass"
    with torch.no_grad():
        for weight in components.policy.parameters():
            weight.add_(
                0.05 * torch.randn_like(weight)
            )  # a step whose weights the engine does not have
    faulty = agreement(learner, rows, 1.0)
    assert faulty.verdict == "fail"
    assert "other weights" in faulty.remedy


def test_a_learner_of_another_temperature_is_found_out_by_name():
    _, learner, episodes = built(temperature=0.5)
    rows = trajectories_of(episodes)
    assert agreement(learner, rows, 0.5).verdict == "pass"
    faulty = agreement(replace(learner, temperature=1.0), rows, 0.5)
    assert faulty.verdict == "fail"
    assert "At temperature 0.5 they would agree" in faulty.seen
    assert "both must take rollout.temperature" in faulty.remedy


def test_an_engine_that_reports_log_probs_before_the_temperature_is_named():
    _, learner, episodes = built(temperature=0.5)
    faulty = copied(episodes)
    raw = recomputed(learner, trajectories_of(faulty), 1.0)
    for row, numbers in zip(trajectories_of(faulty), raw.tolist(), strict=True):
        start = 0
        for span in row.spans[1:]:
            if span.logprobs:
                span.logprobs = numbers[start : start + len(span)]
            start += len(span)
    found = agreement(learner, trajectories_of(faulty), 0.5)
    assert found.verdict == "fail"
    assert "the engine samples at 0.5 and reports log-probs of 1" in found.remedy


def test_few_rows_fit_one_micro_batch_and_one_is_always_taken(healthy):
    rows = trajectories_of(healthy[2])
    assert len(first_rows(rows, 10_000)) == 8
    lengths = [len(row.tokens) for row in rows]
    assert len(first_rows(rows, lengths[0] + lengths[1])) == 2
    assert len(first_rows(rows, 1)) == 1


def test_rows_without_a_trained_token_fail(healthy):
    faulty = copied(healthy[2])
    assert mask(trajectories_of(faulty)).verdict == "pass"
    for episode in faulty:
        for span in episode.spans:
            span.mask = [False] * len(span.mask)
    found = mask(trajectories_of(faulty))
    assert found.verdict == "fail"
    assert found.seen.startswith("0 of ")


def test_an_end_of_turn_that_is_not_trained_fails(healthy):
    components, _, episodes = healthy
    faulty = copied(episodes)
    assert eos(trajectories_of(faulty), components.chat).verdict == "pass"
    closed = 0
    for episode in faulty:
        for span in episode.spans:
            if span.mask and span.tokens[-1] == components.tokenizer.eos_id:
                span.mask[-1] = False
                closed += 1
    assert closed
    found = eos(trajectories_of(faulty), components.chat)
    assert found.verdict == "fail"
    assert found.seen.startswith(f"{closed} of {closed} turns end with a token that is not trained")


def test_attempts_that_all_reach_their_limit_are_a_warning(healthy):
    components, _, episodes = healthy
    faulty = copied(episodes)
    eos_id = components.tokenizer.eos_id
    for episode in faulty:
        for span in episode.spans:
            span.tokens = [5 if token == eos_id else token for token in span.tokens]
            span.info["finish"] = "length"
    found = eos(trajectories_of(faulty), components.chat)
    assert found.verdict == "warn"
    assert "none of 8 attempts ended with an end token" in found.seen


def test_rewards_that_no_credit_reads_need_not_differ():
    read = {name: reads_rewards(PRESETS[name]) for name in ("grpo", "mopd", "opd", "gkd", "sdpo")}
    assert read == {"grpo": True, "mopd": True, "opd": False, "gkd": False, "sdpo": False}


def test_equal_rewards_are_a_warning():
    def episodes(rewards):
        return [Episode(Task("t", "e"), [], [Leaf((0,), reward)]) for reward in rewards]

    found = spread(episodes([1.0] * 8))
    assert (found.verdict, found.seen) == ("warn", "all 8 attempts earned 1")
    assert spread(episodes([1.0] * 7 + [0.0])).verdict == "pass"
    assert spread(episodes([1.0] * 7)).verdict == "pass"  # too few to judge


def test_sampling_must_stop_at_the_end_of_a_turn():
    plain = Chat(FastTokenizer.characters("0123456789+="))
    assert check_turn_ends(plain, 15).verdict == "pass"
    assert "token 1" in check_turn_ends(plain, 15).seen
    beyond = check_turn_ends(plain, 1)
    assert beyond.verdict == "fail" and "the model has 1 tokens" in beyond.seen
    endless = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = Chat(FastTokenizer.bytes(), endless)
    assert check_turn_ends(chat, 258).verdict == "fail"
    assert check_turn_ends(chat, 258, ("]",)).verdict == "warn"
    spelled = check_turn_ends(Chat(FastTokenizer.bytes(), "chatml"), 258)
    assert spelled.verdict == "warn"
    assert "a text of several tokens" in spelled.seen
    assert r"'\n', is not trained" in spelled.seen
    # chatml is in use already, and this tokenizer has no token for its end
    assert "chatml" not in spelled.remedy and "model.chat_template=plain" in spelled.remedy


@pytest.mark.parametrize("algo", ["grpo", "gspo", "dapo"])
def test_losses_do_not_depend_on_micro_batches(healthy, algo):
    components, learner, episodes = healthy
    before = {name: weight.clone() for name, weight in components.policy.named_parameters()}
    loss = build(replace(resolve_preset(algo), kl_coef=0.0))[2]
    found = micro(learner, trajectories_of(episodes), loss)
    assert found.verdict == "pass"
    assert "8 rows in 1 micro-batch and in 8" in found.seen
    for name, weight in components.policy.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None
    assert learner.optimizer.steps == 0


def test_a_loss_that_averages_over_its_rows_is_found_out(healthy):
    _, learner, episodes = healthy

    def faulty(logp_NT, entropy_NT, batch):
        loss_NT = -batch.advantages * torch.where(batch.mask, logp_NT, 0.0) / batch.mask.sum()
        return loss_NT, {}

    found = micro(learner, trajectories_of(episodes), faulty)
    assert found.verdict == "fail"
    assert "must not average over the rows" in found.remedy


def test_one_row_proves_nothing_about_micro_batches(healthy):
    components, learner, episodes = healthy
    loss = build(components.algo.preset)[2]
    assert micro(learner, trajectories_of(episodes)[:1], loss).verdict == "warn"


@pytest.mark.parametrize("eval_tasks", [12, 0])
def test_a_faulty_run_stops_before_its_first_step(tmp_path, monkeypatch, eval_tasks):
    config = recipe(tmp_path, run={"eval_tasks": eval_tasks}, rollout={"temperature": 0.5})
    make = reinforcement.make_learner
    monkeypatch.setattr(
        reinforcement, "make_learner", lambda *given: replace(make(*given), temperature=1.0)
    )
    with pytest.raises(
        RunStopped, match=r"before step 1: log-probs: .* temperature 0\.5 they would"
    ):
        train_recipe(config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert not [line for line in lines if '"rl"' in line]


def test_a_healthy_run_prints_only_warnings(tmp_path):
    screen = io.StringIO()
    train_recipe(recipe(tmp_path), quiet=False, stream=screen)
    assert "reinforce 2/2" in screen.getvalue()
    assert "log-probs" not in screen.getvalue() and "fail  " not in screen.getvalue()
    # random weights get no sum right
    assert "warn  rewards         all 12 attempts earned 0" in screen.getvalue()


def test_one_process_splits_nothing_and_says_so_where_it_is_asked_to():
    components = build_run(recipe(parallel={"shard": True, "offload": True}))
    assert components.policy.is_whole and components.shares_weights
    assert not make_learner(components, None).is_joint
    assert (
        "parallel.shard=true, parallel.offload=true: this run has one process, so nothing is split "
        "and all is on its device"
    ) in components.notes
    for quiet in ({}, {"shard": False}, {"deadline": 9.0}):
        assert not any("parallel" in note for note in build_run(recipe(parallel=quiet)).notes)


@pytest.mark.parametrize("wrapper", ["concat_chat", "concat_chat_on_reset"])
def test_wrappers_that_render_chats_use_the_template_of_the_recipe(wrapper):
    template = "{% for m in messages %}{{ mark }}{{ m.content }}{{ eos_token }}{% endfor %}"
    model = {"shape": SHAPE, "alphabet": "bytes", "chat_template": template}
    components = build_run(
        recipe(
            model={**model, "template_args": {"mark": "#"}},
            task={"env": "game:GuessTheNumber-v0", "wrappers": [wrapper]},
            sft={"steps": 0},
        )
    )
    env = components.setup.make_env(Task("t", "game:GuessTheNumber-v0"))
    observation, _ = env.reset(seed=1)
    assert str(observation).startswith("#") and str(observation).endswith("<eos>")
