"""Attention over a packed forest by the kernel, against a dense masked softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from graft.models.tree.attention import TreeAttention, attention_over
from graft.models.tree.block_lists import BlockLists
from graft.models.tree.packing import interval_mask

pytest.importorskip("triton")

from graft.models.kernels import interval
from graft.models.kernels.interval import interval_attention


def tree(rng: np.random.Generator, longest: int, depth: int = 0) -> list[int]:
    """`ends` of a random tree of ragged spans, counted from its first row."""
    own = int(rng.integers(1, longest + 1))
    children: list[list[int]] = []
    if depth < 3 and rng.random() < 0.7:
        children = [tree(rng, longest, depth + 1) for _ in range(rng.integers(1, 4))]
    ends = [own + sum(map(len, children))] * own
    for child in children:
        ends += [len(ends) + end for end in child]
    return ends


def forest(length: int, longest: int, seed: int = 0) -> Tensor:
    """Random trees one after another, cut off at `length` rows."""
    rng = np.random.default_rng(seed)
    ends: list[int] = []
    while len(ends) < length:
        ends += [len(ends) + end for end in tree(rng, longest)]
    return torch.tensor(ends[:length]).clamp(max=length)


def samples(prompt: int, answer: int, count: int) -> Tensor:
    """One prompt and `count` answers to it."""
    total = prompt + answer * count
    stops = prompt + answer * (torch.arange(count) + 1)
    return torch.cat([torch.full((prompt,), total), stops.repeat_interleave(answer)])


FORESTS = {
    "one token": forest(1, 1),
    "exactly two blocks": forest(128, 40),
    "one row behind a block": forest(65, 30),
    "a chain": torch.full((70,), 70),
    "tiny trees": forest(100, 2),
    "ragged trees": forest(140, 40, seed=1),
    "samples of one prompt": samples(66, 20, 3),
}


def dense(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    score = torch.einsum("ihd,jhd->hij", q.double(), k) * q.shape[-1] ** -0.5
    score = score.masked_fill(~interval_mask(ends).to(q.device), float("-inf"))
    return torch.einsum("hij,jhd->ihd", score.softmax(-1), v)


def inputs(length: int, heads: int, kv_heads: int, size: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(length, h, size, device=device) for h in (heads, kv_heads, kv_heads)]


def results(attend, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_as_dense(
    ends: Tensor, tensors: list[Tensor], grad: Tensor | None = None, close: float = 2e-5
) -> None:
    blocks = BlockLists.of(ends, tensors[0].device)
    grad = torch.randn_like(tensors[0]) if grad is None else grad
    got = results(lambda q, k, v: interval_attention(q, k, v, blocks), tensors, grad)
    want = results(lambda q, k, v: dense(q, k, v, ends), tensors, grad)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=close, rtol=close)


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "size"),
    [
        ("one token", 2, 1, 64),
        pytest.param("exactly two blocks", 2, 2, 128, marks=pytest.mark.slow),
        ("one row behind a block", 4, 1, 32),
        ("a chain", 3, 1, 16),
        pytest.param("tiny trees", 8, 1, 16, marks=pytest.mark.slow),
        ("ragged trees", 2, 1, 64),
        ("samples of one prompt", 1, 1, 80),
        ("one row behind a block", 1, 1, 256),
    ],
)
@pytest.mark.usefixtures("poison")
def test_output_and_gradients_are_those_of_a_dense_softmax(
    name: str, heads: int, kv_heads: int, size: int, kernel_device: torch.device
):
    ends = FORESTS[name]
    assert_as_dense(ends, inputs(len(ends), heads, kv_heads, size, kernel_device))


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "size"),
    [("ragged trees", 2, 2, 128), ("samples of one prompt", 2, 1, 64)],
)
@pytest.mark.usefixtures("poison")
def test_bfloat16_is_as_close_as_its_rounding(
    name: str, heads: int, kv_heads: int, size: int, kernel_device: torch.device
):
    ends = FORESTS[name]
    tensors = [x.bfloat16() for x in inputs(len(ends), heads, kv_heads, size, kernel_device)]
    assert_as_dense(ends, tensors, close=3e-2)


def test_a_list_split_into_pieces_adds_up(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("graft.models.tree.block_lists.MIN_PIECE", 1)
    ends = samples(70, 40, 3)
    blocks = BlockLists.of(ends, kernel_device)
    assert blocks.num_slots > 2 and len(blocks.splits) > 1
    assert_as_dense(ends, inputs(len(ends), 1, 1, 32, kernel_device))


def test_slices_of_one_projection_and_an_expanded_gradient_are_taken(kernel_device: torch.device):
    ends = forest(70, 20)
    qkv = torch.cat(inputs(70, 2, 1, 16, kernel_device), 1)
    slices = list(qkv.split([2, 1, 1], 1))
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in slices]
    for tensors in (slices, heads_first):
        grad = torch.ones(1, 1, 1, device=kernel_device).expand_as(tensors[0])
        assert_as_dense(ends, tensors, grad)


def test_a_head_too_large_is_refused(kernel_device: torch.device):
    blocks = BlockLists.of(forest(5, 3), kernel_device)
    with pytest.raises(ValueError, match="head size 264"):
        q, k, v = inputs(5, 1, 1, 264, kernel_device)
        interval_attention(q, k, v, blocks)


def walked(items: Tensor, lists: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[blocks, blocks] how often each pair is walked, and how often without a mask."""
    times, bare = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for block, begin, middle, stop, *_ in items.tolist():
        times[block].index_add_(0, lists[begin:stop].long(), torch.ones(stop - begin).long())
        bare[block].index_add_(0, lists[begin:middle].long(), torch.ones(middle - begin).long())
    return times, bare


