"""Mistakes in calls: each message names what was seen and what to do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import graft
from graft.algos.weights import IMPORTANCE
from graft.config import ConfigError
from graft.models.io.load import ModelFileError
from graft.registry import UnknownName
from graft.user_code import UserCodeError
from tests.api.api_kit import SHAPE, Letters


def test_sources_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="one of the two: a source"):
        graft.load()
    with pytest.raises(ConfigError, match="not the int 3"):
        graft.load(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing-here"):
        graft.load(tmp_path / "nothing-here")
    with pytest.raises(ConfigError, match=r"model.shape has no widht"):
        graft.load(shape={"widht": 3}, alphabet="ab")


def test_actions_that_nothing_describes(policy, tmp_path):
    folder = policy.save(tmp_path / "out")
    (folder / "actions.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.warns(UserWarning, match="loaded without them. Give actions=FILE"):
        graft.load(folder)


def test_objects_in_the_wrong_place(policy, engine):
    with pytest.raises(
        UserCodeError, match=r"an Engine, not a Policy: give graft\.Engine\(policy\)"
    ):
        graft.collect(policy, Letters)
    with pytest.raises(UserCodeError, match=r"takes a Policy, not the text 'Qwen'"):
        graft.Engine("Qwen")  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=r"Learner\(\) takes a Policy, not a PolicyEngine"):
        graft.Learner(engine)
    with pytest.raises(UserCodeError, match=r"an environment is an id, a class, .* not the int 7"):
        graft.collect(engine, 7)  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=r"Plain .* has no reset"):

        class Plain:
            pass

        graft.collect(engine, Plain)
    with pytest.raises(UnknownName, match="did you mean 'calculator'"):
        graft.collect(engine, "calculater")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, "tasks=0: input should be greater than or equal to 1"),
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": "a?"}, "tasks is the text 'a\\?'; give a number, or a list"),
        ({"tasks": ["a?"]}, r"tasks\[0\] is a prompt, and the environment Letters poses its own"),
        ({"tasks": [3]}, r"tasks\[0\] is the int 3; it must be a graft.Task or a prompt"),
        ({"samples": 0}, "samples=0: input should be greater"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": 0}, "8 greedy attempts at a task"),
        ({"branch": "arop"}, "unknown branch 'arop'; did you mean 'arpo'"),
        ({"reward": "f2"}, "unknown reward 'f2'; known: .*f1"),
        ({"reward": lambda: 1}, "has an unknown form"),
    ],
)
def test_arguments_of_collect(engine, options, message):
    with pytest.raises(ValueError, match=message):
        graft.collect(engine, Letters, **options)
    assert graft.collect(engine, Letters, tasks=1, samples=1, max_tokens=2)


def test_prompts_without_a_reward_or_with_one_id_twice(engine):
    with pytest.raises(UserCodeError, match="earn nothing; give reward="):
        graft.collect(engine, tasks=["a?"])
    task = graft.Task("same", "mine")
    with pytest.raises(UserCodeError, match="have the same id 'same'"):
        graft.collect(engine, Letters, tasks=[task, task])
    with pytest.raises(UserCodeError, match="'same' has no prompt"):
        graft.collect(engine, tasks=[task], reward="f1")


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


def test_arguments_of_a_learner(policy):
    with pytest.raises(UnknownName, match="unknown algorithm 'gropo'; did you mean 'grpo'"):
        graft.Learner(policy, algo="gropo")
    with pytest.raises(ConfigError, match="lr=-1"):
        graft.Learner(policy, lr=-1)
    with pytest.raises(UnknownName, match="unknown credit"):
        graft.Learner(policy, credit="mine")
    with pytest.raises(UserCodeError, match="is the int 3; give a name"):
        graft.Learner(policy, credit=3)  # type: ignore[arg-type]
    with pytest.raises(
        UserCodeError, match=r"loss .*short .*takes \(logp\); .* \(logp, entropy, batch\)"
    ):

        def short(logp): ...

        graft.Learner(policy, loss=short)
    with pytest.raises(UserCodeError, match="reference is not used: there is no KL term"):
        graft.Learner(policy, reference=policy)
    learner = graft.Learner(policy)
    with pytest.raises(ConfigError, match="lr=0"):
        learner.lr = 0


@pytest.mark.parametrize("algo", ["opd", "gkd", "sdpo"])
def test_a_learner_has_no_teacher(policy, algo: str):
    with pytest.raises(UserCodeError, match=f"algo='{algo}' learns from a teacher .* recipe"):
        graft.Learner(policy, algo)


def test_episodes_of_a_step(engine):
    learner = graft.Learner(engine.policy)
    with pytest.raises(UserCodeError, match="no episodes"):
        learner.step([])
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
    with pytest.raises(ConfigError, match="staleness"):
        graft.Learner(policy, staleness=-1)


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


def test_what_to_evaluate_on(policy):
    with pytest.raises(ConfigError, match="nothing says what to evaluate on"):
        graft.evaluate(policy)
    with pytest.raises(UnknownName, match="Benchmarks: "):
        graft.evaluate(policy, on="math5000")
    with pytest.raises(UserCodeError, match="takes a Policy, an Engine or a path, not None"):
        graft.evaluate(None, on=Letters)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is the int 0; give a whole number from 1"),
        ({"k": (1, 8), "samples": 2}, "k=8 needs as many attempts per task, and samples=2"),
        ({"tasks": 0}, "tasks is the int 0"),
        ({"k": 4, "temperature": 0}, "4 greedy attempts"),
    ],
)
def test_arguments_of_evaluate(policy, options, message):
    with pytest.raises(ValueError, match=message):
        graft.evaluate(policy, on=Letters, **options)


def test_prompts_of_generate(policy):
    with pytest.raises(UserCodeError, match="prompts is None; give a text"):
        graft.generate(policy, None)  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=r"prompts\[1\] is the int 3"):
        graft.generate(policy, ["a?", 3])  # type: ignore[list-item]
    with pytest.raises(UserCodeError, match=r"write prompts=\[messages\]"):
        graft.generate(policy, [{"role": "user", "content": "a?"}])  # type: ignore[list-item]


def test_an_instance_that_cannot_be_copied(engine):
    class Unique(Letters):
        forkable = False

    with pytest.raises(UserCodeError, match=r"cannot be copied .* give the class"):
        graft.collect(engine, Unique(), tasks=1)
    assert graft.collect(engine, Unique, tasks=1, samples=2, max_tokens=2)


def test_overrides_of_a_run():
    with pytest.raises(ConfigError, match="an override is the int 3"):
        graft.train("quickstart", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown key 'train.lrr'"):
        graft.train("quickstart", {"train.lrr": 3})
    with pytest.raises(ConfigError, match=r"no recipe 'quickstat'.*did you mean 'quickstart'"):
        graft.sft("quickstat")


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


@pytest.mark.parametrize(
    ("call", "given", "ours"),
    [
        (lambda policy: graft.Learner(policy, learning_rate=1e-6), "learning_rate", "lr"),  # type: ignore
        (lambda policy: graft.collect(policy, Letters, n_samples=2), "n_samples", "samples"),  # type: ignore
        (
            lambda policy: graft.generate(policy, "a", max_new_tokens=2),
            "max_new_tokens",
            "max_tokens",
        ),  # type: ignore
        (lambda policy: graft.Engine(policy, sed=1), "sed", "seed"),  # type: ignore
    ],
)
def test_an_argument_of_another_library_is_answered_with_ours(policy, call, given, ours):
    with pytest.raises(TypeError, match=rf"'{given}'; did you mean '{ours}'\?"):
        call(policy)
