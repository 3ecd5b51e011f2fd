"""ARPO and AEPO by hand: what a shared token weighs, what an unsure one earns, what clipping leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.algos.credits.credit import chain
from graft.algos.credits.groups import grpo
from graft.algos.credits.returns import reinforce
from graft.algos.credits.scaling import entropy_aware
from graft.algos.credits.trees import share_over_spans
from graft.algos.losses.clipped import balanced_clip, clip
from graft.algos.presets import PRESETS, build
from graft.algos.reductions import token, unique_tokens
from graft.rollout.batching import to_batch, trajectories_of
from graft.types import Author, Episode, Leaf, Span, Task
from tests.trees import random_tree

NAN = float("nan")


def check(got, want, atol=1e-5):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), atol=atol, rtol=0)


def step(loss, logp, batch):
    """loss_NT, metrics, d sum(loss) / d logp."""
    logp = logp.clone().requires_grad_()
    loss_NT, metrics = loss(logp, torch.zeros_like(logp), batch)
    loss_NT.sum().backward()
    assert logp.grad is not None
    return loss_NT.detach(), metrics, logp.grad


# low 0.2, high 0.3, dual 3; the gradient on the log-prob is -A * factor
REGIONS = {  # what happened: (A, ratio, factor, factor of plain clip)
    "good and beyond the upper bound": (1.0, 1.5, 1.3, 0.0),
    "good and far beyond it": (2.0, 400.0, 1.3, 0.0),
    "good and within": (1.0, 1.1, 1.1, 1.1),
    "good and below the lower bound": (1.0, 0.5, 0.5, 0.5),
    "bad and below the lower bound": (-1.0, 0.5, 0.0, 0.0),
    "bad and within": (-1.0, 0.9, 0.9, 0.9),
    "bad and beyond the upper bound": (-1.0, 1.5, 1.5, 1.5),
    "bad and short of the dual bound": (-2.0, 2.9, 2.9, 2.9),
    "bad and beyond the dual bound": (-2.0, 3.1, 0.0, 0.0),
    "neither": (0.0, 1.5, 1.3, 0.0),
}


def moved(toy_batch, advantages, ratios, **changes):
    """The old policy gave every token log-prob -2; the present one moved by these ratios."""
    old = torch.full((1, len(ratios)), -2.0)
    batch = toy_batch(advantages=[advantages], old_logprobs=old, **changes)
    return old + torch.tensor([ratios]).log(), batch


@pytest.mark.parametrize("region", REGIONS)
def test_the_gradient_of_balanced_clip_in_each_region(toy_batch, region):
    advantage, ratio, factor, plain = REGIONS[region]
    logp, batch = moved(toy_batch, [advantage], [ratio])
    check(step(balanced_clip(0.2, 0.3, 3.0), logp, batch)[2], [[-advantage * factor]])
    check(step(clip(0.2, 0.3, 3.0), logp, batch)[2], [[-advantage * plain]])


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 4.0)])
def test_balanced_clip_has_the_value_and_the_metrics_of_clip_to_the_bit(toy_batch, low, high, dual):
    if dual is not None and dual <= 1 + high:
        dual = 1.5 + high
    generator = torch.Generator().manual_seed(0)
    old, adv = -torch.rand(8, 50, generator=generator), torch.randn(8, 50, generator=generator)
    mask = torch.rand(8, 50, generator=generator) < 0.8
    logp = old + torch.randn(8, 50, generator=generator)
    batch = toy_batch(advantages=adv, old_logprobs=old, mask=mask)
    balanced, metrics, grad = step(balanced_clip(low, high, dual), logp, batch)
    plain, plain_metrics, plain_grad = step(clip(low, high, dual), logp, batch)
    assert torch.equal(balanced, plain)
    assert metrics.keys() == plain_metrics.keys()
    for name, metric in metrics.items():
        assert torch.equal(metric, plain_metrics[name]) and not metric.requires_grad, name
    # the gradients differ at good tokens beyond the upper bound, which is what the metric counts
    rescued = metrics["clip_ratio/high_mean"].bool()
    assert rescued.any()
    torch.testing.assert_close(grad[~rescued], plain_grad[~rescued])
    torch.testing.assert_close(grad[rescued], -adv[rescued] * (1 + high))
    assert (plain_grad[rescued] == 0).all()


def test_on_the_upper_bound_itself_both_sides_agree(toy_batch):
    """With high = 0 a fresh batch lies on it: ratio 1, the gradient of reinforce."""
    batch = toy_batch(advantages=[[1.0, -2.0]])
    check(step(balanced_clip(0.0, 0.0), torch.tensor([[-1.0, -3.0]]), batch)[2], [[-1, 2]])


@pytest.mark.parametrize("far", [-1e4, -200.0, 200.0, 1e4])
def test_no_ratio_makes_balanced_clip_infinite(toy_batch, far):
    batch = toy_batch(advantages=[[1.0, -1.0, 0.0]], old_logprobs=[[-2.0] * 3])
    loss, _, grad = step(balanced_clip(), torch.full((1, 3), -2.0 + far), batch)
    assert loss.isfinite().all() and grad.isfinite().all()


def test_balanced_clip_refuses_what_clip_refuses():
    for make in (clip, balanced_clip):
        with pytest.raises(ValueError, match=r"low=1.5, high=0.2"):
            make(low=1.5)
        with pytest.raises(ValueError, match=r"dual=1.2 must be more than 1 [+] high = 1.2"):
            make(dual=1.2)


@pytest.mark.peer
def test_balanced_clip_against_the_formula_as_published(toy_batch):
    """L2 = -A clip(r, 1-l, (1+h)/sg(r) r); max with -A r; where A < 0, at most -3 A. In fp64."""
    generator = torch.Generator().manual_seed(1)
    old = -2 * torch.rand(6, 40, generator=generator)
    adv = torch.randn(6, 40, generator=generator)
    logp = old + 0.8 * torch.randn(6, 40, generator=generator)
    mask = torch.rand(6, 40, generator=generator) < 0.7
    batch = toy_batch(advantages=adv, old_logprobs=old, mask=mask)
    got, _, grad = step(balanced_clip(0.2, 0.2, 3.0), logp, batch)

    theirs = logp.double().requires_grad_()
    ratio, a = torch.exp(theirs - old.double()), adv.double()
    lower, upper = torch.full_like(ratio, 1 - 0.2), (1 + 0.2) / ratio.detach() * ratio
    larger = torch.max(-a * ratio, -a * torch.clamp(ratio, lower, upper))
    want = torch.where(a < 0, torch.min(larger, -a * 3.0), larger) * mask
    want.sum().backward()
    assert theirs.grad is not None
    torch.testing.assert_close(got.double(), want.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)
    a, r = a[mask], ratio.detach()[mask]
    for region in ((a > 0) & (r > 1.2), (a < 0) & (r < 0.8), (a < 0) & (r > 3)):
        assert region.sum() > 3, "every bound is crossed here"


def test_an_unsure_token_counts_more_and_a_sure_one_less(toy_batch):
    """Entropies 1, 3, 3, 5 (mean 3, population std sqrt 2): 1 -+ 0.5 * sqrt 2 at the ends."""
    batch = toy_batch(reward=[2, -1], entropies=[[1, 3], [3, 5]])
    got = chain(reinforce(), entropy_aware(0.5))(batch.zeros(), batch)
    half = 0.5 * math.sqrt(2)
    check(got, [[2 * (1 - half), 2], [-1, -(1 + half)]])


def test_entropies_outside_the_mask_do_not_count(toy_batch):
    """The rest of a description, an observation, NaN in padding: mean 1, std 0.5 are of the mask."""
    batch = toy_batch(
        reward=[-1, 1],
        entropies=[[0.5, 0.0, 9.0, 1.5], [1.5, 0.0, 0.5, NAN]],
        mask=[[1, 0, 0, 1], [1, 0, 1, 0]],
    )
    got = chain(reinforce(), entropy_aware(0.2))(batch.zeros(), batch)
    check(got, [[-0.8, 0, 0, -1.2], [1.2, 0, 0.8, 0]])


def test_the_entropy_term_acts_and_weight_zero_takes_it_away(toy_batch):
    """Whatever else the preset has, no switch elsewhere silences it."""
    batch = toy_batch(reward=[1, 0, 0], entropies=[[0.1, 2.0], [0.4, 0.3], [1.0, 0.0]])
    plain = grpo(unbiased=True)(batch.zeros(), batch)
    aware = build("aepo")[1](batch.zeros(), batch)
    assert PRESETS["aepo"].entropy_coef == 0
    assert ((aware - plain).abs() > 1e-2).all()
    assert aware[0, 1] > plain[0, 1] and aware[0, 0] < plain[0, 0]
    still = replace(
        PRESETS["aepo"], credit=(("grpo", {"unbiased": True}), ("entropy_aware", {"weight": 0.0}))
    )
    assert torch.equal(build(still)[1](batch.zeros(), batch), plain)


@pytest.mark.parametrize("entropy", [0.0, 0.1, 0.7])
def test_equal_entropies_change_nothing_to_the_bit(toy_batch, entropy):
    batch = toy_batch(reward=[0.3, -1, 4], entropies=[[entropy] * 7] * 3)
    plain = reinforce()(batch.zeros(), batch)
    assert torch.equal(entropy_aware(5.0)(plain, batch), plain)


def test_one_trained_token_has_nothing_to_be_compared_with(toy_batch):
    batch = toy_batch(reward=[3.0], entropies=[[1.0, 2.0]], mask=[[0, 1]])
    check(chain(reinforce(), entropy_aware())(batch.zeros(), batch), [[0, 3]], atol=0)


def test_the_docstring_case_of_entropy_aware(toy_batch):
    batch = toy_batch(reward=[-1], entropies=[[0.5, 1.5]])
    check(chain(reinforce(), entropy_aware())(batch.zeros(), batch), [[-0.8, -1.2]])


# rows 0 and 1 share span 7, of two tokens; then each has a span of its own
FORK = {"spans": [[7, 7, 8], [7, 7, 9], [5, 5, -1]], "mask": [[1, 1, 1], [1, 1, 1], [1, 1, 0]]}


def test_a_token_of_two_rows_counts_once(toy_batch):
    """Distinct: two of span 7, one of 8, one of 9, two of 5. Six, and 7's in halves."""
    weights = unique_tokens()(toy_batch(**FORK))
    half, whole = 1 / 12, 1 / 6
    check(weights, [[half, half, whole], [half, half, whole], [whole, whole, 0]], atol=1e-8)