@pytest.mark.parametrize("name", list(FORESTS))
@pytest.mark.parametrize("min_piece", [1, 16])
def test_blocks_hold_each_pair_with_a_visible_key_once(
    name: str, min_piece: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("graft.models.tree.block_lists.MIN_PIECE", min_piece)
    ends = FORESTS[name]
    blocks = BlockLists.of(ends, torch.device("cpu"))
    assert blocks.ends.tolist() == ends.tolist()
    mask = interval_mask(ends)
    for keys in (interval.KEYS, interval.HELD_KEYS):
        height, width = -(-len(ends) // interval.QUERIES), -(-len(ends) // keys)
        padded = torch.zeros(height * interval.QUERIES, width * keys, dtype=torch.bool)
        padded[: len(ends), : len(ends)] = mask
        tiles = padded.view(height, interval.QUERIES, width, keys)
        some, every = tiles.any(3).any(1), tiles.all(3).all(1)
        if keys == interval.KEYS:
            times, bare = walked(blocks.query_items, blocks.query_lists, (height, width))
            assert torch.equal(times, some.long()) and torch.equal(bare, every.long())
        if keys == interval.HELD_KEYS:
            times, bare = walked(blocks.key_items, blocks.key_lists, (width, height))
            assert torch.equal(times, some.T.long()) and torch.equal(bare, every.T.long())


def test_every_slot_is_written_once_and_read_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("graft.models.tree.block_lists.MIN_PIECE", 2)
    blocks = BlockLists.of(samples(200, 90, 8), torch.device("cpu"))
    written = {int(item[4]): int(item[0]) for item in blocks.key_items if item[4] >= 0}
    assert sorted(written) == list(range(blocks.num_slots))
    read = {slot: block for block, a, b in blocks.splits.tolist() for slot in range(a, b)}
    assert read == written


def test_long_lists_are_launched_first():
    blocks = BlockLists.of(samples(640, 64, 40), torch.device("cpu"))
    length = blocks.key_items[:, 3] - blocks.key_items[:, 1]
    assert length[0] == length.max() and length[-1] < length.float().mean()


def test_without_a_gpu_the_forest_is_attended_run_by_run():
    attend = attention_over([], torch.zeros(0).long(), 4, 2, torch.device("cpu"))
    assert isinstance(attend, TreeAttention)


def test_where_kernels_run_they_attend(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("graft.models.tree.attention.has_kernels", lambda device: True)
    ends = forest(40, 10)
    attend = attention_over([], ends, 2, 1, kernel_device)
    q, k, v = inputs(40, 2, 1, 16, kernel_device)
    want = dense(q, k, v, ends).float()
    torch.testing.assert_close(attend(0, q, k, v), want, atol=1e-5, rtol=1e-5)
