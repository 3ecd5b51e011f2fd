"""A custom loop: load, Engine, Learner, collect, step, evaluate, save."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import graft
from tests.api.api_kit import SHAPE, Ask, Letters, new_policy


def letter_a(task: graft.Task, trajectory: graft.Trajectory) -> float:
    return trajectory.answer_text.count("a") / 3


def test_the_loop_of_the_first_page(tmp_path, monkeypatch):
    """A game with a tool, a model folder, a benchmark: as a reader would type it, but small."""
    monkeypatch.chdir(tmp_path)
    new_policy(alphabet="bytes", shape={**SHAPE, "max_positions": 1024}).save("model")
    rows = [{"problem": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    policy = graft.load("model")
    engine = graft.Engine(policy)
    learner = graft.Learner(policy, algo="grpo", lr=1e-6)
    env = graft.make("game:GuessTheNumber-v0", wrappers="python_tool")
    for _ in range(2):
        episodes = graft.collect(
            engine, env, tasks=2, samples=2, reward=letter_a, max_tokens=8, max_turns=2
        )
        learner.step(episodes)
    scores = graft.evaluate(policy, on="math500", k=(1, 2), data="rows.jsonl", max_tokens=4)
    assert len(scores.table.rows["model +2"]["math500"].tasks) == 3
    assert set(scores["math500"]) == {"avg@2", "pass@1", "pass@2", "maj@2"}
    assert graft.load(policy.save("out")).num_parameters == policy.num_parameters


def tokens(episodes: list[graft.Episode]) -> list[list[int]]:
    return [span.tokens for episode in episodes for span in episode.spans]


def test_the_loop_learns_to_write_a_letter(engine):
    learner = graft.Learner(engine.policy, algo="grpo", lr=1e-2)
    rewards: list[float] = []
    for _ in range(8):
        episodes = graft.collect(engine, tasks=["?"], samples=16, reward=letter_a, max_tokens=3)
        rewards.append(learner.step(episodes)["reward"])
    assert rewards[0] < 0.5 and rewards[-1] > 0.9


def test_the_engine_has_the_new_weights_after_a_step_and_both_compute_the_same(engine):
    policy = engine.policy
    learner = graft.Learner(policy, lr=1e-2)
    for version in range(3):
        assert policy.version == engine.version == version
        cut = {"top_p": 0.6} if version else {}  # learned as it was sampled
        how = {"max_tokens": 2, "temperature": 0.7, **cut}
        episodes = graft.collect(engine, Ask, tasks=4, samples=4, **how)
        sampled = [
            span for episode in episodes for span in episode.spans if span.author == "policy"
        ]
        assert {span.version for span in sampled} == {version}
        assert learner.step(episodes)["sampling/sampling_logp_difference/max"] < 1e-5
    assert engine.sampler.decoder is policy.model is learner.trainer.policy


def test_a_step_has_the_numbers_of_the_same_step_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limits = {"tasks": 4, "samples": 4, "max_tokens": 4, "max_turns": 3, "max_context": 48}
    graft.train(
        {
            "run": {"seed": 3, "eval_tasks": 0, "name": "same"},
            "model": {"shape": SHAPE, "device": "cpu"},
            "task": {"env": "calculator"},
            "rollout": limits,
            "train": {"steps": 3, "lr": 1e-2},
        }
    )
    lines = Path("runs/same/metrics.jsonl").read_text().splitlines()
    wanted = [values for values in map(json.loads, lines) if values.get("phase") == "rl"]
    policy = graft.load(
        shape=SHAPE, alphabet=graft.make("calculator").alphabet, device="cpu", seed=3
    )
    learner = graft.Learner(policy, lr=1e-2, max_tokens=4, seed=3)
    same = ("reward", "loss", "grad_norm", "entropy", "num_tokens", "advantages/std")
    with graft.Engine(policy, seed=3) as engine:
        for step in range(3):
            metrics = learner.step(graft.collect(engine, "calculator", **limits))
            assert {key: metrics[key] for key in same} == {key: wanted[step][key] for key in same}


def test_draws_depend_on_the_seed_alone(policy):
    def drawn(seed: int) -> list[list[int]]:
        with graft.Engine(policy, seed=seed) as engine:
            return tokens(graft.collect(engine, Letters, tasks=4, samples=2, max_tokens=4))

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_collection_goes_on_behind_the_last_one_unless_a_seed_is_given(engine):
    def ids(**seed: int) -> list[str]:
        episodes = graft.collect(engine, Letters, tasks=2, samples=1, max_tokens=2, **seed)
        return [episode.task.id for episode in episodes]

    assert ids() == ["Letters:train:0", "Letters:train:1"]
    assert ids() == ["Letters:train:2", "Letters:train:3"]
    again = [
        tokens(graft.collect(engine, Letters, tasks=2, samples=2, max_tokens=4, seed=7))
        for _ in range(2)
    ]
    assert again[0] == again[1]
    assert ids() == ["Letters:train:4", "Letters:train:5"]


def one(**options: Any) -> Letters:
    return Letters(**options)


@pytest.mark.parametrize(
    "env",
    [Letters, Letters(), graft.make(Letters), one, f"{__name__}:Letters"],
    ids=["class", "instance", "made", "function", "name"],
)
def test_an_environment_may_be_a_class_an_instance_a_function_or_a_name(engine, env):
    episodes = graft.collect(engine, env, tasks=3, samples=2, max_tokens=2, seed=0)
    assert [episode.task.answer for episode in episodes] == ["b", "c", "c"]
    assert all(len(episode.leaves) == 2 for episode in episodes)


def test_an_instance_keeps_its_settings_and_is_left_alone(engine):
    class Sized(Letters):
        def __init__(self, letters: str) -> None:
            super().__init__()
            self.letters = letters

        def pose(self) -> str:
            self.answer = self.letters
            return self.letters

    env = Sized("cc")
    episodes = graft.collect(engine, env, tasks=2, samples=2, max_tokens=2)
    assert {episode.task.answer for episode in episodes} == {"cc"} and env.is_over


def test_tasks_may_be_a_list_with_their_own_answers(engine):
    listed = [
        graft.Task("first", "mine", prompt=({"role": "user", "content": "a?"},), answer="a"),
        graft.Task("second", "mine", prompt=({"role": "user", "content": "b?"},), answer="b"),
    ]
    seen: list[str] = []

    def reward(task: graft.Task, trajectory: graft.Trajectory) -> bool:
        seen.append(task.answer)
        return True

    episodes = graft.collect(engine, tasks=listed, samples=3, reward=reward, max_tokens=2)
    assert [episode.task.id for episode in episodes] == ["first", "second"]
    assert sorted(seen) == ["a"] * 3 + ["b"] * 3
    assert [leaf.reward for leaf in episodes[0].leaves] == [1.0] * 3


def test_a_credit_and_a_loss_of_ones_own_are_used(engine):
    shapes: list[tuple[int, ...]] = []

    def credit(advantages, batch):
        shapes.append(tuple(advantages.shape))
        return (batch.reward - batch.reward.mean())[:, None] * batch.mask

    def loss(logp, entropy, batch):
        return -batch.advantages * logp, {"mine": logp}

    learner = graft.Learner(engine.policy, credit=credit, loss=loss, lr=1e-3)
    metrics = learner.step(graft.collect(engine, Letters, tasks=2, samples=3, max_tokens=2))
    assert shapes[0][0] == 6 and "mine" in metrics


@pytest.mark.parametrize(
    "options",
    [
        {"algo": "ppo"},
        {"algo": "dr_grpo", "max_tokens": 2},
        {"kl_coef": 0.1},
        {"epochs": 2, "minibatches": 2},
        {"credit": ["grpo", "whiten"], "reduction": {"constant": {"length": 8}}},
    ],
)
def test_other_algorithms_take_a_step(engine, options):
    before = engine.policy.model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    learner = graft.Learner(engine.policy, lr=1e-2, **options)
    learner.step(graft.collect(engine, Letters, tasks=4, samples=4, max_tokens=2, reward=letter_a))
    after = engine.policy.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_branch_by_name_and_one_of_ones_own(engine):
    async def twice(growth):
        for _ in range(2):
            await (await growth.root()).finish()

    for branch in ({"arpo": {"initial_rollouts": 1}}, twice):
        [episode] = graft.collect(engine, Ask, tasks=1, samples=2, max_tokens=2, branch=branch)
        assert len(episode.leaves) == 2


def test_a_branch_that_learns_goes_on_from_one_collection_to_the_next(engine):
    class Counting:
        def __init__(self) -> None:
            self.calls: list[object] = []

        @property
        def state(self) -> dict[str, Any]:
            return {}

        def restore(self, state: Any) -> None: ...

        def begin(self, step: int) -> None:
            self.calls.append(step)

        def settle(self, episodes: list[graft.Episode]) -> None:
            self.calls.append(len(episodes))

        async def __call__(self, growth: Any) -> None:
            await (await growth.root()).finish()

    branch = Counting()
    for _ in range(2):
        graft.collect(engine, Letters, tasks=3, samples=1, max_tokens=2, branch=branch)
    assert branch.calls == [1, 3, 2, 3]


def test_adapters_are_trained_and_saved_merged(policy, tmp_path):
    base = graft.load(policy.save(tmp_path / "base"))
    with graft.Engine(base) as engine:
        learner = graft.Learner(base, lr=1e-2, lora_rank=2)
        metrics = learner.step(graft.collect(engine, Letters, tasks=4, samples=4, max_tokens=2))
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
        episodes = graft.collect(engine, Letters, tasks=4, samples=4, max_tokens=2)
        assert learner.step(episodes)["sampling/sampling_logp_difference/max"] < 1e-5


def test_a_saved_policy_is_loaded_back_with_the_same_answers(engine, tmp_path):
    learner = graft.Learner(engine.policy, lr=1e-2)
    learner.step(graft.collect(engine, Letters, tasks=4, samples=4, max_tokens=2))
    folder = engine.policy.save(tmp_path / "out")
    again = graft.load(folder)
    assert again.version == 0 and again.path == folder
    first, second = (
        graft.generate(one, ["a?", "b?"], samples=3, max_tokens=6) for one in (engine.policy, again)
    )
    assert [one.tokens for one in first] == [one.tokens for one in second]


def test_a_loop_that_was_stopped_goes_on_with_the_same_numbers(engine, tmp_path):
    def step(engine: graft.Engine, learner: graft.Learner, number: int) -> dict[str, float]:
        how = {"tasks": 4, "samples": 4, "max_tokens": 3, "reward": letter_a, "seed": number}
        metrics = learner.step(graft.collect(engine, Letters, **how))
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}

    base = graft.load(engine.policy.save(tmp_path / "base"))
    how = {"lr": 1e-2, "warmup": 4, "kl_coef": 0.1}
    learner = graft.Learner(engine.policy, **how)
    for number in range(2):
        step(engine, learner, number)
    folder = learner.save(tmp_path / "mine")
    assert folder.name == "rl-000002"
    wanted = [step(engine, learner, number) for number in (2, 3)]
    policy = graft.load(tmp_path / "mine")
    other = graft.Learner(policy, reference=base, **how)
    with graft.Engine(policy) as again:
        other.restore(tmp_path / "mine")
        assert (other.steps, policy.version, again.version) == (2, 2, 2)
        assert [step(again, other, number) for number in (2, 3)] == wanted
        with pytest.raises(ValueError, match=r"load it first: policy = graft\.load"):
            other.restore(tmp_path / "mine")
        [label] = graft.evaluate(again, Letters, tasks=2, max_tokens=2).table.rows
        assert label == "rl-000002 +2"  # updates since it was loaded


def test_a_chat_template_that_was_given_is_saved_too(tmp_path):
    policy = new_policy(alphabet="bytes", chat_template="chatml")
    again = graft.load(policy.save(tmp_path / "out"))
    messages = [{"role": "user", "content": "hi"}]
    assert again.chat.prompt(messages) == policy.chat.prompt(messages)


def test_completions_have_tokens_logprobs_and_text(engine):
    answers = graft.generate(engine, ["a?", "b?"], samples=2, max_tokens=5, seed=1)
    assert [answer.prompt for answer in answers] == [0, 0, 1, 1]
    for answer in answers:
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.entropies) <= 5
        assert answer.finish in ("stop", "length")
    greedy = graft.generate(engine.policy, "a?", temperature=0, max_tokens=5)
    assert greedy == graft.generate(engine.policy, "a?", temperature=0, max_tokens=5)


def test_an_idle_engine_of_the_policy_is_used_again(policy):
    alone = graft.evaluate(policy, on=Letters, k=2, tasks=5, max_tokens=2)
    assert len(policy.engines) == 0
    with graft.Engine(policy) as engine:
        steps = engine.stats["steps"]
        beside = graft.evaluate(policy, on=Letters, k=2, tasks=5, max_tokens=2)
        assert engine.stats["steps"] > steps and list(policy.engines) == [engine]
        assert beside["Letters"] == alone["Letters"]
        answer = graft.generate(policy, "a?", max_tokens=4)
        assert answer == graft.generate(engine, "a?", max_tokens=4)


def test_scores_have_intervals_and_a_table(engine):
    scores = graft.evaluate(engine, on=Letters, k=(1, 2), tasks=20, max_tokens=2)
    assert list(scores) == ["Letters"] and set(scores["Letters"]) == {
        "avg@2", "pass@1", "pass@2", "maj@2",
    }  # fmt: skip
    low, high = scores["Letters"]["pass@2"].interval
    assert low <= scores["Letters"]["pass@2"].value <= high
    assert scores.reward == scores["Letters"]["avg@2"].value
    assert "| policy | Letters | 20 |" in str(scores) == scores._repr_markdown_()
    always = graft.evaluate(engine, on=Letters(), tasks=3, max_tokens=2, reward=lambda t, r: 1.0)
    assert always.reward == 1.0


def test_a_system_prompt_is_posed_with_every_task(tmp_path: Path):
    policy = new_policy(alphabet="bytes", shape={**SHAPE, "max_positions": 2048})
    (tmp_path / "prompt.txt").write_text("Be brief.")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "2+1?", "answer": "3"}))
    texts: list[str] = []

    def kept(task: graft.Task, trajectory: graft.Trajectory) -> float:
        texts.append(trajectory.spans[0].text)
        return 0.0

    options: dict[str, Any] = {"tasks": 1, "max_tokens": 2, "reward": kept}
    graft.evaluate(policy, on=Letters, prompt=str(tmp_path / "prompt.txt"), **options)
    math = {"on": "math500", "data": str(tmp_path / "rows.jsonl")}
    graft.evaluate(policy, **math, prompt="base", **options)
    graft.evaluate(policy, on=Letters, **options)
    assert ["Be brief." in text for text in texts] == [True, False, False]
    assert ["You are a helpful assistant that" in text for text in texts] == [False, True, False]


def test_a_run_is_evaluated_on_its_own_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "model": {"shape": SHAPE},
        "task": {"env": "calculator", "eval_args": {"split": "test"}},
        "rollout": {"max_tokens": 4, "max_context": 48, "tasks": 2, "samples": 2},
        "sft": {"steps": 2, "batch": 2},
        "run": {"eval_tasks": 3},
    }
    run = graft.sft(recipe, {"run.name": "warm"}, "sft.batch=4")
    assert run.folder == Path("runs/warm") and (run.folder / "config.yaml").is_file()
    assert set(run.after) == {"sampled", "greedy", "tool_rate"} == {*run.summary["after"]}
    scores = graft.evaluate("warm")
    assert scores["calculator"]["avg@1"].value == pytest.approx(run.after["sampled"])
    assert run.load().path == Path(run.summary["checkpoint"])


def test_importing_graft_is_light_and_lists_its_names():
    code = (
        "import graft, sys; names = dir(graft); "
        "assert {'load', 'Engine', 'Learner', 'collect', 'train'} <= set(names); "
        "assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
