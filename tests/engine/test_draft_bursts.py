"""Bursts that verify drafts on the device draw what bursts without drafts draw, with the same bits.

The kernels run on the GPU, or in Triton's interpreter with small sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from burst_kit import engine_on, open_forks
from engine_kit import LetterTokenizer, gather
from test_gpu_bits import in_order

from graft.engine.native.drafts.attempts import FinishedTexts, texts_of
from graft.models.tree.path_blocks import BLOCK
from graft.types import Completion, Sampling

CASES: dict[str, tuple[tuple[tuple[int, int], ...], list[dict[str, Any]]]] = {
    "siblings": (((70, 2), (5, 1)), [{"max_tokens": 8}]),
    "alone": (((3, 1),), [{"max_tokens": 12}]),
    "stops": (
        ((20, 3),),
        [
            {"max_tokens": 8, "stop_tokens": (4, 7), "min_tokens": 4},
            {"max_tokens": 8, "stop": ("bc", "qq")},
            {"max_tokens": 6, "top_k": 3},
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bursts_with_drafts_draw_the_same_bits(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graft.engine.native.drafts import gain

    monkeypatch.setattr(gain.BurstPace, "should_draft", lambda *_: True)
    decoder = in_order(monkeypatch, device)
    sizes, samplings = CASES[case]
    results: list[list[Completion]] = []
    for drafts in ("off", "auto"):
        engine = engine_on(
            device, decoder=decoder, page_size=BLOCK, drafts=drafts, tokenizer=LetterTokenizer()
        )
        contexts = open_forks(engine, *sizes)
        how = [Sampling(temperature=0.05, **s) for s in samplings] * len(contexts)
        done = gather(contexts, how[: len(contexts)])
        again = open_forks(engine, *sizes)  # the first ones are finished texts of the same task now
        results.append(done + gather(again, how[: len(again)]))
    assert results[0] == results[1]
    counts = engine.draft_counts
    accepted = {name: n for name, n in counts.items() if name.startswith("drafts_accepted")}
    print(case, counts)
    assert sum(accepted.values()) > 0


def test_texts_of_a_burst() -> None:
    from test_drafts import request

    mine, other, alone = request([1, 2, 3]), request([1, 2, 4, 5]), request([9])
    mine.task = other.task = 7
    attempts = FinishedTexts(max_tokens=12)
    for tokens, version in (([1, 2, 8], 0), ([1, 2, 6], 1)):
        finished = request(tokens)
        finished.task, finished.version = 7, version
        attempts.add(finished)
    mine.version = 1
    texts = texts_of([mine, other, alone], attempts, num_peers=2, room=100)
    assert texts.texts.tolist() == [[1, 2, 3, -1], [1, 2, 4, 5], [9, -1, -1, -1]]
    assert texts.peers.tolist() == [[1, -1], [0, -1], [-1, -1]]
    assert texts.archive[:8].tolist() == [1, 2, 6, -1, 1, 2, 8, -1]
    assert texts.spans.tolist() == [[0, 8, 4], [0, 8, 4], [0, 0, 0]]
    for _ in range(9):
        attempts.add(request(list(range(5))))
        assert attempts.size <= 12
    assert attempts.of(7) == []
