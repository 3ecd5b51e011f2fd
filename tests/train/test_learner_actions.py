"""The learner with actions beyond the vocabulary, and with masks over it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.algos.kl import teacher_gap
from graft.algos.losses.plain import reinforce, sft
from graft.algos.losses.terms import with_entropy, with_kl
from graft.algos.reductions import token
from graft.models.action_rows import ActionRows
from graft.models.critic import Critic
from graft.models.decoder import Decoder, causal
from graft.models.extra_actions import extend, load_rows
from graft.models.io.load import load_model
from graft.models.shape import ModelShape
from graft.rollout.batching import to_batch, trajectories_of
from graft.text.tokenizer import FastTokenizer
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.train.run_dir.checkpoint import checkpoints
from graft.train.run_dir.checkpoint_writer import CheckpointWriter
from graft.train.teachers.teachers import POLICY, Teachers
from graft.types import NO_ACTION, Author, Episode, Leaf, Span, Task

SHAPE = ModelShape(vocab_size=30, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ff=48)
CALL, TWO, DONE = 30, 31, 32
"""Actions beyond the vocabulary: the way into a tool, and what is possible inside."""

PROMPT, TOKENS = [1, 2, 3], [4, 9, 8, 5, 6, 7, 10]
ACTIONS = [4, CALL, NO_ACTION, TWO, DONE, NO_ACTION, 10]
"""A token; the call, spelled 9 8; inside it TWO and DONE; the answer 7; a token again."""
MODES = [0, 0, 0, 1, 1, 0, 0]
MASK = [True, True, False, True, True, False, True]


def table() -> torch.Tensor:
    """Mode 0: all tokens but 29, and the call. Mode 1: the two actions of the tool alone."""
    allowed = torch.zeros(2, 94, dtype=torch.bool)
    allowed[0, :29] = allowed[0, CALL] = True
    allowed[1, TWO] = allowed[1, DONE] = True
    return allowed


def call_rows(prompts=(PROMPT, [5, 5])) -> list:
    """A tool call behind each prompt."""
    episodes = []
    for prompt in prompts:
        episode = Episode(Task(str(prompt), "test"))
        episode.append(Span(None, Author.TASK, list(prompt)))
        n = len(TOKENS) - 2
        front = (TOKENS[:5], ACTIONS[:5], [-1.0] * n, [0.5] * n, MODES[:5], MASK[:5])
        episode.append(Span(0, Author.POLICY, *front))
        episode.append(Span(1, Author.ENV, TOKENS[5:6]))
        last = (TOKENS[6:], ACTIONS[6:], [-1.0], [0.5], MODES[6:], MASK[6:])
        tip = episode.append(Span(2, Author.POLICY, *last))
        episode.leaves = [Leaf((tip,), 1.0)]
        episodes.append(episode)
    return trajectories_of(episodes)


def new_policy(seed: int = 1) -> Decoder:
    return extend(Decoder(SHAPE).initialise(seed), [9, None, 12])


def learner_of(policy: Decoder, loss, **more) -> Learner:
    optimizer = Optimizer([policy], lr=1e-2, schedule=schedule("constant", 0, 1, 0.0))
    return Learner(policy, optimizer, loss, token(), 10_000, **{"allowed": table(), **more})


def gradient_of(learner: Learner, batch) -> torch.Tensor:
    """Of the head, [94, 32]."""
    taken = []

    def record() -> dict[str, float]:
        taken.append(learner.policy.head_weight.grad.clone())
        learner.discard()
        return {}

    learner.optimizer.step = record  # type: ignore[method-assign]
    learner.update(batch)
    return taken[0]


def plain_logits(decoder: Decoder, prompt=PROMPT) -> torch.Tensor:
    """[7, head rows]: of each token behind the prompt, by the decoder alone."""
    tokens = torch.tensor([*prompt, *TOKENS])
    hidden = decoder(tokens, torch.arange(len(tokens)), causal)
    return decoder.logits(hidden)[len(prompt) - 1 : -1]


def masked(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~table()[torch.tensor(MODES)], -torch.inf)


def decided(values: torch.Tensor) -> torch.Tensor:
    """One column of a [7, actions] table at the trained positions: what was chosen there."""
    return torch.stack([values[at, ACTIONS[at]] for at in range(7) if MASK[at]])


def test_log_probs_are_of_the_actions_a_mode_allowed():
    rows, policy = call_rows(), new_policy()
    batch = to_batch(rows)
    got = learner_of(policy, sft(), epochs=2).annotate(batch).old_logprobs
    with torch.no_grad():
        for row, prompt in enumerate((PROMPT, [5, 5])):
            want = decided(masked(plain_logits(policy, prompt)).log_softmax(-1))
            torch.testing.assert_close(got[row][batch.mask[row]], want, atol=1e-5, rtol=0)


def test_entropy_is_of_the_few_actions_that_a_tool_allows():
    rows, policy = call_rows([PROMPT]), new_policy()
    learner = learner_of(policy, with_entropy(sft(), 0.0))
    with torch.no_grad():
        p = masked(plain_logits(policy)).softmax(-1)[torch.tensor(MASK)]
    want = -torch.where(p > 0, p * p.log(), 0.0).sum(-1)
    assert float(want[2]) < 0.6932  # ln 2: two actions
    assert learner.update(to_batch(rows))["entropy"] == pytest.approx(float(want.mean()), abs=1e-5)


def test_extra_rows_are_trained_and_padding_is_not():
    rows, policy = call_rows(), new_policy()
    grad = gradient_of(learner_of(policy, sft()), to_batch(rows))
    head = policy.head_weight.detach().clone().requires_grad_()
    total = torch.zeros(())
    for prompt in (PROMPT, [5, 5]):
        tokens = torch.tensor([*prompt, *TOKENS])
        with torch.no_grad():
            hidden = policy(tokens, torch.arange(len(tokens)), causal)[len(prompt) - 1 : -1]
        total = total - decided(masked(hidden @ head.T).log_softmax(-1)).sum() / 10
    total.backward()
    # embeddings are tied: rows behind the vocabulary have the head's gradient alone
    torch.testing.assert_close(grad[30:], head.grad[30:], atol=1e-6, rtol=1e-4)
    assert (grad[[CALL, TWO, DONE]].abs().sum(1) > 0).all() and not grad[33:].any()


def test_a_step_leaves_padding_at_zero_and_moves_the_rest():
    rows, policy = call_rows(), new_policy()
    before = policy.head_weight.detach().clone()
    learner_of(policy, sft()).update(to_batch(rows))
    moved = (policy.head_weight.detach() - before).abs().sum(1) > 0
    assert moved[[CALL, TWO, DONE]].all() and not policy.head_weight[33:].any()


def test_the_reference_has_log_probs_where_a_token_was_chosen_and_for_tokens_alone():
    batch = to_batch(call_rows())
    reference = Decoder(SHAPE).initialise(9)
    learner = learner_of(new_policy(), sft(), reference=reference)
    annotated = learner.annotate(batch)
    assert (annotated.is_vocab_token & batch.mask).tolist() == [[1, 0, 0, 0, 0, 0, 1]] * 2
    with torch.no_grad():
        log_p = plain_logits(reference)[:, :29].log_softmax(-1)  # without the forbidden token
    want = torch.tensor([float(log_p[0, 4]), 0, 0, 0, 0, 0, float(log_p[6, 10])])
    torch.testing.assert_close(annotated.ref_logprobs[0], want, atol=1e-5, rtol=0)


def test_a_policy_that_only_gained_actions_has_not_moved():
    """Its tokens lost mass to the call; held against tokens alone they are where they were."""
    rows, plain = call_rows(), Decoder(SHAPE).initialise(1)
    reference = copy.deepcopy(plain)
    policy = extend(plain, [9, None, 12])
    learner = learner_of(policy, with_kl(sft(), 1.0, "k2"), reference=reference)
    metrics = learner.update(learner.annotate(to_batch(rows)))
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["entropy"] > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_value_and_gradient_of_the_kl_are_those_of_logits_of_tokens_alone(temperature: float):
    rows, policy = call_rows([PROMPT]), new_policy()
    reference = Decoder(SHAPE).initialise(9).requires_grad_(False)
    batch = to_batch(rows)
    batch = batch.replace(advantages=torch.zeros_like(batch.logprobs))
    learner = learner_of(
        policy, with_kl(reinforce(), 0.5), reference=reference, temperature=temperature
    )
    annotated = learner.annotate(batch)
    grad = gradient_of(learner, annotated)
    metrics = learner_of(
        policy, with_kl(reinforce(), 0.5), reference=reference, temperature=temperature
    ).update(annotated)

    policy = new_policy()
    at, chosen = torch.tensor([0, 6]), torch.tensor([4, 10])

    def of_tokens(decoder: Decoder) -> torch.Tensor:
        logits = plain_logits(decoder)[at, :29] / temperature
        return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]

    d = of_tokens(policy) - of_tokens(reference)
    k3 = torch.exp(-d) + d - 1
    (0.5 * k3.sum() / 5).backward()  # five decisions, two of them tokens
    assert metrics["kl"] == pytest.approx(float(k3.detach().sum()) / 5, rel=1e-4)
    torch.testing.assert_close(grad, policy.head_weight.grad, atol=1e-6, rtol=1e-4)
    assert not grad[30:].any() or float(grad[30:].abs().max()) < 1e-6  # no action is pulled at


def test_masks_over_the_vocabulary_alone_need_no_extra_rows():
    """A tag's tool: inside it two tokens are possible, and the reference obeys the same mask."""
    policy, reference = Decoder(SHAPE).initialise(1), Decoder(SHAPE).initialise(9)
    allowed = torch.zeros(2, 30, dtype=torch.bool)
    allowed[0], allowed[1, 5], allowed[1, 6] = True, True, True
    episode = Episode(Task("t", "test"))
    episode.append(Span(None, Author.TASK, PROMPT))
    n = len(TOKENS)
    tip = episode.append(
        Span(0, Author.POLICY, TOKENS, TOKENS, [-1.0] * n, [0.5] * n, MODES, [True] * n)
    )
    episode.leaves = [Leaf((tip,), 1.0)]
    rows = trajectories_of([episode])
    learner = learner_of(
        policy, with_kl(sft(), 0.1), allowed=allowed, reference=reference, epochs=2
    )
    batch = learner.annotate(to_batch(rows))
    assert batch.is_vocab_token is None
    with torch.no_grad():
        for model, got in ((policy, batch.old_logprobs), (reference, batch.ref_logprobs)):
            logits = plain_logits(model).masked_fill(~allowed[torch.tensor(MODES)], -torch.inf)
            want = logits.log_softmax(-1)[torch.arange(n), torch.tensor(TOKENS)]
            torch.testing.assert_close(got[0], want, atol=1e-5, rtol=0)
    learner.epochs = 1
    assert learner.update(batch)["kl"] > 0


