"""Auxiliary losses of routers: transformers' numbers, and the same gradient however a step is cut up."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from graft.algos.batch import Batch
from graft.algos.reductions import token
from graft.config import ConfigError, load_config
from graft.models.decoder import Decoder
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names, whole_views
from graft.models.layers.router_losses import router_losses
from graft.models.parallel.decoder import shard
from graft.models.parallel.shards import gather
from graft.models.shape import Experts, ModelShape
from graft.rollout.batching import to_batch, trajectories_of
from graft.train.learner import Learner
from graft.train.model import refuse_without_experts
from graft.train.optimizer import Optimizer, schedule
from graft.train.processes import Processes
from tests import processes as children
from tests.trees import group, random_tree

SOFTMAX = ModelShape(
    family="qwen3_moe",
    vocab_size=30,
    width=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ff=24,
    experts=Experts(5, 2, 8, renormalise=True),
    dense_layers=(1,),
)
SIGMOID = replace(
    SOFTMAX,
    family="glm4_moe",
    tied=False,
    dense_layers=(0,),
    rotary_share=0.5,
    experts=Experts(8, 3, 8, router="sigmoid", groups=2, scaling=2.5, shared_ff=8),
)
SHAPES = {"softmax": SOFTMAX, "sigmoid": SIGMOID}


@pytest.fixture(scope="module")
def pair() -> Iterator[children.Processes]:
    with children.Processes(2) as group:
        yield group


def no_loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Leave the losses of routers alone."""
    return logp_NT * 0.0, {}


def learner_for(shape: ModelShape, tokens_per_micro: int = 10_000, **more: Any) -> Learner:
    policy = Decoder(shape).initialise(1)
    with torch.no_grad():  # routers that decide: of width 16 they begin with nearly even chances
        for name, weight in policy.named_parameters():
            if ".router." in name:
                weight *= 3.0
    optimizer = Optimizer([policy], lr=1e-2, schedule=schedule("constant", 0, 1, 0.0))
    how = {"router_balance": 0.7, "router_z": 0.3} | more
    return Learner(policy, optimizer, no_loss, token(), tokens_per_micro, **how)


