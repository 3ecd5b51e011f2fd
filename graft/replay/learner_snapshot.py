"""The state of a learner before a step, and the gradient of an update: to compare two learners."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from graft.train.learner import Learner
from graft.train.run_dir.optimizer_state import copied, tensors_of


class LearnerSnapshot:
    """The state of a learner before a step, to restore."""

    def __init__(self, learner: Learner) -> None:
        self.module = learner.lora or learner.policy
        self.weights = {name: w.detach().clone() for name, w in self.module.named_parameters()}
        self.tensors = copied(tensors_of(learner))
        self.updates = learner.optimizer.steps
        optimizer = learner.critic_optimizer
        self.critic_updates = 0 if optimizer is None else optimizer.steps
        self.anchor = learner.anchor
        self.reference: dict[str, Tensor] = {}  # where a step may move it
        if learner.reference is not None and learner.reference_sync:
            named = learner.reference.named_parameters()
            self.reference = {name: weight.detach().clone() for name, weight in named}

    @torch.no_grad()
    def rewind(self, learner: Learner) -> None:
        """Restore the weights and the reference; the critic comes with the optimizer's state."""
        for name, weight in self.module.named_parameters():
            weight.copy_(self.weights[name])
        learner.anchor = self.anchor
        if learner.reference is not None and self.reference:
            for name, weight in learner.reference.named_parameters():
                weight.copy_(self.reference[name])
        if learner.lora is not None:
            learner.lora.merge()

    @torch.no_grad()
    def resume(self, learner: Learner) -> None:
        """Copy the optimizer's state to another learner of the same model."""
        for name, tensor in tensors_of(learner).items():
            tensor.copy_(self.tensors[name])
        learner.optimizer.resume(self.updates)
        if learner.critic_optimizer is not None:
            learner.critic_optimizer.resume(self.critic_updates)


@contextmanager
def first_gradient(learner: Learner, is_wanted: bool) -> Iterator[dict[str, Tensor]]:
    """The gradient of the first update inside the block, by parameter name; clipped, as AdamW gets it."""
    found: dict[str, Tensor] = {}
    optimizer = learner.optimizer

    def watched(lr: float) -> None:
        if not found:
            named = zip(optimizer.names, optimizer.masters, strict=True)
            found.update({n: m.grad.detach().clone() for n, m in named if m.grad is not None})
        step(lr)

    if not is_wanted:
        yield found
        return
    step, optimizer.adam.step = optimizer.adam.step, watched
    try:
        yield found
    finally:
        optimizer.adam.step = step


def cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    def product(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        pairs = (
            (a[name].flatten().double(), b[name].flatten().double()) for name in a if name in b
        )
        return sum(float(x @ y) for x, y in pairs)

    size = math.sqrt(product(one, one) * product(other, other))
    return product(one, other) / size if size else math.nan