def test_actions_without_a_table_or_with_a_narrow_one_are_refused():
    policy = new_policy()
    with pytest.raises(ValueError, match="3 actions beyond the vocabulary and no table"):
        learner_of(policy, sft(), allowed=None)
    with pytest.raises(ValueError, match="33 columns and the policy's head 94 rows"):
        learner_of(policy, sft(), allowed=table()[:, :33])


def plain_learner(policy: Decoder) -> Learner:
    return learner_of(policy, sft())


def resumed(folder: Path, learner: Learner, make: Any, dtype: torch.dtype) -> Learner:
    """A second learner from the checkpoint of this one's third update; both have then made a fourth."""
    batch = to_batch(call_rows())
    for _ in range(3):
        learner.update(batch)
    CheckpointWriter(folder, FastTokenizer.characters("0123456789"), keep_last=1).save(
        "rl", 3, learner, {}
    )
    (saved,) = checkpoints(folder)
    policy = load_rows(load_model(saved.path, dtype=dtype), saved.path)
    assert policy is not None
    again = make(policy)
    saved.restore(again)
    for one in (learner, again):
        one.update(batch)
    return again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_brings_actions_and_their_moments_back(dtype: torch.dtype, tmp_path: Path):
    learner = plain_learner(new_policy().to(dtype))
    again = resumed(tmp_path, learner, plain_learner, dtype)
    for name, weight in learner.policy.state_dict().items():
        assert torch.equal(again.policy.state_dict()[name], weight), name
    assert again.policy.head_weight[CALL].any()