def test_a_row_that_does_not_train_a_shared_token_does_not_count(toy_batch):
    """Row 1 was cut off and is masked: what it shares is row 0's alone."""
    batch = toy_batch(spans=FORK["spans"], mask=[[1, 0, 1], [0, 0, 0], [1, 1, 0]])
    check(unique_tokens()(batch), [[0.25, 0, 0.25], [0, 0, 0], [0.25, 0.25, 0]], atol=1e-8)


def test_the_docstring_case_of_unique_tokens(toy_batch):
    batch = toy_batch(spans=[[0, 1, 1], [0, -1, -1]], mask=[[1, 1, 1], [1, 0, 0]])
    check(unique_tokens()(batch), [[1 / 6, 1 / 3, 1 / 3], [1 / 6, 0, 0]], atol=1e-7)


def test_with_nothing_shared_unique_tokens_is_token_to_the_bit(toy_batch):
    spans = [[0, 0, 1, 1, 1, -1, -1], [2, 3, 3, 3, 4, 4, 4]]
    batch = toy_batch(spans=spans, mask=[[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1, 1]])
    assert torch.equal(unique_tokens()(batch), token()(batch))
    empty = toy_batch(mask=[[0, 0], [0, 0]])
    assert torch.equal(unique_tokens()(empty), torch.zeros(2, 2))


