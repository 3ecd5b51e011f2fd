"""Engine log-probs are the model's log-probs, whatever the way the tokens were computed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import (
    VOCAB,
    assert_equals_the_model,
    dense_logits,
    prompt,
    sample_all,
    sample_one,
    tiny_decoder,
    tiny_engine,
)

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.models.decoder import causal
from graft.models.logprobs import score_actions
from graft.models.truncation import Truncation
from graft.types import Completion, Finish, Sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 30])
def test_log_probs_equal_a_full_forward(length: int, temperature: float) -> None:
    decoder = tiny_decoder()
    engine = tiny_engine(decoder)
    context = engine.open(prompt(length))
    completion = sample_one(context, Sampling(temperature=temperature, max_tokens=21))
    assert len(completion.tokens) == 21 and completion.finish is Finish.LENGTH
    assert_equals_the_model(decoder, prompt(length), completion, temperature)
    assert context.tokens == prompt(length) + completion.tokens
    assert completion.actions == completion.tokens and completion.modes == [0] * 21


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "llama", "qk_norm": False, "tied": False},
        {"family": "qwen2", "qk_norm": False, "qkv_bias": True},
        {"kv_heads": 4},
        {"kv_heads": 1},
    ],
)
def test_every_family_and_grouping_of_heads_is_exact(changes: dict[str, Any]) -> None:
    decoder = tiny_decoder(**changes)
    engine = tiny_engine(decoder)
    root = engine.open(prompt(26))
    completions = sample_all([root.fork() for _ in range(3)], Sampling(max_tokens=9))
    for completion in completions:
        assert_equals_the_model(decoder, prompt(26), completion)


def test_masks_and_modes_are_part_of_the_log_prob() -> None:
    allowed = np.zeros((2, VOCAB), dtype=bool)
    allowed[0, :12] = True
    allowed[1, 10:] = True
    space = ActionSpace(VOCAB, allowed=allowed)
    grammar = Automaton(0, {(0, a): 1 for a in range(6)} | {(1, a): 0 for a in range(15, VOCAB)})
    decoder = tiny_decoder()
    engine = tiny_engine(decoder, space=space)
    context = engine.open(prompt(5))
    first = sample_one(context, Sampling(temperature=1.3, max_tokens=30), grammar)
    before = list(context.tokens)
    second = sample_one(context, Sampling(temperature=1.3, max_tokens=10), grammar)
    assert first.modes + second.modes == grammar.walk(first.tokens + second.tokens)
    assert set(first.modes) == {0, 1}
    assert all(space.allows(m, t) for m, t in zip(first.modes, first.tokens, strict=True))
    table = torch.from_numpy(allowed)
    assert_equals_the_model(decoder, prompt(5), first, 1.3, table)
    assert_equals_the_model(decoder, before, second, 1.3, table)


def test_the_mode_goes_on_in_the_next_sample_and_in_forks() -> None:
    engine = tiny_engine(space=ActionSpace(VOCAB, allowed=np.ones((2, VOCAB), dtype=bool)))
    grammar = Automaton(default={0: 1})
    context = engine.open(prompt(5))
    assert sample_one(context, Sampling(max_tokens=2), grammar).modes == [0, 1]
    assert sample_one(context.fork(), Sampling(max_tokens=1), grammar).modes == [1]
    assert sample_one(context, Sampling(max_tokens=1)).modes == [0]  # no grammar, mode 0
    assert sample_one(context, Sampling(max_tokens=1), grammar).modes == [1]


def test_truncated_log_probs_are_those_of_the_truncated_distribution() -> None:
    decoder = tiny_decoder()
    engine = tiny_engine(decoder)
    completion = sample_one(engine.open(prompt(9)), Sampling(top_k=1, max_tokens=6))
    assert completion.logprobs == pytest.approx([0.0] * 6, abs=1e-6)
    assert completion.entropies == pytest.approx([0.0] * 6, abs=1e-6)
    greedy = sample_one(engine.open(prompt(9)), Sampling(temperature=0, max_tokens=6))
    assert greedy.tokens == completion.tokens
    assert_equals_the_model(decoder, prompt(9), greedy)


@pytest.mark.parametrize("cut", [Truncation(4), Truncation(top_p=0.7), Truncation(9, 0.9, 0.3)])
def test_truncated_log_probs_are_the_learners(cut: Truncation) -> None:
    allowed = np.ones((2, VOCAB), dtype=bool)
    allowed[1, 7:] = False
    grammar = Automaton(0, {(0, a): 1 for a in range(6)} | {(1, a): 0 for a in range(3)})
    decoder = tiny_decoder()
    engine = tiny_engine(decoder, space=ActionSpace(VOCAB, allowed=allowed))
    sampling = Sampling(temperature=1.3, max_tokens=40, **cut._asdict())
    completion = sample_one(engine.open(prompt(5)), sampling, grammar)
    assert set(completion.modes) == {0, 1}
    tokens = prompt(5) + completion.tokens
    with torch.no_grad():
        hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), causal)[4:-1]
        modes, table = torch.tensor(completion.modes), torch.from_numpy(allowed)
        how = decoder.head_weight, torch.tensor(completion.actions), modes, table, 1.3
        logp, entropy = score_actions(hidden, *how, truncation=cut)
        whole, _ = score_actions(hidden, *how)
    assert completion.logprobs == pytest.approx(logp.tolist(), abs=1e-5)
    assert completion.entropies == pytest.approx(entropy.tolist(), abs=1e-5)
    assert float((logp - whole).max()) > 0.1


@pytest.mark.parametrize("columns", [VOCAB, 5])  # 5: only these rows of the head are computed
def test_the_repetition_penalty_is_that_of_transformers(columns: int) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    allowed = np.arange(VOCAB)[None] < columns
    decoder = tiny_decoder()
    engine = tiny_engine(decoder, space=ActionSpace(VOCAB, allowed=allowed))
    sampling = Sampling(temperature=1.3, repetition_penalty=1.7, max_tokens=12)
    completion = sample_one(engine.open(prompt(3)), sampling, Automaton())
    tokens, apply = prompt(3), RepetitionPenaltyLogitsProcessor(1.7)
    for token, logp in zip(completion.tokens, completion.logprobs, strict=True):
        scores: Any = apply(torch.tensor([tokens]), dense_logits(decoder, tokens)[-1:])
        want = (scores / 1.3)[0, :columns].log_softmax(-1)[token]
        assert logp == pytest.approx(float(want), abs=1e-5)
        tokens.append(token)


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    decoder = tiny_decoder()
    engine = tiny_engine(decoder)
    settings = [
        Sampling(temperature=0, top_k=2, max_tokens=6),  # greedy: the cut does not matter
        Sampling(top_k=1, max_tokens=6),
        Sampling(temperature=1.5, max_tokens=6),
        Sampling(max_tokens=4),
    ]

    async def main() -> list[Completion]:
        contexts = [engine.open(prompt(9)) for _ in settings]
        pairs = zip(contexts, settings, strict=True)
        return await asyncio.gather(*(context.sample(sampling) for context, sampling in pairs))

    greedy, top, warm, plain = asyncio.run(main())
    assert greedy.tokens == top.tokens
    assert top.logprobs == pytest.approx([0.0] * 6, abs=1e-6)
    assert_equals_the_model(decoder, prompt(9), greedy)
    assert_equals_the_model(decoder, prompt(9), warm, 1.5)
    assert_equals_the_model(decoder, prompt(9), plain)


def test_a_fork_equals_a_context_opened_with_the_same_tokens_and_key() -> None:
    decoder = tiny_decoder()
    engine, other = tiny_engine(decoder), tiny_engine(decoder)
    sampling = Sampling(max_tokens=11)
    root = engine.open(prompt(27), key=5)
    sample_one(root, sampling)
    root.append(prompt(3, salt=1))
    forks = [root.fork() for _ in range(4)]
    forked = sample_all([root, *forks], sampling)
    for fork, completion in zip([root, *forks], forked, strict=True):
        before = fork.tokens[: -len(completion.tokens)]
        assert_equals_the_model(decoder, before, completion)
        fresh = other.open(before, key=fork.key)
        assert sample_one(fresh, sampling).tokens == completion.tokens
    assert len({tuple(c.tokens) for c in forked}) == 5  # siblings do not repeat each other


def test_a_common_past_is_computed_once() -> None:
    engine = tiny_engine(page_size=4)
    root = engine.open(prompt(27))
    forks = [root.fork() for _ in range(8)]
    sample_all(forks, Sampling(max_tokens=5))
    # 26 tokens of the stem, then the last prompt token and four drawn ones for each fork
    assert engine.stats["prefill_tokens"] == 26
    assert engine.stats["decode_tokens"] == 8 * 5
    # 6 full pages shared, the stem's half page, and per fork: a copy of it and one page more
    assert engine.stats["pages_total"] - engine.stats["pages_free"] == 6 + 1 + 8 * 2


def ragged_run(**options: object) -> list[Completion]:
    """Three prompts with forks, turns of uneven length, forks of forks."""
    engine = tiny_engine(tiny_decoder(), **options)
    sampling = Sampling(max_tokens=24, stop_tokens=(3, 4))
    contexts = []
    for number, length in enumerate((2, 26, 45)):
        root = engine.open(prompt(length, number))
        contexts += [root.fork() for _ in range(4)]
    first = sample_all(contexts, sampling)
    for number, context in enumerate(contexts):
        context.append(prompt(1 + 3 * number % 11, number))
    contexts += [context.fork() for context in contexts[::3]]
    before = [list(context.tokens) for context in contexts]
    second = sample_all(contexts, sampling)
    for tokens, completion in zip(before, second, strict=True):
        assert_equals_the_model(engine.decoder, tokens, completion)
    for context in contexts:
        context.close()
    assert engine.stats["running"] == 0
    return first + second


@pytest.fixture(scope="module")
def roomy_run() -> list[Completion]:
    completions = ragged_run()
    assert {c.finish for c in completions} == {Finish.STOP, Finish.LENGTH}
    return completions


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 1},
        {"prefill_chunk": 7},
        {"page_size": 1},
        {"page_size": 16},
        {"page_size": 64, "kv_tokens": 4096},
        {"max_running": 3},
        {"kv_tokens": 128},
        {"kv_tokens": 240},
        {"kv_tokens": 240, "prefill_chunk": 5, "page_size": 3},
    ],
)
def test_results_do_not_depend_on_chunks_pages_or_pool(
    options: dict[str, int], roomy_run: list[Completion]
) -> None:
    for mine, other in zip(ragged_run(**options), roomy_run, strict=True):
        assert mine.tokens == other.tokens and mine.finish == other.finish
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_small_pool_really_evicts_and_preempts() -> None:
    engine = tiny_engine(kv_tokens=128)
    contexts = [engine.open(prompt(20, salt)) for salt in range(5)]
    crowded = sample_all(contexts, Sampling(max_tokens=30))
    assert engine.stats["preemptions"] > 0
    more = sample_all([engine.open(prompt(40)) for _ in range(2)], Sampling(max_tokens=8))
    assert engine.stats["evictions"] > 0
    assert len(more) == 2
    roomy = tiny_engine(kv_tokens=4096)
    alone = [sample_one(roomy.open(prompt(20, s)), Sampling(max_tokens=30)) for s in range(5)]
    assert [c.tokens for c in crowded] == [c.tokens for c in alone]


def test_a_sample_does_not_depend_on_its_batch_mates() -> None:
    decoder = tiny_decoder()
    sampling = Sampling(max_tokens=20)
    together = tiny_engine(decoder)
    contexts = [together.open(prompt(3 + 5 * i, i), key=100 + i) for i in range(6)]
    completions = sample_all(contexts, sampling)
    for i, completion in enumerate(completions):
        alone = sample_one(tiny_engine(decoder).open(prompt(3 + 5 * i, i), key=100 + i), sampling)
        assert alone.tokens == completion.tokens
        assert alone.logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_the_seed_and_the_key_decide_what_is_drawn() -> None:
    decoder = tiny_decoder()
    sampling = Sampling(max_tokens=16)

    def draw(seed: int, key: int | None) -> list[int]:
        return sample_one(tiny_engine(decoder, seed=seed).open(prompt(4), key=key), sampling).tokens

    assert draw(0, 7) == draw(0, 7)
    assert draw(0, 7) != draw(1, 7)
    assert draw(0, 7) != draw(0, 8)
    assert draw(0, -1) == draw(0, 2**64 - 1)  # keys are 64 bits
    assert draw(0, None) == draw(0, None)  # the first context opened, both times


def test_bfloat16_goes_through_the_fused_kernels() -> None:
    decoder = tiny_decoder(width=16, layers=1).to(torch.bfloat16)
    engine = tiny_engine(decoder)
    root = engine.open(prompt(22))
    contexts = [root.fork(), root.fork()]
    for completion in sample_all(contexts, Sampling(max_tokens=6)):
        wide = tiny_decoder(width=16, layers=1)
        wide.load_state_dict(decoder.state_dict())
        logp = dense_logits(wide, prompt(22) + completion.tokens)[21:-1].log_softmax(-1)
        want = [logp[i, token].item() for i, token in enumerate(completion.tokens)]
        assert completion.logprobs == pytest.approx(want, abs=0.15)
