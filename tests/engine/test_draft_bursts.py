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
    texts = texts_of([mine, other, alone], attempts, num_peers=2, room=100, width=3)
    assert texts.texts.tolist() == [[1, 2, 3], [2, 4, 5], [9, -1, -1]]
    assert texts.offsets.tolist() == [0, 1, 0]
    assert texts.peers.tolist() == [[1, -1], [0, -1], [-1, -1]]
    assert texts.archive[:8].tolist() == [1, 2, 6, -1, 1, 2, 8, -1]
    assert texts.spans.tolist() == [[0, 8, 4], [0, 8, 4], [8, 8, 8]]  # nothing of the last
    for _ in range(9):
        attempts.add(request(list(range(5))))
        assert attempts.size <= 12
    assert attempts.of(7) == []


def draft_state(texts: list[list[int]], extra: int, device: torch.device) -> Any:
    from graft.engine.native.cuda.kernels.drafts import PEERS, DraftState

    rows = len(texts)
    padded = torch.zeros(rows, 32, dtype=torch.int32)
    for row, tokens in enumerate(texts):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    archive = torch.tensor([4, 5, 6, 9, 9, -1] + [-1] * 12, dtype=torch.int32)

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DraftState(
        texts=padded.to(device),
        offsets=zeros(rows),
        peers=zeros(rows, PEERS) - 1,
        archive=archive.to(device),
        spans=zeros(rows, 3),
        best=zeros(rows, dtype=torch.int64),
        fed=zeros(extra, dtype=torch.int64),
        counts=zeros(rows, 6),
    )


def test_drafts_are_found_shared_out_and_accepted_on_the_device(device: torch.device) -> None:
    """Row 0 repeats itself, row 1 matches its archive, row 2 is over; then draws are made up."""
    from graft.engine.native.cuda.kernels.drafts import accept, propose
    from graft.engine.native.cuda.kernels.draw import FIELDS, DrawField

    base, extra = 3, 6
    texts = [[1, 2, 3, 8, 1, 2, 3], [7, 4, 5, 6], [1, 2, 3, 1, 2, 3]]
    draft = draft_state(texts, extra, device)
    draft.spans[1] = torch.tensor([0, 6, 0], dtype=torch.int32)  # all of it under earlier weights
    state = torch.zeros(FIELDS, base + extra, dtype=torch.int64)
    for row, tokens in enumerate(texts):
        state[DrawField.TOKEN, row] = tokens[-1]
        state[DrawField.POSITION, row] = len(tokens) - 1
        state[DrawField.LENGTH, row] = len(tokens) if row < 2 else 0
        state[DrawField.BUDGET, row], state[DrawField.KEY, row] = 9, 100 + row
        state[DrawField.DRAWN, row] = 1
    state = state.to(device)
    table = torch.arange((base + extra) * 2, dtype=torch.int32, device=device).view(-1, 2)
    ones = [torch.full((base + extra,), 1.0 + n, device=device) for n in range(2)]
    plain = torch.ones(base + extra, dtype=torch.int32, device=device)
    cuts = torch.zeros(3, base + extra, device=device)
    stops = torch.full((base + extra, 1), 77, dtype=torch.int32, device=device)
    propose(draft, state, table, (*ones, plain, cuts, stops), 16, 50)
    # 3 tokens match in both, so both ask for min(3 * level^2 / 8, 8): 3 each fit at level 3
    assert draft.fed.tolist() == [8, 1, 2, 9, 9, -1]
    rows = state[:, base:].cpu()
    assert rows[DrawField.POSITION].tolist()[:5] == [7, 8, 9, 4, 5]
    assert rows[DrawField.LENGTH].tolist() == [8, 9, 10, 5, 6, 0]
    assert rows[DrawField.DRAWN].tolist()[:5] == [2, 3, 4, 2, 3]
    assert rows[DrawField.KEY].tolist()[:5] == [100, 100, 100, 101, 101]
    assert table[base : base + 5, 0].tolist() == [0, 0, 0, 2, 2]  # pages of the rows they belong to

    before = state[:, :base].clone()
    results = torch.zeros(3, 16, base + extra, device=device)
    draws = {0: 8, 3: 1, 4: 30, 5: 31, 1: 20, 6: 9, 7: 9}  # row 0 right twice, row 1 never
    for row, token in draws.items():
        at = int(state[DrawField.DRAWN, row])
        results[0, at, row], results[1, at, row] = token, -float(row)
        state[DrawField.TOKEN, row] = token
        for field in (DrawField.POSITION, DrawField.LENGTH, DrawField.DRAWN):
            state[field, row] += 1
    accept(draft, state, before, results)
    assert results[0, 1:4, 0].tolist() == [8, 1, 30] and results[1, 1:4, 0].tolist() == [0, -3, -4]
    assert results[0, 1, 1] == 20
    assert state[DrawField.TOKEN, :2].tolist() == [30, 20]
    assert state[DrawField.POSITION, :2].tolist() == [9, 4]
    assert state[DrawField.DRAWN, :2].tolist() == [4, 2]
    assert draft.texts[0, :10].tolist() == [*texts[0], 8, 1, 30]
    assert draft.texts[1, :5].tolist() == [*texts[1], 20]
    # own, peers', earlier: proposed, then accepted
    assert draft.counts.tolist() == [[3, 0, 0, 2, 0, 0], [0, 0, 2, 0, 0, 0], [0] * 6]