@settings(max_examples=30, deadline=None)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=3))
def test_every_distinct_token_of_a_forest_weighs_the_same(seeds):
    """Counted on the trees themselves: object by object, token by token."""
    rows = trajectories_of([random_tree(seed) for seed in seeds])
    batch = to_batch(rows)
    weights = unique_tokens()(batch)
    of_token: dict[tuple[int, int], float] = {}
    for n, row in enumerate(rows):
        column = 0
        for span in (s for s in row.spans if s.author is not Author.TASK):
            for place in range(len(span)):
                key, weight = (id(span), place), weights[n, column].item()
                column += 1
                if span.author is Author.POLICY:
                    of_token[key] = of_token.get(key, 0.0) + weight
                else:
                    assert weight == 0
    for weight in of_token.values():
        assert weight == pytest.approx(1 / len(of_token), rel=1e-5)
    if of_token:
        assert weights.sum().item() == pytest.approx(1, abs=1e-5)


def forked_context() -> Episode:
    """Two contexts with prompts of unlike length; the attempt forks in the second one.

    [1 2] 0 <- policy [5 6] 1, the first context of both; [1 2 3] 2 <- policy [7] 3, then [8] or [9 4]
    """
    episode = Episode(Task("t", "env"))
    parents: list[int | None] = [None, 0, None, 2, 3, 3]
    written = [[1, 2], [5, 6], [1, 2, 3], [7], [8], [9, 4]]
    for parent, tokens in zip(parents, written, strict=True):
        n = len(tokens)
        if parent is None:
            episode.append(Span(None, Author.TASK, tokens))
        else:
            choices = (tokens, [-0.5] * n, [0.1] * n, [0] * n, [True] * n)
            episode.append(Span(parent, Author.POLICY, tokens, *choices))
    episode.leaves = [Leaf((1, 4), reward=1.0), Leaf((1, 5), reward=0.0)]
    return episode


