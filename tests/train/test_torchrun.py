"""Sharded training end to end: several processes learn what one process learns.

First single steps of a learner, in processes that are kept; then whole runs, started with torchrun as
users start them. The numbers of one process, in this one, are what all others are held against.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graft.algos.presets import build
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.extra import extend
from graft.models.load import load_model
from graft.models.names import hf_names, whole_views
from graft.models.policies import weights_of
from graft.models.sharded import shard
from graft.models.sharded_critic import sharded_critic
from graft.rollout.batching import rows_of, to_batch
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.train.processes import ALONE
from graft.train.processes import Processes as Run
from graft.train.run import train_recipe
from graft.types import Task, Trajectory
from tests.processes import Processes
from tests.train.test_learner_actions import SHAPE, call_rows, table
from tests.trees import random_tree

NEAR = 1e-5

# steps of a learner


@dataclass(frozen=True)
class Case:
    """What is learned."""

    algo: str = "grpo"
    tied: bool = True
    actions: bool = False
    has_reference: bool = False
    epochs: int = 1
    minibatches: int = 1
    budget: int = 40
    updates: int = 2


CASES = {
    "grpo, tied": Case(),
    "grpo with a reference, untied": Case(tied=False, has_reference=True),
    "ppo: a critic, 2 epochs of 2 minibatches": Case(
        "ppo", has_reference=True, epochs=2, minibatches=2
    ),
    "ppo, untied": Case("ppo", tied=False),
    "actions beyond the vocabulary, tied": Case(actions=True, has_reference=True),
    "actions beyond the vocabulary, untied": Case(actions=True, tied=False),
    "one large micro-batch: most have nothing of their own": Case(budget=10_000),
    "more processes than micro-batches": Case(actions=True, budget=10_000),
}
LAYOUTS = {"fsdp": 1, "tp": 2, "replicas": 0, "2x2": 2}
"""Processes that split a layer; 0: each holds all."""

STARTED: list[Run] = []


def processes_at(port: int) -> Run:
    """In a child: this process among the others, as torchrun would have made it."""
    if not STARTED:
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        STARTED.append(Run.start(50.0, "cpu"))
    return STARTED[0]


def learn_in_a_child(port: int, layout: str, case: Case) -> tuple[list[dict], dict[str, Tensor]]:
    return learn(processes_at(port), LAYOUTS[layout], case)


def learn(
    processes: Run, tp: int | None, case: Case
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Some updates on a fixed batch: what each reported, and all weights after the last."""
    shape = replace(SHAPE, tied=case.tied)
    plain, before = Decoder(shape).initialise(1), Decoder(shape).initialise(9)
    if case.actions:
        plain = extend(plain, [9, None, 12])
    reference = before if case.has_reference else None
    policy: Any = plain
    mesh = processes.mesh(tp or 1) if processes.world > 1 else None
    if tp:
        assert mesh is not None
        policy = shard(plain.shape, mesh, weights_of(plain).get, dtype=torch.float32)
        if reference is not None:
            read = weights_of(before).get
            reference = shard(shape, mesh, read, dtype=torch.float32).requires_grad_(False)

    def optimizer(module: Any) -> Optimizer:
        plan = schedule("constant", 0, 1, 0.0)
        # AdamW divides a gradient by its own size: what is all rounding error moves a weight by a
        # good part of lr, so that lr must not be far above what is compared
        return Optimizer([module], lr=2e-4, schedule=plan, weight_decay=0.1, processes=processes)

    critic = None
    if case.algo == "ppo":
        critic = sharded_critic(policy) if tp else Critic(policy)
    _, credit, loss, reduction = build(case.algo)
    learner = Learner(
        policy,
        optimizer(policy),
        loss,
        reduction,
        case.budget,
        temperature=0.8,
        allowed=table() if case.actions else None,
        critic=critic,
        critic_optimizer=None if critic is None else optimizer(critic),
        reference=reference,
        epochs=case.epochs,
        minibatches=case.minibatches,
        processes=processes,
        keeps_logprobs=True,
    )
    rows = rows_for(case)
    reports = []
    for _ in range(case.updates):
        batch = learner.annotate(rows, to_batch(rows))
        batch = batch.replace(advantages=credit(batch.zeros(), batch))
        if critic is not None:
            batch = batch.replace(returns=batch.reward[:, None].expand_as(batch.logprobs).clone())
        reports.append(learner.update(rows, batch))
    found = {name: tensor.clone() for name, tensor in weights_of(policy).items()}
    if critic is not None:
        own = dict(critic.body.named_parameters())
        body = critic.body.hf_weights() if tp else whole_views(critic.body.shape, own)
        found |= {f"critic {name}": body[name].clone() for name in body}
    assert learner.logprobs is not None
    return reports, {**found, "log-probs": learner.logprobs}


def rows_for(case: Case) -> list[Trajectory]:
    return call_rows() if case.actions else rows_of([random_tree(seed) for seed in range(6)])


ALONE_LEARNED: dict[Case, Any] = {}


def assert_learns_the_same(children: Processes, port: int, layout: str, case: Case) -> None:
    if case not in ALONE_LEARNED:
        ALONE_LEARNED[case] = learn(ALONE, None, case)
    reports, weights = ALONE_LEARNED[case]
    assert sum(report["grad_norm"] for report in reports) > 0.1
    for rank, (their_reports, their_weights) in enumerate(
        children.run(learn_in_a_child, port, layout, case)
    ):
        for own, theirs in zip(reports, their_reports, strict=True):
            assert theirs == pytest.approx(own, abs=NEAR, rel=NEAR), f"rank {rank}"
        assert their_weights.keys() == weights.keys()
        for name, weight in weights.items():
            gap = float((their_weights[name] - weight).abs().max())
            assert gap < NEAR, f"rank {rank}: {name} is {gap:.1e} away"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Processes, int]]:
    with Processes(2) as group:
        yield group, free_port()


@pytest.fixture(scope="module")
def four() -> Iterator[tuple[Processes, int]]:
    with Processes(4) as group:
        yield group, free_port()


@pytest.mark.parametrize("layout", ["fsdp", "tp", "replicas"])
@pytest.mark.parametrize("name", CASES)
def test_two_processes_take_the_step_of_one(pair, layout: str, name: str):
    assert_learns_the_same(*pair, layout, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2x2", "fsdp", "replicas"])
@pytest.mark.parametrize("name", CASES)
def test_four_processes_take_the_step_of_one(four, layout: str, name: str):
    assert_learns_the_same(*four, layout, CASES[name])
