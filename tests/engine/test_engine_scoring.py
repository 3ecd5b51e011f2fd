"""Scores of many continuations after many positions equal as many full forwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from burst_kit import engine_on, small_decoder
from engine_kit import (
    EXTRA,
    VOCAB,
    dense_logp,
    prompt,
    score_one,
    tiny_decoder,
    tiny_engine,
    tools_space,
)

from graft.actions.space import ActionSpace
from graft.engine.native import scoring
from graft.models.decoder import Decoder
from graft.models.tree.packing import interval_mask
from graft.protocols import Engine


def plainly(
    decoder: Decoder,
    tokens: list[int],
    position: int,
    continuation: list[int],
    mode: int,
    allowed: torch.Tensor | None,
) -> list[float]:
    """One full forward per continuation; its last action is not part of it."""
    read = tokens[:position] + continuation[:-1]
    logp = dense_logp(decoder, read, [mode] * len(read), allowed)
    return [logp[position - 1 + k, action].item() for k, action in enumerate(continuation)]


@pytest.mark.parametrize("most", [scoring.MAX_ROWS, 40, 1])
def test_scores_equal_full_forwards(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_ROWS", most)  # one forward, several, one per position
    decoder = tiny_decoder(extra=EXTRA)
    space = tools_space(num_tokens=VOCAB)
    engine: Engine = tiny_engine(decoder, space=space)
    tokens, at = prompt(31), [31, 1, 7, 8, 30, 7]
    continuations = [[4, 9, 2], [23], [5, 24], [6]]
    allowed = torch.tensor(space.allowed)
    scores = score_one(engine, tokens, at, continuations)
    assert [[len(actions) for actions in position] for position in scores] == [[3, 1, 2, 1]] * 6
    for position, found in zip(at, scores, strict=True):
        for continuation, got in zip(continuations, found, strict=True):
            want = plainly(decoder, tokens, position, continuation, 0, allowed)
            assert got == pytest.approx(want, abs=1e-5)


def test_the_trunk_stands_first_and_branches_from_its_end_to_its_beginning() -> None:
    """1 2 3 4 with "a b c" after 2 and 4 tokens: 4 is seen by the branch after it, not by the other."""
    a, b, c = 7, 8, 9
    tree = scoring.ScoringRows()
    tree.add([1, 2, 3, 4], [2, 4], [[a, b, c]])
    assert tree.tokens == [1, 2, 3, 4, a, b, a, b]
    assert tree.positions == [0, 1, 2, 3, 4, 5, 2, 3]
    assert tree.ends == [8, 8, 6, 6, 6, 6, 8, 8]
    assert tree.before == [3, 4, 5, 1, 6, 7] and tree.actions == [a, b, c] * 2


def test_ends_and_runs_describe_the_same_mask() -> None:
    tree = scoring.ScoringRows()
    tree.add(prompt(9), [1, 4, 5, 8], [[3], [4, 5, 6], [7, 8]])
    tree.add(prompt(4), [2, 4], [[3], [4, 5, 6], [7, 8]])
    seen = torch.zeros(len(tree.tokens), len(tree.tokens), dtype=torch.bool)
    for run in tree.runs:
        for row in range(run.start, run.stop):
            for start, stop in (*run.path, (run.start, row + 1)):
                seen[row, start:stop] = True
    assert torch.equal(interval_mask(torch.tensor(tree.ends)), seen)


def test_scores_on_a_device_with_kernels(device: torch.device) -> None:
    decoder = small_decoder(extra=EXTRA, heads=4, kv_heads=2)
    space = tools_space(num_tokens=VOCAB)
    tokens, continuations = prompt(70), [[4, 9, 2], [23]]
    want = score_one(
        tiny_engine(decoder, space=space, kernels=False), tokens, range(1, 71), continuations
    )
    got = score_one(
        engine_on(device, decoder=decoder, space=space), tokens, range(1, 71), continuations
    )
    for mine, other in zip(got, want, strict=True):
        for some, others in zip(mine, other, strict=True):
            assert some == pytest.approx(others, abs=2e-5)


def test_a_branch_sees_the_tokens_before_its_position_only() -> None:
    engine = tiny_engine()
    one, other = prompt(9), prompt(9)[:5] + prompt(4, 3)
    assert one != other
    positions, continuations = [2, 5], [[3, 1, 4], [8]]
    near, far = (score_one(engine, tokens, positions, continuations) for tokens in (one, other))
    assert near[0][0] == pytest.approx(far[0][0], abs=1e-6)
    assert near[1][0] == pytest.approx(far[1][0], abs=1e-6)
    assert score_one(engine, one, [9], continuations)[0][0] != pytest.approx(near[0][0], abs=1e-3)


def test_scores_are_normalised_over_the_actions_of_the_mode() -> None:
    engine = tiny_engine(tiny_decoder(extra=EXTRA), space=tools_space())
    inside = score_one(engine, prompt(6), [6], [[25], [26], [27], [4], [23]], mode=2)[0]
    assert np.exp([logp for (logp,) in inside[:3]]).sum() == pytest.approx(1.0)
    assert inside[3] == inside[4] == [-np.inf]
    outside = score_one(engine, prompt(6), [6], [[token] for token in (*range(6), 23, 24)])[0]
    assert np.exp([logp for (logp,) in outside]).sum() == pytest.approx(1.0)


def test_what_cannot_be_scored_is_refused() -> None:
    engine = tiny_engine(space=ActionSpace(VOCAB))
    assert score_one(engine, [1, 2], [], [[1]]) == [] and score_one(engine, [1, 2], [1, 2], []) == [
        [],
        [],
    ]
    for at in (0, 3):
        with pytest.raises(ValueError, match=f"after {at} tokens of 2"):
            score_one(engine, [1, 2], [at], [[1]])
    with pytest.raises(ValueError, match="in mode 1"):
        score_one(engine, [1, 2], [1], [[1]], mode=1)
    with pytest.raises(ValueError, match=r"continuation \[\]"):
        score_one(engine, [1, 2], [1], [[]])
    with pytest.raises(ValueError, match="token 23 is outside"):
        score_one(engine, [1, 2], [1], [[VOCAB, 1]])
    with pytest.raises(ValueError, match=r"continuation \[1, 23\]"):
        score_one(engine, [1, 2], [1], [[1, VOCAB]])


def test_several_texts_score_as_each_does_alone(monkeypatch: pytest.MonkeyPatch):
    engine = tiny_engine()
    texts = [prompt(9), prompt(4, salt=1), prompt(13, salt=2), prompt(6, salt=3)]
    at = [[2, 9, 5], [4], list(range(1, 14)), []]
    continuations = [[3], [1, 2, 5]]
    alone = [
        score_one(engine, text, some, continuations) for text, some in zip(texts, at, strict=True)
    ]
    for most in (scoring.MAX_ROWS, 30, 9, 1):  # one forward, or cut within and between texts
        monkeypatch.setattr(scoring, "MAX_ROWS", most)
        together = engine.score(texts, at, continuations)
        assert [len(part) for part in together] == [3, 1, 13, 0]
        for mine, want in zip(together, alone, strict=True):
            for one, other in zip(mine, want, strict=True):
                assert [v for way in one for v in way] == pytest.approx(
                    [v for way in other for v in way], abs=1e-5
                )


def test_scores_take_a_temperature() -> None:
    engine = tiny_engine()
    (warm,) = engine.score([prompt(6)], [[6]], [[token] for token in range(VOCAB)], temperature=0.5)
    (plain,) = engine.score([prompt(6)], [[6]], [[token] for token in range(VOCAB)])
    want = (torch.tensor(plain[0]).flatten() / 0.5).log_softmax(0)
    assert torch.allclose(torch.tensor(warm[0]).flatten(), want, atol=1e-5)