def biased_policy(dtype: torch.dtype = torch.float32) -> Decoder:
    policy = extend(Decoder(SHAPE).initialise(1), [9, None, 12], bias=True).to(dtype)
    with torch.no_grad():
        policy.action_bias.copy_(torch.tensor([0.5, -1.0, 2.0]))
    return policy


def test_a_bias_is_added_to_the_logits_of_actions_and_trained():
    rows, policy = call_rows(), biased_policy()
    batch, plain = to_batch(rows), copy.deepcopy(policy)
    plain.action_bias = None
    with torch.no_grad():
        gap = plain_logits(policy) - plain_logits(plain)
    want = torch.zeros(94)
    want[CALL : DONE + 1] = torch.tensor([0.5, -1.0, 2.0])
    torch.testing.assert_close(gap, want.expand_as(gap), atol=1e-5, rtol=0)

    learner, taken = learner_of(policy, sft()), []
    step = learner.optimizer.step
    learner.optimizer.step = lambda: taken.append(policy.action_bias.grad.clone()) or step()
    got = learner.update(batch)["loss"]
    chosen = []
    bias = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    for prompt in (PROMPT, [5, 5]):
        whole = torch.cat([torch.zeros(CALL), bias, torch.zeros(61)])
        base = plain_logits(plain, prompt).detach()
        chosen.append(decided(masked(base + whole).log_softmax(-1)))
    loss = -torch.cat(chosen).mean()
    assert got == pytest.approx(loss.item(), abs=1e-5)
    (slope,) = torch.autograd.grad(loss, bias)
    torch.testing.assert_close(taken[0], slope, atol=1e-6, rtol=0)
    assert not torch.equal(policy.action_bias.detach(), bias.detach())


