"""Teachers of a policy: whose log-probs, of which tokens, behind which prompt, by which task."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.distillation import DIVERGENCES
from graft.algos.presets import build
from graft.config import ConfigError, load_config
from graft.engine.errors import EngineError
from graft.engine.remote.prompt_logprobs import PromptScorer
from graft.models.decoder import Decoder, causal
from graft.models.divergence import TeacherComparison
from graft.models.shape import ModelShape
from graft.rollout.batching import to_batch, trajectories_of
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.algorithm import preset_of
from graft.train.distributed.process_group import ALONE
from graft.train.learner import Learner
from graft.train.memory.frozen_shapes import teacher_shapes
from graft.train.memory.plan import has_reference
from graft.train.optimizer import Optimizer, schedule
from graft.train.teachers.check import refuse_teachers
from graft.train.teachers.teacher_prompt import TeacherPrompt, read_context
from graft.train.teachers.teachers import POLICY, Teachers
from graft.types import Author, Episode, Span, Task, Trajectory
from graft.user_code import UserCodeError
from tests.trees import group, random_tree
from tests.web_server import Reply, Seen, answering

SHAPE = ModelShape(vocab_size=30, width=32, layers=1, heads=2, kv_heads=2, head_dim=16, ff=32)
TEACHER = replace(SHAPE, vocab_size=32, width=48, heads=3, kv_heads=3)  # two rows of padding


def learner_for(teachers: Teachers, name: str = "gkd", budget: int = 10_000) -> Learner:
    policy = Decoder(SHAPE).initialise(1)
    _, _, loss, reduction = build(name)
    optimizer = Optimizer([policy], lr=1e-2, schedule=schedule("constant", 0, 1, 0.0))
    return Learner(policy, optimizer, loss, reduction, budget, teachers=teachers)


def teachers_of(models: dict[str, Any], choose=lambda task: "one", **more: Any) -> Teachers:
    how = TeacherComparison(DIVERGENCES["js"](), vocab_size=SHAPE.vocab_size)
    return Teachers(models, {}, choose, **{"comparison": how, **more})


def teacher(seed: int = 2) -> Decoder:
    return Decoder(TEACHER).initialise(seed).requires_grad_(False)


@torch.no_grad()
def dense(model: Decoder, row: Trajectory, vocab_size: int | None = None) -> Tensor:
    """[tokens, V] log-probs at each token of a row, computed as one sequence."""
    tokens = torch.tensor(row.tokens)
    hidden = model(tokens, torch.arange(len(tokens)), causal)
    return model.logits(hidden)[:-1, :vocab_size].log_softmax(-1)


def test_log_probs_and_divergences_of_a_forest_are_those_of_its_rows():
    """Rows of random trees share prompts and spans; every cell is as in a sequence of its own."""
    model = teacher()
    learner = learner_for(teachers_of({"one": model}))
    rows = trajectories_of([random_tree(seed) for seed in range(4)])
    batch = to_batch(rows)
    batch = learner.annotate(batch)
    found = seen_divergences(learner)
    learner.update(batch.replace(advantages=batch.zeros()))
    (got_NT,) = found
    for number, row in enumerate(rows):
        prompt = len(row.spans[0])
        mine, theirs = (
            dense(one, row, SHAPE.vocab_size)[prompt - 1 :] for one in (learner.policy, model)
        )
        labels = torch.tensor(row.tokens[prompt:])
        mask = batch.mask[number, : len(labels)]
        want = DIVERGENCES["js"]()(mine, theirs)
        torch.testing.assert_close(
            got_NT[number, : len(labels)][mask], want[mask], atol=1e-5, rtol=0
        )
        logp = dense(model, row)[prompt - 1 :].gather(1, labels[:, None])[:, 0]
        assert batch.teacher_logprobs is not None
        got = batch.teacher_logprobs[number, : len(labels)]
        torch.testing.assert_close(got[mask], logp[mask], atol=1e-5, rtol=0)
        assert (got_NT[number][~batch.mask[number]] == 0).all()


def seen_divergences(learner: Learner) -> list[Tensor]:
    """The divergences of each micro-batch that it learns from now on; its weights stay as they are."""
    found: list[Tensor] = []

    def loss(logp: Tensor, entropy: Tensor, micro: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        values = micro.need("divergences", "the test reads them")
        found.append(values.detach())
        return values, {}

    learner.loss, learner.optimizer.step = loss, dict  # type: ignore[method-assign]
    return found


def gradients(learner: Learner, rows: list[Trajectory]) -> dict[str, Tensor]:
    taken: dict[str, Tensor] = {}

    def record() -> dict[str, float]:
        named = learner.policy.named_parameters()
        taken.update({n: p.grad.clone() for n, p in named if p.grad is not None})
        learner.discard()
        return {}

    learner.optimizer.step = record  # type: ignore[method-assign]
    batch = learner.annotate(to_batch(rows))
    learner.update(batch.replace(advantages=batch.zeros()))
    return taken


def test_gradients_of_a_divergence_do_not_depend_on_micro_batches():
    rows = trajectories_of([random_tree(seed) for seed in range(3)])
    whole = gradients(learner_for(teachers_of({"one": teacher()})), rows)
    assert sum(float(g.abs().sum()) for g in whole.values()) > 0
    parts = gradients(learner_for(teachers_of({"one": teacher()}), budget=20), rows)
    for key, grad in whole.items():
        torch.testing.assert_close(parts[key], grad, atol=1e-6, rtol=1e-4)


def test_a_model_is_no_distance_from_itself():
    learner = learner_for(teachers_of({POLICY: None}, lambda task: POLICY))
    rows = trajectories_of([random_tree(3)])
    batch = learner.annotate(to_batch(rows))
    batch = batch.replace(advantages=batch.zeros())
    metrics = learner.update(batch)
    assert metrics["distill/divergence"] == pytest.approx(0, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(0, abs=1e-5)


def test_each_task_has_the_teacher_that_it_names():
    """The same answers as tasks of two environments: each scored by its own teacher."""
    both = {"maths": teacher(2), "code": teacher(3)}
    learner = learner_for(teachers_of(both, lambda task: task.env))
    episodes = [group([1, 2, 3], [[4, 5], [6]], [1, 0]) for _ in both]
    for episode, name in zip(episodes, both, strict=True):
        episode.task = Task(name, name)
    rows = trajectories_of(episodes)
    got = learner.annotate(to_batch(rows)).teacher_logprobs
    alone = [
        learner_for(teachers_of({"one": model})).annotate(to_batch(rows)).teacher_logprobs
        for model in both.values()
    ]
    assert got is not None and alone[0] is not None and alone[1] is not None
    torch.testing.assert_close(got, torch.cat([alone[0][:2], alone[1][2:]]))
    assert not torch.equal(alone[0], alone[1])


# a second root


TOKENIZER = FastTokenizer.characters("0123456789+=?! answerivydotmlk:\n")


def chat_episode(chat: Chat, **task: Any) -> Episode:
    """ "2+3=" attempted twice, the second attempt is right; the answers share their first token."""
    messages = ({"role": "user", "content": "2+3="},)
    episode = Episode(Task("sum", "test", messages, **task))
    episode.append(Span(None, Author.TASK, chat.prompt(messages), text="2+3="))
    made = group(
        [0], [TOKENIZER.encode("1"), TOKENIZER.encode("15"), TOKENIZER.encode("5")], [0, 0, 1]
    )
    for number, span in enumerate(made.spans[1:], 1):
        span.parent, span.text = 0, TOKENIZER.decode(span.tokens)
        episode.append(span)
        episode.leaves.append(made.leaves[number - 1])
    episode.leaves[0].info = {"feedback": "too small!"}
    return episode


def prompt_of(template: str) -> TeacherPrompt:
    chat = Chat(TOKENIZER)
    return TeacherPrompt(read_context(template), chat, lambda task: "")


def texts(rows: list[Trajectory | None]) -> list[str | None]:
    return [None if row is None else TOKENIZER.decode(row.tokens) for row in rows]


def test_the_teacher_reads_the_answer_and_the_same_tokens_follow():
    prompt = prompt_of("{prompt}\nanswer: {answer}")
    rows = trajectories_of([chat_episode(prompt.chat, answer=5)])
    seen = prompt.rewritten(rows)
    plain = [TOKENIZER.decode(row.tokens) for row in rows]
    assert texts(seen) == [text.replace("2+3=", "2+3=\nanswer: 5") for text in plain]
    roots = {id(row.spans[0]) for row in seen if row is not None}
    assert len(roots) == 1  # computed once for all rows
    assert [row.spans[0].tokens for row in rows] != [row.spans[0].tokens for row in seen if row]


def test_feedback_and_successes_of_others_and_rows_that_have_none():
    prompt = prompt_of("{prompt} {feedback}")
    rows = trajectories_of([chat_episode(prompt.chat)])
    assert [text is not None and "too small!" in text for text in texts(prompt.rewritten(rows))] == [
        True, False, False,
    ]  # fmt: skip
    prompt = prompt_of("{prompt} {success}")
    found = texts(prompt.rewritten(rows))
    assert [text is not None for text in found] == [True, True, False]  # its own success is none
    assert found[0] == TOKENIZER.decode(rows[0].tokens).replace("2+3=", "2+3= 5")


def test_a_row_that_is_too_long_behind_the_teachers_prompt_has_no_teacher():
    prompt = prompt_of("{prompt}" + "1" * 20)
    rows = trajectories_of([chat_episode(prompt.chat)])
    lengths = [len(row.tokens) + 20 for row in rows]
    found = replace(prompt, positions=min(lengths)).rewritten(rows)
    assert [row is not None for row in found] == [length == min(lengths) for length in lengths]


def test_a_field_that_no_task_has_is_named():
    prompt = prompt_of("{prompt} {solution}")
    rows = trajectories_of([chat_episode(prompt.chat, meta={"solved": "2+3=5"})])
    with pytest.raises(UserCodeError, match=r"\{solution\}.*known: .*solved"):
        prompt.rewritten(rows)
    with pytest.raises(ConfigError, match="prompt"):
        read_context("answer: {answer}")


def test_a_users_function_writes_the_teachers_message():
    prompt = prompt_of("tests.train.test_teachers:hint")
    rows = trajectories_of([chat_episode(prompt.chat)])
    assert [text is not None for text in texts(prompt.rewritten(rows))] == [True, True, False]


def hint(task: Task, row: Trajectory) -> str | None:
    return None if row.leaf.reward else "is 5!"


def test_a_prompt_that_is_not_its_messages_is_refused():
    prompt = prompt_of("{prompt} {answer}")
    episode = chat_episode(prompt.chat, answer=5)
    episode.spans[0].tokens = [*episode.spans[0].tokens, 3]
    with pytest.raises(UserCodeError, match="cannot rewrite the prompt"):
        prompt.rewritten(trajectories_of([episode]))


def test_privileged_log_probs_are_those_behind_the_other_prompt():
    """Rows that share a token but not their teacher's prompt: two distributions for one of the student's."""
    prompt = prompt_of("tests.train.test_teachers:by_leaf")
    size = TOKENIZER.vocab_size
    policy = Decoder(replace(SHAPE, vocab_size=size)).initialise(4)
    how = TeacherComparison(DIVERGENCES["reverse"](), vocab_size=size)
    teachers = Teachers({POLICY: None}, {}, lambda task: POLICY, how, prompt=prompt)
    learner = learner_for(teachers)
    learner.policy = policy
    learner.optimizer = Optimizer([policy], lr=0.1, schedule=schedule("constant", 0, 1, 0.0))
    episode = chat_episode(prompt.chat)
    shared = episode.append(replace(episode.spans[1]))
    for leaf, more in zip(episode.leaves[:2], ("2", "3"), strict=True):
        tail = replace(episode.spans[1], parent=shared, tokens=TOKENIZER.encode(more))
        leaf.tips = (episode.append(replace(tail, actions=tail.tokens)),)
    rows = trajectories_of([episode])
    batch = learner.annotate(to_batch(rows))
    assert batch.has_teacher is not None and batch.has_teacher.tolist() == [True, True, False]
    found = seen_divergences(learner)
    learner.update(batch.replace(advantages=batch.zeros()))
    assert float(found[0][0, 0]) != pytest.approx(float(found[0][1, 0]), abs=1e-4)
    for number, view in enumerate(prompt.rewritten(rows)[:2]):
        assert view is not None
        mine, theirs = dense(policy, rows[number])[-2], dense(policy, view)[-2]
        want = DIVERGENCES["reverse"]()(mine, theirs)
        torch.testing.assert_close(found[0][number, 0], want, atol=1e-5, rtol=0)
    assert (found[0][2] == 0).all()


def by_leaf(task: Task, row: Trajectory) -> str | None:
    return None if row.leaf.reward else f"is {row.leaf_index}!"


# a server


@contextmanager
def vllm_like(
    model: Decoder,
    tokenizer: FastTokenizer,
    spoil: Callable[[Seen], Reply | None] = lambda seen: None,
) -> Iterator[tuple[str, list[Seen]]]:
    """vLLM's /v1/models, /tokenize and prompt_logprobs of /v1/completions, computed by `model`."""

    @torch.no_grad()
    def answer(seen: Seen) -> Reply:
        if (spoiled := spoil(seen)) is not None:
            return spoiled
        asked = json.loads(seen.body or b"{}")
        if seen.path == "/v1/models":
            return _json({"data": [{"id": "big", "owned_by": "vllm"}]})
        if seen.path == "/tokenize":
            return _json({"tokens": tokenizer.encode(asked["prompt"])})
        tokens = torch.tensor(asked["prompt"])
        hidden = model(tokens, torch.arange(len(tokens)), causal)
        logp = model.logits(hidden).log_softmax(-1)[:-1]
        entries: list[Any] = [None]
        for row, token in zip(logp, tokens[1:].tolist(), strict=True):
            shown = {*row.topk(asked["prompt_logprobs"]).indices.tolist(), token}
            entries.append({str(i): {"logprob": float(row[i]), "rank": 1} for i in shown})
        return _json({"choices": [{"text": "", "prompt_logprobs": entries}]})

    with answering(answer) as (url, requests):
        yield f"{url}/v1", requests


