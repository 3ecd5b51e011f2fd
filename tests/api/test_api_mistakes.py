"""Mistakes in calls: each message names what was seen and what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graft
from graft.algos.weights import IMPORTANCE
from graft.config import ConfigError
from graft.models.io.load import ModelFileError
from graft.registry import UnknownName
from graft.user_code import UserCodeError
from tests.api.api_kit import SHAPE, Letters


class Plain:
    """No environment."""


def short(logp): ...


def set_lr(policy):
    graft.Learner(policy).lr = 0


SAME = graft.Task("same", "mine")
# a call with a policy, the class of its error, and what the message names
OF_POLICY: list[tuple[Callable[[Any], Any], type[Exception], tuple[str, ...]]] = [
    (lambda p: graft.load(3), ConfigError, ("the int 3",)),
    (lambda p: graft.load("nothing-here"), ValueError, ("nothing-here",)),
    (lambda p: graft.Learner(graft.Engine(p)), UserCodeError, ("a Policy", "PolicyEngine")),
    (lambda p: graft.Learner(p, lr=-1), ConfigError, ("lr=-1",)),
    (set_lr, ConfigError, ("lr=0",)),
    (lambda p: graft.Learner(p, staleness=-1), ConfigError, ("staleness",)),
    (lambda p: graft.Learner(p, credit="mine"), UnknownName, ("credit", "'mine'")),
    (lambda p: graft.Learner(p, credit=3), UserCodeError, ("the int 3", "a name")),
    (lambda p: graft.Learner(p, loss=short), UserCodeError, ("short", "(logp, entropy, batch)")),
    (lambda p: graft.Learner(p, reference=p), UserCodeError, ("reference", "no KL term")),
    *((lambda p, algo=algo: graft.Learner(p, algo), UserCodeError, (f"algo='{algo}'", "teacher"))
      for algo in ("opd", "gkd", "sdpo")),
    (lambda p: graft.evaluate(p), ConfigError, ("on=", "task.env")),
    (lambda p: graft.evaluate(p, on="math5000"), UnknownName, ("Benchmarks: ",)),
    (lambda p: graft.evaluate(None, on=Letters), UserCodeError, ("a Policy, an Engine or a path",)),
    (lambda p: graft.evaluate(p, on=Letters, k=(1, 8), samples=2), ValueError, ("k=8", "samples=2")),
    (lambda p: graft.evaluate(p, on=Letters, tasks=0), ValueError, ("tasks is the int 0",)),
    (lambda p: graft.evaluate(p, on=Letters, max_turns=0), ValueError, ("max_turns is the int 0",)),
    (lambda p: graft.evaluate(p, on=Letters, k=4, temperature=0), ValueError, ("4 greedy",)),
    (lambda p: graft.generate(p, ["a?", 3]), UserCodeError, ("prompts[1]", "the int 3")),
    (lambda p: graft.generate(p, [{"role": "user"}]), UserCodeError, ("prompts=[messages]",)),
    (lambda p: graft.generate(p, "a?", top_p=2), ValueError, ("top_p=2",)),
    (lambda p: graft.train("quickstart", 3), ConfigError, ("the int 3",)),
    (lambda p: graft.train("quickstart", {"train.lrr": 3}), ConfigError, ("'train.lrr'",)),
    (lambda p: graft.sft("quickstat"), ConfigError, ("'quickstat'", "'quickstart'")),
    (lambda p: graft.Learner(p, learning_rate=1e-6), TypeError, ("'learning_rate'", "'lr'")),
    (lambda p: graft.collect(p, Letters, n_samples=2), TypeError, ("'n_samples'", "'samples'")),
    (lambda p: graft.generate(p, "a", max_new_tokens=2), TypeError, ("'max_tokens'",)),
]  # fmt: skip
OF_COLLECT: list[tuple[Any, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    (7, {}, UserCodeError, ("an environment is", "the int 7")),
    (Plain, {}, UserCodeError, ("Plain", "no reset")),
    ("calculater", {}, UnknownName, ("'calculator'",)),
    (Letters, {"tasks": []}, ValueError, ("tasks is empty",)),
    (Letters, {"tasks": "a?"}, ValueError, ("tasks is the text 'a?'", "a list")),
    (Letters, {"tasks": ["a?"]}, ValueError, ("tasks[0] is a prompt", "Letters")),
    (Letters, {"tasks": [3]}, ValueError, ("tasks[0] is the int 3",)),
    (Letters, {"tasks": [SAME, SAME]}, UserCodeError, ("the same id 'same'",)),
    (None, {"tasks": ["a?"]}, UserCodeError, ("reward=",)),
    (None, {"tasks": [SAME], "reward": "f1"}, UserCodeError, ("'same' has no prompt",)),
    (Letters, {"samples": 0}, ValueError, ("samples=0",)),
    (Letters, {"max_tokens": -1}, ValueError, ("max_tokens=-1",)),
    (Letters, {"temperature": -1}, ValueError, ("temperature=-1",)),
    (Letters, {"temperature": 0}, ValueError, ("8 greedy attempts",)),
    (Letters, {"branch": "arop"}, ValueError, ("'arop'", "'arpo'")),
    (Letters, {"reward": "f2"}, ValueError, ("'f2'", "f1")),
    (Letters, {"reward": lambda: 1}, ValueError, ("unknown form",)),
]


@pytest.mark.parametrize(("call", "error", "fragments"), OF_POLICY)
def test_a_call_that_cannot_work_is_answered_with_what_was_given(
    policy, call, error, fragments, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        call(policy)
    assert [part for part in fragments if part not in str(caught.value)] == []


@pytest.mark.parametrize(("env", "options", "error", "fragments"), OF_COLLECT)
def test_a_collection_that_cannot_work_leaves_the_engine_ready(
    engine, env, options, error, fragments
):
    with pytest.raises(error) as caught:
        graft.collect(engine, env, **options)
    assert [part for part in fragments if part not in str(caught.value)] == []
    assert graft.collect(engine, Letters, tasks=1, samples=1, max_tokens=2)


def test_actions_that_nothing_describes(policy, tmp_path):
    folder = policy.save(tmp_path / "out")
    (folder / "actions.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.warns(UserWarning, match="loaded without them. Give actions=FILE"):
        graft.load(folder)


def test_a_reward_that_returns_a_text_is_named_with_its_line(engine):
    def score(task, trajectory):
        return "good"

    with pytest.raises(
        UserCodeError, match=r"reward .*score \(.*test_api_mistakes.py:\d+\) returned the text"
    ):
        graft.collect(engine, Letters, tasks=2, samples=2, max_tokens=2, reward=score)
    assert engine.stats["running"] == 0


def test_an_exception_is_raised_as_it_is_and_not_in_a_group(engine):
    """IPython prints a traceback that holds a group as plain text, without its own colours and frames."""

    def score(task, trajectory):
        raise KeyError("nowhere")

    with pytest.raises(UserCodeError, match="raised KeyError: 'nowhere'") as error:
        graft.collect(engine, Letters, tasks=2, samples=2, max_tokens=2, reward=score)
    chain: list[BaseException | None] = [error.value]
    while chain[-1] is not None:
        chain.append(chain[-1].__context__)
    assert [type(one) for one in chain] == [UserCodeError, KeyError, type(None)]
    assert graft.collect(engine, Letters, tasks=1, samples=1, max_tokens=2)


def test_episodes_of_a_step(engine):
    learner = graft.Learner(engine.policy)
    with pytest.raises(UserCodeError, match=r"episodes\[0\] is the text 'x'"):
        learner.step(["x"])  # type: ignore[list-item]
    lone = graft.collect(engine, Letters, tasks=2, samples=1, max_tokens=2)
    with pytest.raises(UserCodeError, match="every episode has one attempt, and the credit 'grpo'"):
        learner.step(lone)
    [greedy] = graft.collect(engine, Letters, tasks=1, samples=1, max_tokens=2, temperature=0)
    with pytest.raises(UserCodeError, match=r"learner\.step\(\[episode\]\)"):
        learner.step(greedy)  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=r"greedy \(temperature=0\)"):
        learner.step([greedy])
    cold = graft.collect(engine, Letters, tasks=1, samples=2, max_tokens=2, temperature=0.5)
    warm = graft.collect(engine, Letters, tasks=1, samples=2, max_tokens=2)
    with pytest.raises(UserCodeError, match=r"temperatures 0\.5 and 1"):
        learner.step([*cold, *warm])
    cut = graft.collect(engine, Letters, tasks=1, samples=2, max_tokens=2, top_k=2)
    with pytest.raises(UserCodeError, match="different top_p or top_k"):
        learner.step([*cut, *warm])


def test_episodes_are_learned_from_once(engine):
    """Passes over one batch and older episodes are asked for; weights stay as they are otherwise."""
    policy = engine.policy
    learner, fresh = graft.Learner(policy), {"tasks": 2, "samples": 2, "max_tokens": 2}
    episodes = graft.collect(engine, Letters, **fresh)
    learner.step(episodes)
    before = policy.model.state_dict()["embed.weight"].clone()
    for again in (
        episodes,
        copy.deepcopy(episodes),
        [*graft.collect(engine, Letters, **fresh), *episodes],
    ):
        with pytest.raises(UserCodeError, match=r"version 0 .*at version 1.*epochs=2.*staleness=1"):
            learner.step(again)
    assert policy.version == 1 and torch.equal(policy.model.state_dict()["embed.weight"], before)
    stale = graft.Learner(policy, staleness=1)
    metrics = stale.step(episodes)
    assert metrics["staleness/max"] == 1 and f"{IMPORTANCE}/mean" in metrics
    with pytest.raises(UserCodeError, match=r"staleness=2"):
        stale.step(episodes)


def test_episodes_of_another_policy(engine):
    other = graft.load(shape=SHAPE, alphabet="abcdefghij?")
    with graft.Engine(other) as theirs:
        foreign = graft.collect(theirs, Letters, tasks=4, samples=4, max_tokens=8)
        with pytest.raises(UserCodeError, match="another model sampled it"):
            graft.Learner(engine.policy).step(foreign)
        graft.Learner(other).step(foreign)
        newer = graft.collect(theirs, Letters, tasks=2, samples=2, max_tokens=2)
    for span in (span for episode in newer for span in episode.spans):
        span.tokens = [min(token, 3) for token in span.tokens]
        span.actions = [min(action, 3) for action in span.actions]
    with pytest.raises(UserCodeError, match="version 1 of a policy, and this one is at version 0"):
        graft.Learner(engine.policy).step(newer)


def test_attempts_that_all_broke(engine):
    class Broken(Letters):
        def respond(self, action):
            raise OSError("no such door")

    with pytest.warns(UserWarning, match="no such door"):
        episodes = graft.collect(engine, Broken, tasks=2, samples=2, max_tokens=2)
    with pytest.raises(
        RuntimeError, match=r"none of the 4 attempts .* mostly: .*no such door"
    ) as told:
        graft.Learner(engine.policy).step(episodes)
    assert "span.info['traceback']" in str(told.value) and "errors.log" not in str(told.value)


def test_a_class_that_was_defined_again_may_be_registered_again():
    def defined() -> type:
        class Mine(Letters):
            pass

        return Mine

    try:
        for _ in range(2):
            graft.register("mine-again", defined())
        with pytest.raises(ValueError, match="already registered"):
            graft.register("mine-again", Letters)
    finally:
        graft.envs.ENVS.pop("mine-again")


def test_a_loss_that_breaks_leaves_the_weights_and_the_next_step_alone(engine):
    is_broken = [True]

    def loss(logp, entropy, batch):
        return logp.sum() if is_broken[0] else -batch.advantages * logp, {}

    learner = graft.Learner(engine.policy, loss=loss)
    episodes = graft.collect(engine, Letters, tasks=2, samples=2, max_tokens=2)
    with pytest.raises(UserCodeError, match="one number per token"):
        learner.step(episodes)
    assert engine.version == 0
    is_broken[0] = False
    assert learner.step(episodes)["optimizer_steps"] == 1 and engine.version == 1


def test_a_closed_engine(policy):
    engine = graft.Engine(policy)
    engine.close()
    engine.close()
    for call in (
        lambda: graft.collect(engine, Letters),
        lambda: graft.generate(engine, "a?"),
        lambda: graft.evaluate(engine, on=Letters),
        lambda: engine.open([1]),
    ):
        with pytest.raises(
            UserCodeError, match=r"closed; make another one: graft\.Engine\(policy\)"
        ):
            call()
    graft.Learner(policy)  # a closed engine does not matter


def test_an_instance_that_cannot_be_copied(engine):
    class Unique(Letters):
        forkable = False

    with pytest.raises(UserCodeError, match=r"cannot be copied .* give the class"):
        graft.collect(engine, Unique(), tasks=1)
    assert graft.collect(engine, Unique, tasks=1, samples=2, max_tokens=2)


def test_what_was_meant_by_a_name_that_is_nowhere_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main"
    for given, meant in (
        ("quikstart", "`graft train quickstart`"),
        ("Qwen3-0.6B", "OWNER/Qwen3-0.6B"),
        (page, "'Qwen/Qwen3-0.6B'"),
    ):
        with pytest.raises(ConfigError) as caught:
            graft.load(given)
        assert meant in str(caught.value)
    (tmp_path / "runs" / "first-try").mkdir(parents=True)
    (tmp_path / "runs" / "first-try" / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="did you mean 'first-try'"):
        graft.load("first-tyr")
    for path in (page, "Qwen3-0.6B"):  # as model.path of a recipe
        with pytest.raises(ModelFileError, match=r"Hugging Face hub .*Qwen3-0\.6B"):
            graft.train({"model": {"path": path}, "task": {"env": "calculator"}}, progress=False)
