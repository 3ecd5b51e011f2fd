"""A reference that follows the policy: the model of a KL term, moved every few steps.

A KL to a model of long ago holds the policy back more and more. With `reference_sync` = (steps, share) the
reference becomes share * policy + (1 - share) * reference every so many steps. Share 1 replaces it; TRL's
defaults are 512 and 0.6 (TR-DPO).
"""

from __future__ import annotations

import torch

from graft.train.learner import Learner


@torch.no_grad()
def sync_reference(learner: Learner, step: int) -> None:
    """Move the learner's reference after the update of `step`, where it is due."""
    if learner.reference_sync is None or step % learner.reference_sync[0]:
        return
    if learner.lora is not None:
        learner.anchor = learner.lora.snapshot()
    elif learner.reference is not None:
        ours = dict(learner.policy.named_parameters())
        for name, reference in learner.reference.named_parameters():
            policy = ours[name]
            if policy.shape != reference.shape:  # head rows of actions, after those of the tokens
                policy = policy[: len(reference)]
            # in fp32: a small share of a small change would be lost to the rounding of bf16
            mixed = torch.lerp(reference.float(), policy.float(), learner.reference_sync[1])
            reference.copy_(mixed)
        learner.reference_moved = True