def _json(content: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(content).encode())


CHARACTERS = FastTokenizer.characters("abcdefghijklmnopqrstuvwxy. ")


def test_a_server_gives_what_the_same_model_gives_in_this_process():
    size = CHARACTERS.vocab_size
    model = Decoder(replace(TEACHER, vocab_size=size)).initialise(2).requires_grad_(False)
    how = TeacherComparison(DIVERGENCES["forward"](), top_k=4, vocab_size=size)
    rows = trajectories_of([random_tree(seed, vocab=size) for seed in range(2)])
    results: list[tuple[Tensor, dict[str, float]]] = []
    with vllm_like(model, CHARACTERS) as (url, requests):
        server = PromptScorer(url, CHARACTERS, deadline=20)
        server.check(4)
        for models, servers in (({"one": model}, {}), ({}, {"one": server})):
            learner = learner_for(Teachers(models, servers, lambda task: "one", how))
            learner.policy = policy = Decoder(replace(SHAPE, vocab_size=size)).initialise(1)
            learner.optimizer = Optimizer(
                [policy], lr=0.1, schedule=schedule("constant", 0, 1, 0.0)
            )
            batch = learner.annotate(to_batch(rows))
            assert batch.teacher_logprobs is not None
            metrics = learner.update(batch.replace(advantages=batch.zeros()))
            results.append((batch.teacher_logprobs, metrics))
    (here, mine), (there, theirs) = results
    torch.testing.assert_close(there, here, atol=1e-5, rtol=0)
    assert theirs["distill/divergence"] == pytest.approx(mine["distill/divergence"], abs=1e-6)
    assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
    assert sum(seen.path == "/v1/completions" for seen in requests) == len(rows) + 1