def take_gradients(learner: Learner, batch: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
    taken: dict[str, Tensor] = {}

    def record() -> dict[str, float]:
        grads = {n: p.grad for n, p in learner.policy.named_parameters()}
        taken.update({n: g.clone() for n, g in grads.items() if g is not None})
        learner.discard()
        return {}

    learner.optimizer.step = record  # type: ignore[method-assign]
    return taken, learner.update(batch)


class Pair(Processes):
    """The processes of a test, as a learner asks for them."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.rank, self.world, self._tp = dist.get_rank(), dist.get_world_size(), tp

    def gather(self, value: Any, what: str) -> list[Any]:
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def add(self, tensors: Iterable[Tensor], what: str) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def max_over_ranks(self, number: float, what: str) -> float:
        return max(self.gather(number, what))


def learn_together(shape: ModelShape, tp: int, is_split: bool, recompute: bool) -> Any:
    """In a child: the gradients of this process's rows, added up, by names of a checkpoint."""
    processes = Pair(tp)
    learner = learner_for(shape, 40)
    whole, weights = learner.policy, hf_names(learner.policy)
    if is_split:
        mesh = init_device_mesh("cpu", (2 // tp, tp), mesh_dim_names=("dp", "tp"))
        policy = shard(shape, mesh, weights.__getitem__, dtype=torch.float32, recompute=recompute)
        how = {"lr": 1e-2, "schedule": schedule("constant", 0, 1, 0.0), "processes": processes}
        learner = replace(learner, policy=policy, optimizer=Optimizer([policy], **how))
    learner = replace(learner, processes=processes)
    found, metrics = take_gradients(learner, trees())
    if is_split:
        owners = dict(learner.policy.named_parameters())
        names = {id(p): name for name, p in learner.policy.hf_parameters().items()}
        return {names[id(owners[n])]: gather(g) for n, g in found.items()}, metrics, learner.loads
    processes.add(found.values(), "")
    return whole_views(whole.shape, found), metrics, learner.loads


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("tp", "is_split"), [(1, False), (1, True), (2, True)], ids=["replicas", "dp 2", "tp 2"]
)
def test_two_processes_have_the_gradient_of_one(
    pair: Any, shape: ModelShape, tp: int, is_split: bool
) -> None:
    learner = learner_for(shape)
    grads, metrics = take_gradients(learner, trees())
    wanted = whole_views(shape, grads), metrics
    for *found, loads in pair.run(learn_together, shape, tp, is_split, shape is SOFTMAX):
        found[0] = {name: grad for name, grad in found[0].items() if name in wanted[0]}
        assert_same(found, wanted)
        assert loads is not None and loads.shape == learner.loads.shape  # type: ignore[union-attr]


def trees() -> Batch:
    batch = to_batch(trajectories_of([random_tree(seed) for seed in range(4)]))
    return batch.replace(advantages=batch.zeros())


def alone(batch: Batch) -> Batch:
    """The same rows, none of which shares a span with another."""
    rows = [copy.deepcopy(row) for row in batch.trajectories]
    assert len({id(span) for row in rows for span in row.spans}) > len(
        {id(span) for row in batch.trajectories for span in row.spans}
    )
    return batch.replace(trajectories=tuple(rows))


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0].keys() == wanted[0].keys()
    for name, grad in wanted[0].items():
        torch.testing.assert_close(found[0][name], grad, atol=1e-5, rtol=1e-4)
    for name in ("experts/balance_loss", "experts/z_loss"):
        assert found[1][name] == pytest.approx(wanted[1][name], rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_gradient_does_not_depend_on_how_a_step_is_cut(shape: ModelShape) -> None:
    batch = trees()
    wanted = take_gradients(learner_for(shape), batch)
    routers = [float(g.abs().max()) for n, g in wanted[0].items() if ".router." in n]
    assert len(routers) == 2 and min(routers) > 1e-4
    for budget in (1, 40):
        assert_same(take_gradients(learner_for(shape, budget), batch), wanted)
    twice = learner_for(shape)
    twice.policy.recompute = True
    assert_same(take_gradients(twice, batch), wanted)
    assert_same(take_gradients(learner_for(shape), alone(batch)), wanted)


def test_the_losses_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    answers = [[4, 5, 6, 7], [8, 9], [4, 4, 12, 20, 3]]
    batch = to_batch(trajectories_of([group([1, 2, 3], answers, [1.0, 0.0, 0.0])]))
    learner = learner_for(SOFTMAX)
    save_model(learner.policy, tmp_path)
    found, metrics = take_gradients(learner, batch.replace(advantages=batch.zeros()))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    padded, is_read = torch.zeros(3, 8, dtype=torch.long), torch.zeros(3, 8, dtype=torch.long)
    counts = torch.zeros(3, 8)
    for number, answer in enumerate(answers):
        tokens = [1, 2, 3, *answer]
        padded[number, : len(tokens)] = torch.tensor(tokens)
        is_read[number, : len(tokens)] = 1
        counts[number, 2 : len(tokens) - 1] = 1  # what predicts the answer's tokens
    logits = model(padded, attention_mask=is_read, output_router_logits=True).router_logits
    balance = load_balancing_loss_func(logits, 5, 2, counts)
    squares = torch.stack([layer.logsumexp(-1).square() for layer in logits])
    z = (squares * counts.flatten()).sum() / counts.sum() / len(logits)
    assert metrics["experts/balance_loss"] == pytest.approx(float(balance.detach()), rel=1e-5)
    assert metrics["experts/z_loss"] == pytest.approx(float(z.detach()), rel=1e-5)
    (0.7 * balance + 0.3 * z).backward()
    theirs = dict(model.named_parameters())
    grads = Decoder(SOFTMAX)
    for name, weight in grads.named_parameters():
        weight.data = found.get(name, torch.zeros_like(weight))
    compared = [name for name in hf_names(grads) if ".experts." not in name]
    assert any(name.endswith("mlp.gate.weight") for name in compared)
    for name in compared:
        if (wanted := theirs[name].grad) is not None:
            torch.testing.assert_close(hf_names(grads)[name], wanted, atol=1e-5, rtol=1e-4)


def test_the_worked_case_of_a_router() -> None:
    """Two tokens of weight 1/4 and 3/4, two experts, one chosen: f = [1/4, 3/4]."""
    policy = Decoder(replace(SOFTMAX, layers=1, dense_layers=(), experts=Experts(2, 1, 8)))
    layer = policy.blocks[0].mlp
    likely, weights_U = torch.tensor([0.8, 0.4]), torch.tensor([0.25, 0.75])
    logits = torch.stack([likely, 1 - likely], 1).log()
    layer.choice = logits, torch.tensor([[0], [1]])  # type: ignore[assignment]
    tokens = policy, torch.tensor([0, 1]), weights_U
    balance, z = router_losses(*tokens, torch.tensor([0.25, 0.75]))
    # P = [.25 * .8 + .75 * .4, .25 * .2 + .75 * .6] = [.5, .5], and 2 * (.25 * .5 + .75 * .5)
    assert float(balance) == pytest.approx(1.0)
    assert float(z) == pytest.approx(0.0, abs=1e-6)
    layer.choice = logits + 2.0, torch.tensor([[0], [1]])  # type: ignore[assignment]
    assert float(router_losses(*tokens, torch.zeros(2))[1]) == pytest.approx(4.0, rel=1e-6)


def test_rows_with_nothing_to_train_break_nothing() -> None:
    batch = trees()
    mask = torch.zeros_like(batch.mask)
    metrics = learner_for(SIGMOID).update(batch.replace(mask=mask))
    assert (metrics["experts/balance_loss"], metrics["grad_norm"]) == (0.0, 0.0)


def test_a_frozen_router_passes_the_gradient_on() -> None:
    learner = learner_for(SOFTMAX)
    for name, weight in learner.policy.named_parameters():
        weight.requires_grad_(".router." not in name)
    found, _ = take_gradients(learner, trees())
    assert not any(".router." in name for name in found)
    assert float(found["blocks.0.attention.qkv.weight"].abs().max()) > 0


def test_balance_evens_out_the_use_of_experts() -> None:
    shape = replace(SOFTMAX, layers=1, dense_layers=())
    learner, batch = learner_for(shape, router_balance=1.0, router_z=0.0), trees()
    first = learner.update(batch)
    for _ in range(30):
        last = learner.update(batch)
    assert last["experts/balance_loss"] < first["experts/balance_loss"]
    assert last["experts/max_load"] < first["experts/max_load"] - 0.2
    assert "experts/z_loss" not in last


@pytest.mark.parametrize("setting", ["freeze_router=true", "router_balance=0.01", "router_z=1e-3"])
def test_a_model_without_experts_refuses_settings_of_routers(setting: str) -> None:
    config = load_config("quickstart", [f"train.{setting}"])
    refuse_without_experts(config, SOFTMAX)
    with pytest.raises(ConfigError) as error:
        refuse_without_experts(config, ModelShape())
    assert f"train.{setting.partition('=')[0]}" in str(error.value)
