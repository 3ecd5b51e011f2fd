import copy
import math
from dataclasses import replace

import pytest
import torch

from graft.algos.presets import build
from graft.algos.reductions import turn_starts
from graft.config import check
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.rollout.batching import to_batch, trajectories_of
from graft.row_sums import grad_sum_of
from graft.train import step_totals as totals_module
from graft.train.learner import Learner
from graft.train.learner_build import sft_rate_plan
from graft.train.optimizer import NonFinite, Optimizer, schedule
from graft.train.step_totals import high
from tests.trees import group, random_tree

SHAPE = ModelShape(vocab_size=30, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ff=48)


def learner_for(name: str = "grpo", tokens_per_micro: int = 10_000, **more) -> Learner:
    policy = Decoder(SHAPE).initialise(1)
    _, _, loss, reduction = build(name)
    optimizer = Optimizer([policy], lr=1e-2, schedule=schedule("constant", 0, 1, 0.0))
    return Learner(policy, optimizer, loss, reduction, tokens_per_micro, **more)


def batch_of(seeds=range(5), name: str = "grpo"):
    batch = to_batch(trajectories_of([random_tree(seed) for seed in seeds]))
    _, credit, _, _ = build(name)
    return batch.replace(advantages=credit(batch.zeros(), batch))


def gradients_of(learner: Learner, batch) -> dict[str, torch.Tensor]:
    taken: dict[str, torch.Tensor] = {}

    def record() -> dict[str, float]:
        taken.update({n: p.grad.clone() for n, p in learner.policy.named_parameters()})
        learner.discard()
        return {}

    learner.optimizer.step = record  # type: ignore[method-assign]
    learner.update(batch)
    return taken


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "dr_grpo", "cispo"])
def test_gradients_do_not_depend_on_the_micro_batch_size(name: str):
    batch = batch_of()
    old = torch.zeros_like(batch.logprobs) - 1.0
    batch = batch.replace(old_logprobs=old)
    whole = gradients_of(learner_for(name), batch)
    assert sum(float(g.abs().sum()) for g in whole.values()) > 0
    for budget in (1, 25, 60):
        parts = gradients_of(learner_for(name, budget), batch)
        for key, grad in whole.items():
            torch.testing.assert_close(parts[key], grad, atol=1e-5, rtol=1e-4)


def test_gradients_do_not_depend_on_the_order_of_rows():
    batch = batch_of()
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(0))
    whole = gradients_of(learner_for(), batch)
    mixed = gradients_of(learner_for(), batch.rows(order))
    for key, grad in whole.items():
        torch.testing.assert_close(mixed[key], grad, atol=1e-5, rtol=1e-4)


def test_a_batch_of_tensors_alone_is_refused():
    batch = batch_of().replace(trajectories=())
    with pytest.raises(ValueError, match="0 trajectories"):
        learner_for().update(batch)
    with pytest.raises(ValueError, match="0 trajectories"):
        learner_for(epochs=2).annotate(batch)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_rows_with_nothing_to_train_cost_nothing_and_break_nothing(name: str):
    batch = batch_of()
    mask = batch.mask.clone()
    mask[1:] = False
    metrics = learner_for(name, tokens_per_micro=1).update(batch.replace(mask=mask))
    assert metrics["loss"] == metrics["loss"]  # not NaN
    nothing = learner_for(name).update(batch.replace(mask=torch.zeros_like(mask)))
    assert (nothing["loss"], nothing["grad_norm"]) == (0.0, 0.0)


def test_an_update_makes_rewarded_answers_likelier():
    episode = group([1, 2, 3], [[4, 5], [6, 7]], [1.0, 0.0])
    rows = trajectories_of([episode])
    batch = to_batch(rows)
    _, credit, _, _ = build("grpo")
    batch = batch.replace(advantages=credit(batch.zeros(), batch))
    learner = learner_for(epochs=2)
    before = learner.annotate(batch).need("old_logprobs", "test").sum(1)
    metrics = learner.update(batch)
    after = learner.annotate(batch).need("old_logprobs", "test").sum(1)
    assert after[0] > before[0] and after[1] < before[1]
    assert metrics["optimizer_steps"] == 2.0


def test_a_loss_that_is_not_finite_takes_no_step():
    batch = batch_of()
    learner = learner_for()
    before = copy.deepcopy(learner.policy.state_dict())
    bad = batch.advantages.clone()
    bad[batch.mask] = float("nan")
    with pytest.raises(NonFinite, match="loss"):
        learner.update(batch.replace(advantages=bad))
    for name, value in learner.policy.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in learner.policy.parameters())
    assert learner.optimizer.steps == 0