def test_a_server_with_another_tokenizer_is_refused():
    other = FastTokenizer.characters("zyxwvutsrqponmlkjihgfedcba. ")
    model = Decoder(replace(TEACHER, vocab_size=other.vocab_size)).initialise(2)
    with (
        vllm_like(model, other) as (url, _),
        pytest.raises(EngineError, match="policy's tokenizer"),
    ):
        PromptScorer(url, CHARACTERS, deadline=20).check(0)


def test_a_server_that_fails_once_is_asked_again_and_one_that_stays_down_is_named(monkeypatch):
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("graft.engine.remote.endpoint.RETRIES", 2)
    model = Decoder(replace(TEACHER, vocab_size=CHARACTERS.vocab_size)).initialise(2)
    faults = [Reply(500, b"out of memory"), Reply(200, b"{half")]

    def spoil(seen: Seen) -> Reply | None:
        return faults.pop(0) if faults and seen.path == "/v1/completions" else None

    with vllm_like(model, CHARACTERS, spoil) as (url, _):
        server = PromptScorer(url, CHARACTERS, deadline=20)
        assert len(server.score([[1, 2, 3]])[0].logprobs) == 3
        faults += [Reply(500, b"out of memory")] * 9
        with pytest.raises(EngineError, match=r"500: out of memory.*tried 3 times"):
            server.score([[1, 2, 3]])


