"""The GPU's order of adding: decoding, prompts and the learner have the same bits.

The kernels run on the GPU, or in Triton's interpreter.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from burst_kit import engine_on, open_forks, small_decoder
from engine_kit import VOCAB, prompt, sample_all
from test_bits import Trees, num_unequal

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.models.decoder import Decoder
from graft.models.kv_slots import quantise, round_rows
from graft.models.order_probe import find_order
from graft.models.row_order import NEVER, RowOrder
from graft.models.shape import Experts
from graft.models.tree.forest import Forest
from graft.models.tree.packing import TokenRun
from graft.models.tree.path_blocks import BLOCK, SEGMENT, PathBlocks
from graft.rollout.batching import to_batch
from graft.structure import Structure
from graft.text.tokenizer import FastTokenizer
from graft.types import Author, Episode, Leaf, Sampling, Span, Task, Trajectory

pytest.importorskip("triton")

import itertools

from graft.engine.native.cuda.kernels.decode import scratch
from graft.engine.native.cuda.kernels.segments import decode_segments
from graft.engine.native.kv import segment_sharing
from graft.engine.native.kv.segment_sharing import num_segments, share_segments
from graft.models.kernels.fixed_product import Tile
from graft.models.kernels.path_attention import attend_pages, path_attention
from graft.models.tree.block_lists import BlockLists

SPAN = BLOCK * SEGMENT

KERNEL_USERS = "ops", "decoder", "layers.chunks", "layers.experts", "logprobs", "tree.attention"


def skip_on_gpu(rounds: bool, device: torch.device) -> None:
    """Leave out keys and values in eight bits where runs refuse them."""
    if rounds and device.type == "cuda":
        pytest.skip("attention over codes has other bits on a GPU, where engine.kv: fp8 is refused")


class Fork:
    """A prompt and two answers, packed for the learner and in pages of the engine; with a window heads have
    sinks too. `rounds`: the engine stores keys and values in eight bits, and the learner rounds them."""

    def __init__(
        self,
        start: int,
        answers: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int = 0,
        rounds: bool = False,
    ) -> None:
        self.start = start
        stops = [start + answers * n for n in range(3)]
        self.runs = [TokenRun(0, start, [])]
        self.runs += [TokenRun(a, b, [(0, start)]) for a, b in itertools.pairwise(stops)]
        ends = [stops[2]] * start + [stops[1]] * answers + [stops[2]] * answers
        torch.manual_seed(0)
        q, k, v = (torch.randn(len(ends), heads, 16).to(device, dtype) for heads in (2, 1, 1))
        path = PathBlocks.of(self.runs, device)
        blocks = BlockLists.of(torch.tensor(ends), device, window, self.runs)
        self.sinks = torch.randn(2).to(device, dtype) if window else None
        of_learner = (round_rows(k), round_rows(v)) if rounds else (k, v)
        self.learner = path_attention(q, *of_learner, path, blocks, self.sinks)
        self.q, self.length = q, start + answers
        self.rows = [[*range(start), *range(run.start, run.stop)] for run in self.runs[1:]]
        shared = start // BLOCK
        own = -(-self.length // BLOCK) - shared
        table = [
            [*range(1, shared + 1), *range(first, first + own)]
            for first in (shared + 1, shared + 1 + own)
        ]
        self.table = np.array(table, dtype=np.int64)
        # what is not written is any finite number
        self.pool = torch.full((2, self.table.max() + 1, 1, BLOCK, 16), 1e4).to(device, dtype)
        self.scales = (None, None)
        for rows, pages in zip(self.rows, self.table, strict=True):
            for index, tensor in enumerate((k, v)):
                for position, row in enumerate(rows):
                    page = self.pool[index, pages[position // BLOCK]]
                    page[:, position % BLOCK] = tensor[row]
        if rounds:
            self.pool, scales = quantise(self.pool)
            self.scales = scales.unbind(0)


fork_of = functools.cache(Fork)
"""The learner's attention takes seconds in the interpreter; tests only read it."""