def test_attempts_that_share_a_whole_context_share_its_tokens():
    """Four rows: [5 6] twice, [7 8], [7 9 4]. Distinct: 5 6 7 8 9 4."""
    weights = unique_tokens()(to_batch(trajectories_of([forked_context()])))
    half, whole = 1 / 12, 1 / 6
    want = [[half, half, 0], [half, whole, 0], [half, half, 0], [half, whole, whole]]
    check(weights, want, atol=1e-8)


# three attempts, the first two share a token; advantages 1.1547, -0.5774, -0.5774
CELLS = torch.tensor([[0, 1], [0, 2], [3, 4]])  # the distinct token that stands in each cell
GOOD, BAD = 2 / math.sqrt(3), -1 / math.sqrt(3)


def gradient(toy_batch, credit, reduction, ratio=1.0):
    """d loss / d log-prob of each distinct token: a shared one is read by two rows."""
    batch = toy_batch(
        reward=[1, 0, 0], spans=[[7, 8], [7, 9], [5, 5]], old_logprobs=[[-2.0, -2.0]] * 3
    )
    batch = batch.replace(advantages=credit(batch.zeros(), batch))
    distinct = torch.full((5,), -2.0 + math.log(ratio), requires_grad=True)
    loss_NT, _ = clip(dual=3.0)(distinct[CELLS], torch.zeros(3, 2), batch)
    (loss_NT * reduction(batch)).sum().backward()
    assert distinct.grad is not None
    return distinct.grad


SOFT = grpo(unbiased=True)
HARD = chain(grpo(unbiased=True), share_over_spans())


def test_the_mean_row_by_row_is_soft_over_again_and_hard_counts_once(toy_batch):
    soft = gradient(toy_batch, SOFT, token())
    check(soft, [-(GOOD + BAD) / 6, -GOOD / 6, -BAD / 6, -BAD / 6, -BAD / 6])
    torch.testing.assert_close(gradient(toy_batch, HARD, token()), soft)  # d * mean = sum
    hard = gradient(toy_batch, HARD, unique_tokens())
    check(hard, [-(GOOD + BAD) / 2 / 5, -GOOD / 5, -BAD / 5, -BAD / 5, -BAD / 5])
    weighs = [grad[0].item() / grad[1].item() for grad in (soft, hard)]
    assert weighs == pytest.approx([1 / 2, 1 / 4]), "beside a token of its own, half of soft's"


def test_soft_and_mean_row_by_row_differ_where_clipping_acts(toy_batch):
    """Ratio 1.5: soft clips the good attempt and not the bad one; their mean, 0.2887, is clipped."""
    soft = gradient(toy_batch, SOFT, token(), ratio=1.5)
    assert soft[0].item() == pytest.approx(-BAD * 1.5 / 6, abs=1e-5)
    assert gradient(toy_batch, HARD, token(), ratio=1.5)[0].item() == 0


def grown(name, batch):
    """Advantages, weights and d loss / d logp of a preset on a batch, at ratio 1."""
    shape, credit, loss, reduce = build(name)
    batch = shape(batch)
    batch = batch.replace(advantages=credit(batch.zeros(), batch))
    logp = torch.full(batch.mask.shape, -1.0, requires_grad=True)
    weights = reduce(batch)
    (loss(logp, torch.zeros_like(logp), batch)[0] * weights).sum().backward()
    assert logp.grad is not None
    return batch.advantages, weights, logp.grad


