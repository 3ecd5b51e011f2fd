"""Are the teachers of a recipe the right ones? They score the attempts that were just sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from graft.algos.kl import compared, teacher_gap
from graft.config import Config
from graft.rollout.batching import to_batch
from graft.tolerances import tolerances
from graft.train.learner import Learner
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.monitor.run_check import count
from graft.train.teachers.teachers import POLICY, Teachers
from graft.types import Trajectory

FAR = 3.0
"""Nats per token. A teacher that far away finds the student's tokens impossible."""


def teacher_checks(config: Config, learner: Learner, rows: Sequence[Trajectory]) -> Iterator[Check]:
    """The distance of the teachers from the policy, and of the policy from itself."""
    teachers = learner.teachers
    if not isinstance(teachers, Teachers):
        return
    scored = replace(learner, teachers=replace(teachers, needs_logprobs=True))
    batch = scored.annotate(to_batch(rows))
    held = compared(batch)
    shapes = [model.shape for model in teachers.models.values() if model is not None]
    named = ", ".join(f"{name}: {given}" for name, given in config.distill.teachers.items())
    seen = f"{named}; the policy's tokenizer"
    seen += "".join(f"; {one.layers} layers of width {one.width}" for one in shapes)
    if not held.any():
        way_out = "distill.context has a field that no task of these has; see docs/distillation.md"
        yield Check(
            "teacher", WARN, f"{seen}; none of {count(len(rows), 'attempt')} has one", way_out
        )
        return
    gap = -float(teacher_gap(batch)[held].mean())
    seen += f"; {gap:.3g} nats per token from the policy on {count(len(rows), 'attempt')}"
    far = "it finds the policy's tokens nearly impossible: begin with SFT on its attempts"
    is_far = gap > FAR
    yield Check("teacher", WARN if is_far else PASS, seen, far if is_far else "")
    yield _identity(learner, rows)


@torch.no_grad()
def _identity(learner: Learner, rows: Sequence[Trajectory]) -> Check:
    """The policy as its own teacher gives its own log-probs: the same code scores both."""
    own = Teachers({POLICY: None}, {}, lambda task: POLICY)
    batch = replace(learner, teachers=own).annotate(to_batch(rows))
    mine = learner.over_micros(batch, lambda f: f.logprobs(*learner.scoring)[0])
    held = compared(batch)
    gap = teacher_gap(batch.replace(logprobs=mine))
    off = float(gap[held].abs().mean()) if held.any() else 0.0
    limit = tolerances(learner.policy.dtype).mean_gap
    seen = f"the policy as its own teacher is {off:.1g} nats per token from itself; {limit:g} is allowed"
    if learner.truncation is not None:
        return Check("identity", PASS, "not compared: a teacher's distribution is not truncated")
    remedy = "the teacher's pass does not compute what the learner's does; please report it"
    return Check("identity", PASS if off <= limit else FAIL, seen, "" if off <= limit else remedy)