def test_recomputing_activations_changes_nothing():
    batch = batch_of()
    plain = gradients_of(learner_for(), batch)
    saving = learner_for()
    saving.policy.recompute = True
    for key, grad in gradients_of(saving, batch).items():
        torch.testing.assert_close(grad, plain[key], atol=1e-6, rtol=1e-5)


def test_a_critic_learns_the_returns():
    batch = batch_of()
    learner = learner_for("ppo")
    learner.critic = Critic(learner.policy)
    learner.critic_optimizer = Optimizer(
        [learner.critic], lr=1e-2, schedule=schedule("constant", 0, 1, 0.0)
    )
    returns = batch.reward[:, None].expand_as(batch.logprobs)
    losses = []
    for _ in range(60):
        annotated = learner.annotate(batch)
        assert float(annotated.values[~batch.mask].abs().sum()) == 0.0
        losses.append(learner.update(annotated.replace(returns=returns))["loss/value"])
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("budget", [10_000, 25])
def test_a_critic_of_turns_learns_where_they_begin(budget: int):
    """Its loss is the mean over turns, whatever the micro-batches; elsewhere it has no gradient."""
    batch = batch_of()
    learner = learner_for("ppo_turn", budget)
    learner.critic = Critic(learner.policy)
    learner.critic_optimizer = Optimizer(
        [learner.critic], lr=1e-2, schedule=schedule("constant", 0, 1, 0.0)
    )
    learner.value_reduction = turn_starts()
    returns = torch.where(turn_starts()(batch) > 0, 3.0, 100.0)
    slopes: list[float] = []

    def record() -> dict[str, float]:
        slopes.append(float(learner.critic.value.bias.grad))
        learner.discard()
        return {}

    learner.critic_optimizer.step = record  # type: ignore[method-assign]
    annotated = learner.annotate(batch)  # a new critic values everything at 0
    metrics = learner.update(annotated.replace(returns=returns))
    assert metrics["loss/value"] == pytest.approx(4.5, abs=1e-5)
    assert slopes == pytest.approx([-3.0], abs=1e-5)


def test_the_reference_is_computed_by_its_own_weights():
    batch = batch_of()
    learner = learner_for()
    learner.reference = Decoder(SHAPE).initialise(9)
    own = learner_for()
    own.policy = learner.reference
    own.epochs = 2
    want = own.annotate(batch).old_logprobs
    got = learner.annotate(batch).ref_logprobs
    torch.testing.assert_close(got[batch.mask], want[batch.mask])


def test_bf16_weights_follow_their_fp32_masters_in_place():
    policy = Decoder(SHAPE).initialise(1).to(torch.bfloat16)
    optimizer = Optimizer([policy], lr=1e-4, schedule=schedule("constant", 0, 1, 0.0))
    place = policy.embed.weight.data_ptr()
    for _ in range(20):  # each step is far below bf16's resolution of a weight near 1
        policy.norm.weight.grad = torch.ones_like(policy.norm.weight)
        optimizer.collect()
        optimizer.step()
    assert policy.embed.weight.data_ptr() == place
    assert float(policy.norm.weight.detach().float().mean()) == pytest.approx(0.998, abs=2e-3)
    assert float(policy.norm.weight.detach().float().mean()) < 1.0


def test_bf16_gradients_are_summed_in_fp32_and_given_up():
    policy = Decoder(SHAPE).initialise(1).to(torch.bfloat16)
    optimizer = Optimizer([policy], lr=1e-4, schedule=schedule("constant", 0, 1, 0.0))
    weight, master = optimizer.weights[0], optimizer.masters[0]
    for value in (1.0, 2.0**-10, 2.0**-10):  # in bf16 the sum would stay at 1
        weight.grad = torch.full_like(weight, value)
        optimizer.collect()
        assert weight.grad is None
    assert master.grad is not None and master.grad.dtype == torch.float32
    assert torch.equal(master.grad, torch.full_like(master, 1 + 2.0**-9))
    assert all(m.grad is None for m in optimizer.masters[1:])  # they had no gradient at all


