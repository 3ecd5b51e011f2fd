"""Actions beyond the vocabulary: what a decision writes, where it ends, what it may choose from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import (
    EXTRA,
    TOOLS,
    VOCAB,
    LetterTokenizer,
    assert_equals_the_model,
    assert_is_written_by,
    dense_logits,
    gather,
    prompt,
    sample_all,
    sample_one,
    score_one,
    tiny_decoder,
    tiny_engine,
    tools_space,
)

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder
from graft.models.extra_actions import extend
from graft.types import NO_ACTION, Completion, Finish, Sampling


def tools_engine(decoder: Decoder | None = None, **options: Any) -> NativeEngine:
    decoder = decoder or tiny_decoder(extra=EXTRA)
    return tiny_engine(decoder, **{"space": tools_space(), **options})


def single_path() -> ActionSpace:
    """Of TOOLS a single path: 23, 25, 27."""
    allowed = np.zeros((4, VOCAB + EXTRA), dtype=bool)
    allowed[0, 23] = allowed[1, 25] = allowed[2, 27] = allowed[3, 25] = True
    return ActionSpace(VOCAB, EXTRA, allowed)


def test_a_decision_writes_its_description_and_an_exit_ends_the_completion() -> None:
    engine = tools_engine(space=single_path())
    context = engine.open(prompt(5))
    completion = sample_one(context, Sampling(), TOOLS)
    assert completion.tokens == [5, 6, 7, 9, 10, 14, 15]
    assert completion.actions == [23, NO_ACTION, NO_ACTION, 25, NO_ACTION, 27, NO_ACTION]
    assert completion.modes == [0, 0, 0, 1, 1, 2, 2]
    assert completion.logprobs == pytest.approx([0.0] * 7) and completion.finish is Finish.EXIT
    assert context.tokens == prompt(5) + completion.tokens and context.mode == 0


@pytest.mark.parametrize("tied, bias", [(True, False), (False, False), (True, True)])
def test_log_probs_of_actions_equal_a_full_forward(tied: bool, bias: bool) -> None:
    decoder = tiny_decoder(extra=EXTRA, tied=tied, extra_bias=bias)
    if decoder.action_bias is not None:
        with torch.no_grad():
            decoder.action_bias.copy_(torch.tensor([0.6, 0.3, -0.5, 0.5, 0.2]))
    space = tools_space()
    engine = tools_engine(decoder)
    root = engine.open(prompt(9))
    (((scored,),),) = score_one(engine, prompt(9), [9], [[23]])
    allowed = torch.tensor(space.allowed)[0]
    after = dense_logits(decoder, prompt(9))[-1, : len(allowed)].masked_fill(~allowed, -torch.inf)
    assert scored == pytest.approx(after.log_softmax(-1)[23].item(), abs=1e-5)
    contexts = [root.fork() for _ in range(12)]
    for turn in range(2):
        before = [list(context.tokens) for context in contexts]
        sampling = Sampling(temperature=0.8, max_tokens=20)
        completions = gather(contexts, [sampling] * 12, [TOOLS] * 12)
        for tokens, completion in zip(before, completions, strict=True):
            assert_is_written_by(TOOLS, completion, mode=0)
            table = torch.tensor(space.allowed)
            assert_equals_the_model(decoder, tokens, completion, 0.8, table)
        seen = {action for c in completions for action in c.actions}
        assert seen > {NO_ACTION, 23, 24, 25, 26}
        assert Finish.EXIT in {c.finish for c in completions}
        for context, completion in zip(contexts, completions, strict=True):
            context.append(prompt(4, turn))  # a tool result, or any other text
            if completion.finish is not Finish.EXIT:
                context.mode = 0


def test_a_mode_may_be_set_from_outside() -> None:
    context = tools_engine().open(prompt(5))
    context.mode = 3
    completion = sample_one(context, Sampling(), TOOLS)
    assert completion.modes[0] == 3 and completion.actions[0] in (25, 26)
    assert completion.finish is Finish.EXIT


@pytest.mark.parametrize(
    ("budget", "finish"), [(2, Finish.LENGTH), (6, Finish.LENGTH), (7, Finish.EXIT)]
)
def test_a_description_beyond_the_budget_is_cut(budget: int, finish: Finish) -> None:
    """23 writes 5 6 7, 25 writes 9 10, 27 writes 14 15 and exits, if the budget allows both."""
    engine = tools_engine(space=single_path())
    completion = sample_one(engine.open(prompt(5)), Sampling(max_tokens=budget), TOOLS)
    assert completion.tokens == [5, 6, 7, 9, 10, 14, 15][:budget]
    assert completion.actions == [23, NO_ACTION, NO_ACTION, 25, NO_ACTION, 27, NO_ACTION][:budget]
    assert completion.finish is finish
    window = tiny_decoder(extra=EXTRA, max_positions=5 + budget)
    engine = tools_engine(window, space=single_path())
    assert sample_one(engine.open(prompt(5)), Sampling(), TOOLS).tokens == completion.tokens


def test_a_stop_token_stops_where_it_was_chosen_and_not_where_it_is_part_of_a_description() -> None:
    engine = tools_engine()
    contexts = [engine.open(prompt(5), key=key) for key in range(20)]
    sampling = Sampling(max_tokens=30, stop_tokens=(5, 9, 15))
    completions = gather(contexts, [sampling] * 20, [TOOLS] * 20)
    stopped = [c for c in completions if c.finish is Finish.STOP]
    assert stopped and all(c.tokens[-1] == c.actions[-1] == 5 for c in stopped)
    passed_by = [c for c in completions if 23 in c.actions]
    assert passed_by and all(5 in c.tokens for c in passed_by)
    assert Finish.EXIT in {c.finish for c in passed_by}


def test_an_action_that_writes_something_else_is_no_stop_token() -> None:
    grammar = Automaton(writes={(0, 4): (6, 7)})
    only = np.arange(VOCAB)[None] == 4
    engine = tiny_engine(space=ActionSpace(VOCAB, allowed=only))
    completion = sample_one(
        engine.open([1]), Sampling(max_tokens=5, stop_tokens=(4, 6, 7)), grammar
    )
    assert completion.tokens == [6, 7, 6, 7, 6] and completion.finish is Finish.LENGTH


def test_min_tokens_counts_what_was_written() -> None:
    """5 may not be chosen before 6 tokens are written, by any number of decisions."""
    engine = tools_engine(space=tools_space(num_tokens=6))
    contexts = [engine.open(prompt(5), key=key) for key in range(40)]
    sampling = Sampling(max_tokens=30, min_tokens=6, stop_tokens=(5,))
    completions = gather(contexts, [sampling] * 40, [TOOLS] * 40)
    ended = [c for c in completions if c.finish is Finish.STOP]
    assert ended and all(len(c.tokens) > 6 for c in ended)
    assert all(5 not in c.actions[:6] for c in completions)


def test_a_stop_string_inside_a_description_ends_behind_it() -> None:
    """23 writes 5 6 7, "fgh"; the string is complete after "fg"."""
    engine = tools_engine(space=single_path(), tokenizer=LetterTokenizer())
    completion = sample_one(engine.open([0]), Sampling(stop=("fg",)), TOOLS)
    assert completion.tokens == [5, 6, 7] and completion.finish is Finish.STOP


def test_without_a_grammar_no_action_beyond_the_vocabulary_is_drawn() -> None:
    decoder = tiny_decoder(extra=EXTRA)
    hidden = decoder.head_weight.detach()
    hidden[VOCAB:] = 0.0
    hidden[:VOCAB] -= 3 * hidden[:VOCAB].mean(0)  # tokens are no longer the likeliest
    for space in (None, ActionSpace(VOCAB), tools_space(num_tokens=VOCAB)):
        engine = tiny_engine(decoder, space=space)
        contexts = [engine.open(prompt(5), key=key) for key in range(10)]
        for sampling in (Sampling(max_tokens=20), Sampling(max_tokens=20, top_k=VOCAB + 3)):
            for completion in sample_all(contexts, sampling):
                assert max(completion.tokens) < VOCAB and completion.modes == [0] * 20
    completions = sample_all([engine.open(prompt(5))], Sampling(max_tokens=20))
    assert_equals_the_model(decoder, prompt(5), completions[0])


def test_inside_a_tool_only_its_rows_of_the_head_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = tiny_decoder(extra=EXTRA)
    engine = tools_engine(decoder, space=tools_space(num_tokens=VOCAB))
    whole: list[int] = []
    logits = decoder.logits

    def counted(hidden: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        if columns is None:
            whole.append(len(hidden))
        return logits(hidden, columns)

    monkeypatch.setattr(decoder, "logits", counted)
    context = engine.open(prompt(5))
    context.mode = 2
    completion = sample_one(context, Sampling(max_tokens=40), TOOLS)
    assert completion.finish is Finish.EXIT and whole == []
    subset = engine._masks.subset
    assert subset is not None and subset.columns.tolist() == [25, 26, 27]
    table = torch.tensor(engine.space.allowed)
    assert_equals_the_model(decoder, prompt(5), completion, allowed=table)
    # beside a request in mode 0: one row of the whole head a step, while the other is inside
    inside, outside = (engine.open(prompt(5), key=key) for key in (1, 2))
    inside.mode = 1
    gather([inside, outside], [Sampling(max_tokens=1)] * 2, [TOOLS, TOOLS])
    assert whole == [1]


def test_truncation_is_of_what_the_mode_allows() -> None:
    decoder = tiny_decoder(extra=EXTRA)
    engine = tools_engine(decoder)
    likely, top = (
        gather([engine.open(prompt(5), key=key) for key in range(4)], [sampling] * 4, [TOOLS] * 4)
        for sampling in (Sampling(temperature=0), Sampling(top_k=1))
    )
    assert [c.actions for c in likely] == [c.actions for c in top]
    assert all(logp == pytest.approx(0.0, abs=1e-6) for c in top for logp in c.logprobs)


def test_a_new_action_is_as_likely_as_the_token_it_starts_from() -> None:
    decoder = extend(tiny_decoder(), [4, None])
    allowed = np.ones((1, VOCAB + 2), dtype=bool)
    engine = tiny_engine(decoder, space=ActionSpace(VOCAB, 2, allowed))
    ((token,), (action,)) = score_one(engine, prompt(5), [5], [[4], [VOCAB]])[0]
    assert token == pytest.approx(action, abs=1e-6)


def test_a_grammar_that_writes_what_the_model_cannot_read_is_refused() -> None:
    engine = tools_engine()
    with pytest.raises(EngineError, match=r"wrote \[23\] \(the model reads tokens 0 to 22\)"):
        space = np.zeros((1, VOCAB + EXTRA), dtype=bool)
        space[0, 23] = True
        engine = tools_engine(space=ActionSpace(VOCAB, EXTRA, space))
        sample_one(engine.open([1]), Sampling(), Automaton())
    with pytest.raises(EngineError, match="need head rows, and the model has 0"):
        tiny_engine(space=tools_space())


def replayed(engine: NativeEngine, before: list[int], completion: Completion) -> list[float]:
    """Log-probs of its decisions, scored one by one; 0 inside a description."""
    tokens = before + completion.tokens
    decisions = zip(completion.actions, completion.modes, strict=True)
    return [
        0.0
        if action == NO_ACTION
        else score_one(engine, tokens, [position], [[action]], mode)[0][0][0]
        for position, (action, mode) in enumerate(decisions, len(before))
    ]


def test_forking_at_an_earlier_token_and_forcing_an_action_equals_starting_there() -> None:
    """As in a counterfactual: keep a beginning, force a call, continue sampling."""
    decoder = tiny_decoder(extra=EXTRA)
    engine = tools_engine(decoder)
    context = engine.open(prompt(30), key=3)
    first = sample_one(context, Sampling(max_tokens=17), TOOLS)
    for number in range(31, len(context.tokens)):
        fork = context.fork(key=number, at=number)
        assert fork.mode is None
        fork.append(TOOLS.written(0, 23))
        fork.mode = TOOLS.step(0, 23)
        before = list(fork.tokens)
        completion = sample_one(fork, Sampling(max_tokens=9), TOOLS)
        fresh = tools_engine(decoder).open(before, key=number)
        fresh.mode = 1
        assert sample_one(fresh, Sampling(max_tokens=9), TOOLS).actions == completion.actions
        again = replayed(engine, before, completion)
        assert completion.logprobs == pytest.approx(again, abs=1e-5)
    assert context.tokens == prompt(30) + first.tokens