def test_an_openai_server_gives_sampled_tokens_only():
    def answer(seen: Seen) -> Reply:
        asked = json.loads(seen.body or b"{}")
        if seen.path == "/v1/models":
            return _json({"data": [{"id": "big"}]})
        if "prompt_logprobs" in asked:
            return _json({"choices": [{"text": ""}]})
        if seen.path != "/v1/completions":
            return Reply(404)
        shown = [CHARACTERS.decode([token]) for token in asked["prompt"]]
        logprobs = {"tokens": [*shown, "x"], "token_logprobs": [None, -1.5, -0.5, -9.0]}
        return _json({"choices": [{"text": "x", "logprobs": logprobs}]})

    with answering(answer) as (url, _):
        server = PromptScorer(f"{url}/v1", CHARACTERS, deadline=20)
        assert server.score([[1, 2, 3]])[0].logprobs[1:] == [-1.5, -0.5]
        with pytest.raises(EngineError, match="prompt_logprobs"):
            server.score([[1, 2, 3]], top_k=5)


# recipes


RECIPE = {
    "model": {
        "shape": {"width": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "ff": 32}
    },
    "task": {"env": "calculator"},
    "rollout": {"max_tokens": 8, "max_context": 64},
}


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["algo.name=opd"], "distill.teacher is empty"),
        (["distill.teacher=reference"], "not learned from"),
        (["distill.teacher=policy", "distill.coef=1"], "distill.divergence is empty"),
        (["distill.teacher=policy", "algo.name=gkd", "distill.on_policy=0.5"], "distill.data"),
        (["distill.teacher=policy", "algo.name=opd", "distill.data=x.jsonl"], "policy sampled"),
        (["distill.teacher=http://h:1/v1", "algo.name=gkd"], "distill.top_k"),
        (["distill.teacher=http://h:1", "algo.name=opd", "rollout.temperature=0.7"], "temperature 1"),
        (["distill.teacher={policy: runs/x}", "algo.name=opd"], "another name"),
        (["distill.teacher=policy", "algo.name=opd", "actions.file=compact"], "teacher_kl prices"),
        (["distill.teacher=policy", "algo.name=gkd"], "nothing to learn"),
        (["distill.teacher=reference", "algo.name=opd"], "nothing to learn"),
        (["distill.teacher=policy", "distill.coef=1", "distill.divergence=reverse"], "nothing to learn"),
        (['distill.context="{prompt}{answer}"'], "distill.teacher is empty"),
        (["distill.teacher=x", "algo.name=opd", "distill.top_k=5"], "sampled tokens"),
        (["distill.teacher=x", "algo.name=opd", "distill.temperature=2"], "sampled tokens"),
        (["distill.teacher=x", "algo.name=gkd", "distill.tail=ignore"], "all tokens"),
        (["distill.teacher=x", "algo.name=gkd", "distill.by=data_source"], "one teacher"),
        (["distill.teacher={sums: x}", "algo.name=gkd"], "task.env=calculator is none of them"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(overrides, says):
    config = load_config(RECIPE, overrides)
    with pytest.raises(ConfigError, match=says):
        refuse_teachers(config, preset_of(config), ALONE)


def test_a_teacher_that_follows_the_policy():
    """The mean of past weights: SDPO's teacher."""
    given = ["distill.teacher=reference", 'distill.context="{prompt}{answer}"', "algo.name=sdpo"]
    config = load_config(RECIPE, [*given, "algo.reference_sync=[1, 0.05]"])
    preset = preset_of(config)
    refuse_teachers(config, preset, ALONE)
    assert preset.reference_sync == (1, 0.05) and preset.kl_coef == 0


def test_the_parts_of_a_recipe():
    given = [
        "distill.teacher=reference",
        "distill.coef=0.1",
        "distill.divergence={js: {beta: 0.3}}",
    ]
    config = load_config(RECIPE, given)
    preset = preset_of(config)
    refuse_teachers(config, preset, ALONE)
    assert (preset.distill_coef, preset.divergence) == (0.1, ("js", {"beta": 0.3}))
    assert has_reference(config) and teacher_shapes(config, SHAPE) == {}
    assert copy.copy(config).distill.teachers == {"teacher": "reference"}