def test_the_sums_that_kernels_add_to_are_cleared_and_stay_where_they_are(monkeypatch):
    monkeypatch.setattr("graft.train.optimizer.has_kernels", lambda device: True)
    policy = Decoder(SHAPE).initialise(1).to(torch.bfloat16)
    optimizer = Optimizer([policy], lr=1e-4, schedule=schedule("constant", 0, 1, 0.0))
    # the tied embedding and four matrices of each of two layers; norms have no sum
    sums = [total for w in optimizer.weights if (total := grad_sum_of(w)) is not None]
    assert len(sums) == sum(w.ndim == 2 for w in optimizer.weights) == 1 + 2 * 4
    for total in sums:
        total.fill_(3.0)
    optimizer.step()
    assert not any(total.any() for total in sums)
    masters = [m for m in optimizer.masters if m.ndim == 2]
    assert all(m.grad is total for m, total in zip(masters, sums, strict=True))


def test_the_high_gap_leaves_one_token_in_a_thousand_above_it():
    gaps = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    untrained = -torch.ones(700)
    most = high([gaps[:1000], untrained, gaps[1000:]], 5000)
    assert int((gaps > most).sum()) == 5
    assert high([gaps[:999], untrained], 999) == float(gaps[:999].max())
    assert high([untrained], 0) == 0.0


def test_the_gap_to_the_engine_is_reported_over_all_micro_batches():
    batch = batch_of()
    learner = learner_for(tokens_per_micro=25, epochs=2)  # two, for the learner's log-probs
    logp = learner.annotate(batch).need("old_logprobs", "test")
    learner.epochs = 1
    gap = (logp - batch.logprobs)[batch.mask].abs()
    metrics = learner.update(batch)
    name = "sampling/sampling_logp_difference"
    assert metrics[f"{name}/mean"] == pytest.approx(float(gap.mean()), rel=1e-5)
    assert metrics[f"{name}/max"] == pytest.approx(float(gap.max()), rel=1e-5)
    assert metrics[f"{name}/p999"] == metrics[f"{name}/max"]  # fewer than a thousand tokens


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_never_waits_between_micro_batches(dtype: torch.dtype, monkeypatch):
    batch = batch_of(range(12))
    shape = replace(SHAPE, head_dim=64)
    policy = Decoder(shape).initialise(1).to("cuda", dtype)
    _, _, loss, reduction = build("grpo")
    optimizer = Optimizer([policy], lr=1e-2, schedule=schedule("constant", 0, 1, 0.0))
    learner = Learner(policy, optimizer, loss, reduction, tokens_per_micro=60)
    learner.update(batch)  # kernels are compiled, tables made
    read = totals_module._read

    def read_at_last(reports):
        torch.cuda.set_sync_debug_mode("default")
        return read(reports)

    monkeypatch.setattr(totals_module, "_read", read_at_last)
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.update(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_schedules_by_hand():
    linear = schedule("linear", 2, 6, 0.0)
    assert [linear(i) for i in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = schedule("cosine", 0, 4, 0.1)
    assert [round(cosine(i), 4) for i in (0, 2, 4, 9)] == [1.0, 0.55, 0.1, 0.1]
    assert schedule("constant", 0, 4, 0.0)(100) == 1.0


def test_the_rates_of_sft_by_hand():
    def plan(**sft: object):
        return sft_rate_plan(
            check(
                {
                    "model": {"path": "m"},
                    "train": {"steps": 0},
                    "sft": {"data": "x", "steps": 20, **sft},
                }
            ),
            20,
        )

    shared = plan(warmup=0.15, schedule="cosine", min_lr=0)  # 3 steps of warm-up, then 17
    assert [round(shared(i), 4) for i in (0, 2, 3, 20)] == [0.3333, 1.0, 1.0, 0.0]
    assert shared(11) == pytest.approx(0.5 * (1 + math.cos(math.pi * 8 / 17)))
    plain = plan(warmup=0)
    assert [plain(0), plain(10), plain(20)] == pytest.approx([1.0, 0.55, 0.1])


def test_gradients_are_clipped_to_the_global_norm():
    policy = Decoder(SHAPE).initialise(1)
    optimizer = Optimizer(
        [policy], lr=0.0, schedule=schedule("constant", 0, 1, 0.0), max_grad_norm=1.0
    )
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    count = sum(p.numel() for p in policy.parameters())
    assert optimizer._clip() == pytest.approx(count**0.5, rel=1e-5)
    total = sum(float(p.grad.square().sum()) for p in policy.parameters())
    assert total == pytest.approx(1.0, rel=1e-3)
