"""A head in two shards gives the results and gradients of the whole head."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from graft.models import logprobs as module
from graft.models.logprobs import likeliest, score_actions
from graft.models.parallel.regions import enter, leave
from graft.models.parallel.vocabulary import (
    embed_rows,
    likeliest_sharded,
    score_sharded,
)
from graft.models.truncation import Truncation
from tests.processes import Processes


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    with Processes(2) as group:
        yield group


def mine(whole: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This process's rows (process 0 has one more if the count is odd) and the index of the first."""
    half = -(-len(whole) // 2)
    return whole.chunk(2)[dist.get_rank()].clone().requires_grad_(), half * dist.get_rank()


def worked() -> list[float]:
    weight, first = mine(torch.tensor([6.0, 2, 1, 3]).log()[:, None])
    hidden, modes = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
    group = dist.group.WORLD
    logp, entropy, vocab_logp = score_sharded(
        hidden, weight, first, group, torch.tensor([3]), modes, None, 1.0, 4
    )
    logp.sum().backward()
    return [x.item() for x in (logp, entropy, vocab_logp, *weight.grad)]


def test_the_worked_case_of_the_docstring(pair):
    here, there = pair.run(worked)
    values = [math.log(3 / 12), 1.198849, 0.0]
    assert here == pytest.approx([*values, -6 / 12, -2 / 12], abs=1e-6)
    assert there == pytest.approx([*values, -1 / 12, 1 - 3 / 12], abs=1e-6)


def compare(
    elements: int,
    vocab_size: int | None,
    temperature: float,
    has_mask: bool,
    truncation: Truncation | None = None,
) -> float:
    """The largest difference between a head of 17 rows and its shards of 9 and 8, at 11 positions."""
    module.CHUNK_ELEMENTS = elements
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, requires_grad=True)
    weight = torch.randn(17, 6, requires_grad=True)
    actions = torch.randint(0, 17, (11,))
    modes = torch.randint(0, 3, (11,))
    allowed = torch.rand(3, 17) > 0.4
    allowed[2, :9] = False  # nothing of the first shard may be drawn
    actions[modes == 2] = 12
    allowed[modes, actions] = True
    allowed = allowed if has_mask else None
    grads = torch.randn(3, 11)[: 2 if vocab_size is None else 3]
    how = modes, allowed, temperature, vocab_size
    want = score_actions(hidden, weight, actions, *how, truncation)
    wanted = torch.autograd.grad((torch.stack(want) * grads).sum(), (hidden, weight))
    shard, first = mine(weight.detach())
    group = dist.group.WORLD
    got = score_sharded(enter(hidden, group), shard, first, group, actions, *how, truncation)
    gotten = torch.autograd.grad((torch.stack(got) * grads).sum(), (hidden, shard))
    pairs = [
        *zip(got, want, strict=True),
        (gotten[0], wanted[0]),
        (gotten[1], wanted[1][first : first + len(shard)]),
    ]
    best = likeliest_sharded(hidden, shard, first, actions, modes, allowed, group)
    pairs += zip(
        best, likeliest(hidden, weight, actions, modes=modes, allowed=allowed), strict=True
    )
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("has_mask", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("vocab_size", [None, 13, 5], ids=["all", "13 tokens", "5 tokens"])
@pytest.mark.parametrize("elements", [1, 1 << 20], ids=["one row a chunk", "all at once"])
def test_shards_of_a_head_equal_the_whole_head(pair, elements, vocab_size, has_mask):
    assert (
        max(pair.run(compare, elements, vocab_size, 0.7, has_mask)) < 1e-5
    )  # gradients are up to 10: rounding


@pytest.mark.parametrize("cut", [Truncation(top_k=4), Truncation(top_p=0.7, min_p=0.05)])
def test_shards_find_the_same_truncated_distribution(pair, cut):
    assert max(pair.run(compare, 40, 13, 0.7, True, cut)) < 1e-5


def tie() -> list[bool]:
    weight, first = mine(torch.ones(4, 1))
    hidden, actions = torch.ones(4, 1), torch.arange(4)
    modes = torch.zeros_like(actions)
    return likeliest_sharded(hidden, weight, first, actions, modes, None, dist.group.WORLD)[
        1
    ].tolist()


def test_of_equally_likely_actions_the_first_is_the_likeliest(pair):
    assert pair.run(tie) == [[True, False, False, False]] * 2


def extremes(logits: list[float]) -> list[float]:
    """Action 1 leads token 0, the only one, by 200: its probability rounds to 0 in fp32."""
    weight, first = mine(torch.tensor(logits)[:, None])
    actions, group = torch.tensor([0]), dist.group.WORLD
    modes = torch.zeros_like(actions)
    logp, _, vocab_logp = score_sharded(
        torch.ones(1, 1), weight, first, group, actions, modes, None, 1.0, 1
    )
    (logp - vocab_logp).sum().backward()
    return [logp.item(), vocab_logp.item(), weight.grad.abs().sum().item()]


@pytest.mark.parametrize(
    "logits", [[0.0, 200.0], [0.0, 200.0, -9.0, -9.0]], ids=["elsewhere", "in the same process"]
)
def test_any_token_stays_finite_where_actions_have_all_the_mass(pair, logits):
    assert pair.run(extremes, logits) == [[-200.0, -200.0, 0.0]] * 2


def embedded() -> tuple[list, list]:
    weight, first = mine(torch.arange(10.0).view(5, 2))
    rows = embed_rows(torch.tensor([4, 0, 2, 4]), weight, first, dist.group.WORLD)
    rows.sum().backward()
    return rows.tolist(), weight.grad[:, 0].tolist()


def test_each_token_is_embedded_by_the_process_that_holds_its_row(pair):
    here, there = pair.run(embedded)
    assert here[0] == there[0] == [[8, 9], [0, 1], [4, 5], [8, 9]]
    assert here[1] + there[1] == [1, 0, 1, 0, 2]


def borders() -> tuple[float, float, float]:
    """y = (1 + 2) x: two processes with the factors 1 and 2."""
    x, group = torch.tensor([5.0], requires_grad=True), dist.group.WORLD
    factor = torch.tensor([1.0 + dist.get_rank()], requires_grad=True)
    y = leave(enter(x, group) * factor, group)
    (10 * y).sum().backward()
    return y.item(), x.grad.item(), factor.grad.item()


def test_a_region_sums_its_outputs_and_the_gradients_of_its_inputs(pair):
    assert pair.run(borders) == [(15.0, 30.0, 50.0)] * 2


def test_nothing_to_train_keeps_the_graph_connected():
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    found = score_actions(hidden, weight, torch.zeros(0, dtype=torch.long), vocab_size=3)
    assert [x.shape for x in found] == [(0,)] * 3
    found[0].sum().backward()
    assert float(weight.grad.abs().sum()) == 0.0 and hidden.grad.shape == (0, 8)