def test_the_presets_on_two_attempts_that_share_a_token(toy_batch):
    batch = toy_batch(reward=[1, 0, 0], spans=[[7, 8], [7, 9], [5, 5]])
    soft, hard = grown("arpo", batch)[2], grown("arpo_hard", batch)[2]
    check(soft, [[-GOOD / 6] * 2, [-BAD / 6] * 2, [-BAD / 6] * 2])
    shared = (GOOD + BAD) / 2 / 2
    check(hard, [[-shared / 5, -GOOD / 5], [-shared / 5, -BAD / 5], [-BAD / 5] * 2])


def test_without_shared_policy_spans_hard_is_soft_to_the_bit(toy_batch):
    batch = toy_batch(
        reward=[1, 0.25, 0, 0.1, 0.3],
        group=[0, 0, 0, 1, 1],
        spans=[[0, 0, 1, 2], [3, 4, 5, -1], [6, 7, 7, 7], [8, 8, 8, 8], [9, 9, 9, -1]],
        mask=[[1, 1, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]],
    )
    for soft, hard in zip(grown("arpo", batch), grown("arpo_hard", batch), strict=True):
        assert torch.equal(soft, hard)


def test_rows_that_share_only_an_observation_share_nothing_that_is_trained(toy_batch):
    """Two attempts wrote span 1 and 3 of their own behind one observation, span 0."""
    batch = toy_batch(reward=[1, 0], spans=[[0, 1], [0, 3]], mask=[[0, 1], [0, 1]])
    for soft, hard in zip(grown("arpo", batch), grown("arpo_hard", batch), strict=True):
        assert torch.equal(soft, hard)


def test_where_nothing_forks_arpo_is_grpo_with_a_token_mean(toy_batch):
    batch = toy_batch(reward=[1, 0, 0.5], mask=[[1, 1], [0, 1], [1, 0]])
    adv, _, grad = grown("arpo", batch)
    check(adv, [[1, 1], [0, -1], [0, 0]], atol=1e-4)  # mean 0.5, std 0.5 by n - 1
    check(grad, [[-0.25, -0.25], [0, 0.25], [0, 0]], atol=1e-4)


@pytest.mark.parametrize("name", ["arpo", "arpo_hard", "aepo"])
def test_a_group_of_one_keeps_its_reward(toy_batch, name):
    """Mean 0 and std 1, as published. Four trained tokens; the other group is flat."""
    batch = toy_batch(reward=[0.6, 1, 1], group=[4, 2, 2], mask=[[1, 1], [1, 0], [1, 0]])
    adv, _, grad = grown(name, batch)
    check(adv, [[0.6, 0.6], [0, 0], [0, 0]])
    check(grad, [[-0.15, -0.15], [0, 0], [0, 0]])


def test_aepo_weighs_the_advantage_and_lets_a_clipped_token_live(toy_batch):
    """Rewards 1 and 0: A = +-0.7071. Entropies 0 and 2: factors 0.8, 1.2. Ratio 1.5 on all."""
    batch = toy_batch(
        reward=[1, 0], entropies=[[0, 2], [2, 0]], old_logprobs=[[-1 - math.log(1.5)] * 2] * 2
    )
    a = math.sqrt(0.5)
    adv, _, grad = grown("aepo", batch)
    check(adv, [[0.8 * a, 1.2 * a], [-1.2 * a, -0.8 * a]])
    # good: 1.2 in place of the ratio; bad: the ratio; four tokens
    check(grad, [[-0.96 * a / 4, -1.44 * a / 4], [1.8 * a / 4, 1.2 * a / 4]])


def test_published_settings_of_arpo_and_aepo():
    arpo, hard, aepo = PRESETS["arpo"], PRESETS["arpo_hard"], PRESETS["aepo"]
    unbiased = ("grpo", {"unbiased": True})
    assert arpo.credit == (unbiased,) and arpo.loss[1] == {"low": 0.2, "high": 0.2, "dual": 3.0}
    assert replace(hard, credit=arpo.credit, reduction=arpo.reduction) == arpo
    assert (hard.credit, hard.reduction) == ((unbiased, "share_over_spans"), "unique_tokens")
    assert aepo.credit == (unbiased, ("entropy_aware", {"weight": 0.2}))
    assert aepo.loss == ("balanced_clip", {"low": 0.2, "high": 0.2, "dual": 3.0})
    assert (arpo.branch, hard.branch, aepo.branch) == ("arpo", "arpo", "aepo")
    assert (arpo.reduction, aepo.reduction) == ("token", "token")
    for preset in (arpo, hard, aepo):  # no reference, no critic: one model in memory
        assert not (preset.kl_coef or preset.entropy_coef or preset.needs_critic)