def frozen_learner(policy: Decoder, **more) -> Learner:
    rows = ActionRows(policy)
    plan = schedule("constant", 0, 1, 0.0)
    optimizer = Optimizer([rows], lr=1e-2, schedule=plan, weight_decay=0.1)
    return Learner(policy, optimizer, sft(), token(), 10_000, allowed=table(), rows=rows, **more)


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_base_moves_in_the_rows_of_actions_only(tied: bool):
    shape = replace(SHAPE, tied=tied)
    rows, policy = call_rows(), extend(Decoder(shape).initialise(1), [9, None, 12])
    batch = to_batch(rows)
    want = gradient_of(learner_of(copy.deepcopy(policy), sft()), batch)[CALL : DONE + 1]
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    learner, taken = frozen_learner(policy), []
    step = learner.optimizer.step
    learner.optimizer.step = lambda: taken.append(learner.rows.rows.grad.clone()) or step()
    learner.update(batch)
    torch.testing.assert_close(taken[0], want, atol=1e-6, rtol=0)
    assert policy.head_weight.grad is None
    for name, weight in policy.state_dict().items():
        moved = (
            (weight != before[name]).flatten(1).any(1)
            if weight.ndim > 1
            else weight != before[name]
        )
        trained = [CALL, TWO, DONE] if weight is policy.head_weight or len(weight) == 94 else []
        assert moved.nonzero().flatten().tolist() == trained, name


@pytest.mark.parametrize("make", [frozen_learner, plain_learner], ids=["frozen", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_and_a_frozen_base_are_resumed_bit_for_bit(tmp_path: Path, dtype: torch.dtype, make):
    learner = make(biased_policy(dtype))
    again = resumed(tmp_path, learner, make, dtype)
    assert torch.equal(again.policy.head_weight, learner.policy.head_weight)
    assert torch.equal(again.policy.action_bias, learner.policy.action_bias)
    assert not torch.equal(learner.policy.action_bias, biased_policy(dtype).action_bias)


def test_a_critic_of_a_frozen_base_is_trained():
    policy = new_policy()
    frozen_learner(policy)
    assert all(weight.requires_grad for weight in Critic(policy).parameters())


def test_a_policy_with_actions_is_no_distance_from_itself_as_a_teacher():
    """A teacher's log-probs are of tokens alone, so the policy's are renormalised to them."""
    own = Teachers({POLICY: None}, {}, lambda task: POLICY)
    learner = learner_of(new_policy(), sft(), teachers=own)
    rows = call_rows()
    batch = learner.annotate(to_batch(rows))
    mine = learner.over_micros(batch, lambda f: f.logprobs(*learner.scoring)[0])
    gap = teacher_gap(batch.replace(logprobs=mine))
    torch.testing.assert_close(gap, torch.zeros_like(gap), atol=1e-5, rtol=0)
    assert batch.vocab_logprobs is not None and (batch.vocab_logprobs < -1e-3).any()