@pytest.mark.parametrize(("splits", "tail_rows"), [(1, 1), (2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize(
    ("dtype", "window"),
    [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 9), (torch.bfloat16, 150)],
)
@pytest.mark.parametrize("rounds", [False, True])
def test_decoding_has_the_learners_bits(
    rounds: bool,
    dtype: torch.dtype,
    window: int,
    splits: int,
    tail_rows: int,
    kernel_device: torch.device,
) -> None:
    """Two rows at different positions, a shared segment and tails; and a row that is over."""
    skip_on_gpu(rounds, kernel_device)
    if rounds and splits != tail_rows:
        pytest.skip("the work is spread as without rounding")
    fork = fork_of(SPAN + 10, 70, dtype, kernel_device, window, rounds)
    ends = [fork.length, SPAN + 30]
    table = np.concatenate([fork.table, fork.table[:1]])
    sharing = share_segments(table[:2], np.array(ends), group=2, kv_heads=1)
    assert not len(sharing.items)  # a segment of two rows is not worth it; here it is shared
    items = np.array([[0, 2, 0, 1, SEGMENT]])
    lengths = torch.tensor([*ends, 0], device=kernel_device)
    tails = torch.tensor([1, 1, 0], device=kernel_device)
    last = [rows[end - 1] for rows, end in zip(fork.rows, ends, strict=True)]
    q = fork.q[torch.tensor([*last, 0], device=kernel_device)]
    slots = num_segments(fork.length)
    space = scratch(3, slots, 2, 16, kernel_device)
    for buffer in space:
        buffer.fill_(torch.nan)
    found = decode_segments(
        q,
        *fork.pool,
        torch.tensor(table, dtype=torch.int32, device=kernel_device),
        lengths,
        tails,
        torch.tensor(items, dtype=torch.int32, device=kernel_device),
        splits=splits,
        slots=slots,
        tile_rows=sharing.tile_rows,
        tail_rows=tail_rows,
        space=space,
        window=window,
        sinks=fork.sinks,
        scales=fork.scales,
    )
    assert slots == 2 and torch.equal(found[:2], fork.learner[last])


@pytest.mark.parametrize(
    ("start", "answers", "ends", "shared", "window"),
    [
        (SPAN - 10, 40, (40, 40), 3, 0),  # a page each in the segment, and one in the next
        (BLOCK + 5, 150, (150, 3), 1, 0),  # three pages and one
        (2 * BLOCK, 60, (60, 0), 2, 0),  # one row is over
        (3 * BLOCK + 1, 400, (400, 130), 3, 0),  # and two more segments
        (SPAN - 10, 40, (40, 25), 3, 70),  # shared pages are outside, and for one row all of a page
        (BLOCK + 5, 150, (150, 3), 1, 30),  # one row sees a shared page, one does not
        (3 * BLOCK + 1, 400, (400, 130), 3, 200),  # one row sees nothing of the first segment
    ],
)
@pytest.mark.parametrize(("splits", "tail_rows"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_segment_that_siblings_begin_together_has_the_learners_bits(
    start: int, answers: int, ends: tuple[int, int], shared: int, window: int, splits: int,
    tail_rows: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The shared pages of the first segment for both rows, then the pages of each."""
    monkeypatch.setattr(segment_sharing, "PROGRAMS", 1)
    fork = fork_of(start, answers, torch.bfloat16, kernel_device, window)
    lengths = np.array([start + end if end else 0 for end in ends])
    sharing = share_segments(fork.table, lengths, group=2, kv_heads=1)
    assert (sharing.items.tolist(), sharing.tails.tolist()) == ([[0, 2, 0, 1, shared]], [1, 1])
    slots = num_segments(fork.length)
    space = scratch(2, slots, 2, 16, kernel_device)
    for buffer in space:
        buffer.fill_(torch.nan)
    last = [rows[start + max(end, 1) - 1] for rows, end in zip(fork.rows, ends, strict=True)]
    found = decode_segments(
        fork.q[torch.tensor(last, device=kernel_device)],
        *fork.pool,
        torch.tensor(fork.table, dtype=torch.int32, device=kernel_device),
        torch.tensor(lengths, device=kernel_device),
        torch.tensor(sharing.tails, device=kernel_device),
        torch.tensor(sharing.items, dtype=torch.int32, device=kernel_device),
        splits=splits,
        slots=slots,
        tile_rows=sharing.tile_rows,
        tail_rows=tail_rows,
        space=space,
        window=window,
        sinks=fork.sinks,
        scales=fork.scales,
    )
    for row, end in enumerate(ends):
        assert not end or torch.equal(found[row], fork.learner[last[row]])


@pytest.mark.parametrize(("window", "rounds"), [(0, False), (9, False), (150, False), (9, True)])
def test_prompts_in_pages_have_the_learners_bits(
    window: int, rounds: bool, kernel_device: torch.device
) -> None:
    """The answers' tokens in two pieces, which begin where no tile of the learner does."""
    skip_on_gpu(rounds, kernel_device)
    fork = Fork(SPAN - 30, 60, torch.float32, kernel_device, window, rounds)
    pieces = [
        (row, start, start + 30) for row in (0, 1) for start in range(fork.start, fork.length, 30)
    ]
    tiles = [[n * 30, 30, start, row] for n, (row, start, _) in enumerate(pieces)]
    tokens = [token for row, start, stop in pieces for token in fork.rows[row][start:stop]]
    found = attend_pages(
        fork.q[torch.tensor(tokens, device=kernel_device)],
        *fork.pool,
        torch.tensor(fork.table, dtype=torch.int32, device=kernel_device),
        torch.tensor(tiles, dtype=torch.int32, device=kernel_device),
        window,
        fork.sinks,
        fork.scales,
    )
    assert torch.equal(found, fork.learner[tokens])


def in_order(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, rounds_kv: bool = False, **changes: Any
) -> Decoder:
    """A decoder as `model.exact` makes it; in the interpreter all products are our own."""
    decoder = small_decoder(**changes)
    skip_on_gpu(rounds_kv, device)
    if rounds_kv:
        decoder.round_kv()
    torch.manual_seed(1)
    for weight in decoder.parameters():
        if weight.ndim == 1:  # biases and sinks begin as 0
            weight.data += 0.3 * torch.randn_like(weight)
    if device.type == "cuda":
        decoder = decoder.to(device, torch.bfloat16)
        order = find_order(decoder)
        assert order is not None, "products with these shapes depend on the number of rows"
    else:
        for module in KERNEL_USERS:
            monkeypatch.setattr(f"graft.models.{module}.has_kernels", lambda _: True)
        one_tile = Tile(64, 32, 64, 4, 3)  # numpy adds in another order in others, unlike the GPU
        monkeypatch.setattr("graft.models.kernels.fixed_product.tile_of", lambda *_: one_tile)
        weights = [weight for weight in decoder.parameters() if weight.ndim == 2]
        order = RowOrder(fixed={(len(w), w.shape[1]): NEVER for w in weights}, gate_rows=512)
    decoder.use_order(order)
    return decoder


def grow(
    decoder: Decoder, seed: int, trees: int, longest: int, grammar: Any = None, **options: Any
):
    engine = engine_on(decoder.device, decoder=decoder, page_size=BLOCK, **options)
    rng = random.Random(seed)
    rows = Trees(engine, {"temperature": 0.7}, rng, longest, grammar).grow(trees)
    return engine, rows, rng


def answered(
    decoder: Decoder, length: int, forks: int, sampling: Sampling, **options: Any
) -> list[Trajectory]:
    """Answers to one prompt, sampled by an engine with kernels."""
    engine = engine_on(decoder.device, decoder=decoder, page_size=BLOCK, **options)
    episode = Episode(Task("0", "test"))
    root = episode.append(Span(None, Author.TASK, prompt(length)))
    for done in sample_all(open_forks(engine, (length, forks)), sampling):
        episode.leaves.append(Leaf((episode.append(Span.sampled(root, done)),)))
    return list(episode.trajectories())


GEMMA = {
    "family": "gemma3_text",
    "layers": 2,
    "windows": (3, 0),
    "local_theta": 100.0,
    "query_scale": 0.7,
    "activation": "gelu_tanh",
    "norm_offset": True,
    "sandwich": True,
    "scales_embedding": True,
}
OLMOE = {"family": "olmoe", "joint_norm": True, "experts": Experts(4, 2, 16)}
GRANITE = {
    "family": "granitemoe",
    "experts": Experts(4, 2, 16, renormalise=True),
    "qk_norm": False,
    "query_scale": 0.3,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "logits_divisor": 6.0,
}
GPT_OSS = {
    "family": "gpt_oss",
    "layers": 2,
    "experts": Experts(4, 2, 16, renormalise=True, biased=True, swiglu_limit=0.5),
    "sinks": True,
    "windows": (3, 0),
    "qk_norm": False,
    "qkv_bias": True,
    "out_bias": True,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rounds_kv": True},
        {"family": "mistral", "qk_norm": False, "windows": (2,), "rotary_share": 0.5},
        GEMMA,
        OLMOE,
        GRANITE,
        GPT_OSS,
    ],
)
def test_the_log_probs_of_forks_have_the_learners_bits(
    changes: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding to log-prob in kernels; entropies too."""
    decoder = in_order(monkeypatch, device, width=16, ff=16, **changes)
    rows = answered(decoder, 3, 2, Sampling(temperature=0.7, max_tokens=2))
    batch = to_batch(rows)
    with torch.no_grad():
        found = Forest(rows, batch.mask, device).logprobs(decoder, 0.7)
    for mine, its in zip(found, (batch.logprobs, batch.entropies), strict=True):
        assert torch.equal(mine.cpu()[batch.mask], its[batch.mask])


def test_structured_answers_have_the_learners_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at once, whose rows are found on several threads, in a vocabulary of whole words of bits."""
    letters = FastTokenizer.characters('0123456789{}":, namopqrstuvwx')
    assert letters.vocab_size == 32
    decoder = in_order(monkeypatch, device, width=16, ff=16, vocab_size=32)
    how = Sampling(max_tokens=4, structure=Structure.regex("[0-9]+(, [nam]+)*"))
    rows = answered(decoder, 3, 4, how, tokenizer=letters, eos_ids=letters.eos_ids)
    assert all(span.masks for row in rows for span in row.spans if span.author is Author.POLICY)
    unequal, total = num_unequal(decoder, rows, random.Random(0))
    assert unequal == 0 and total > 4


@pytest.mark.slow
@pytest.mark.parametrize("rounds_kv", [False, True])
def test_the_log_probs_of_a_tree_have_the_learners_bits(
    rounds_kv: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks, tool results, preemption; micro-batches of other rows."""
    decoder = in_order(monkeypatch, device, rounds_kv)
    engine, rows, rng = grow(decoder, 0, trees=1, longest=6, kv_tokens=BLOCK * 5, max_running=3)
    unequal, total = num_unequal(decoder, rows, rng, temperature=0.7)
    assert engine.stats["preemptions"] + engine.stats["evictions"] > 0
    assert (unequal, total > 20) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(), (100,)])
def test_the_log_probs_of_long_paths_have_the_learners_bits(
    windows: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more than a segment, so that segments are shared, and a page of the tails after them; with
    a window the first segment's pages are released."""
    monkeypatch.setattr(segment_sharing, "PROGRAMS", 1)
    decoder = in_order(monkeypatch, device, windows=windows)
    rows = answered(decoder, 2 * SPAN + BLOCK + 30, 3, Sampling(max_tokens=3), kv_tokens=4096)
    assert num_unequal(decoder, rows, random.Random(0)) == (0, 9)


@pytest.mark.slow
def test_masked_actions_have_the_learners_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = in_order(monkeypatch, device, extra=3, vocab_size=VOCAB)
    table = torch.zeros(2, VOCAB + 3, dtype=torch.bool)
    table[0] = table[1, [2, 3, 5]] = True
    space = ActionSpace(VOCAB, 3, table.numpy())
    writes = {(0, VOCAB): (3, 4), (0, VOCAB + 1): (5,), (0, VOCAB + 2): (6, 7, 8)}
    grammar = Automaton(1, {(0, 7): 1, (1, 2): 0}, writes=writes)
    _, rows, rng = grow(decoder, 4, trees=2, longest=8, grammar=grammar, space=space)
    allowed = torch.zeros(2, decoder.shape.head_rows, dtype=torch.bool)
    allowed[:, : VOCAB + 3] = table
    allowed = allowed.to(device)
    unequal, total = num_unequal(decoder, rows, rng, temperature=0.7, allowed=allowed)
    modes = {mode for row in rows for span in row.spans for mode in span.modes}
    assert (unequal, modes) == (0, {0, 1}) and total > 20


def test_pages_of_another_size_are_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"page_size=16, but with model.exact .* of 64"):
        engine_on(device, decoder=in_order(monkeypatch, device), page_size=16)
