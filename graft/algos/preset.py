"""A preset: an algorithm as names and numbers, before any of its functions is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graft.algos.reductions import Reduction, turn_starts

Part = str | tuple[str, Mapping[str, Any]]
"""A name, or a name with keywords for its factory."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm: branch x credit x loss x reduction, with the terms around the loss."""

    credit: tuple[Part, ...]
    loss: Part
    reduction: Part = "token"
    branch: Part = "independent"
    shaping: tuple[Part, ...] = ()

    old_policy: Literal["learner", "engine"] = "learner"
    """What ratios are measured to: the learner before its first update, or the engine that sampled."""
    weights: tuple[Part, ...] = ()
    """Factors on the policy's loss."""
    importance_cap: float | None = None
    """The weight `importance` with this cap, before the others; None: off."""
    kl_coef: float = 0.0
    """KL to a reference in the loss; 0: no reference model is needed."""
    kl_kind: str = "k3"
    kl_corrected: bool = False
    """Whether the KL of tokens that the old policy drew is multiplied by the ratio."""
    kl_control: Mapping[str, float] | None = None
    """Keywords of `KlController`, which moves the coefficient of the KL; None: it stays."""
    entropy_coef: float = 0.0
    entropy_control: Mapping[str, float] | None = None
    """Keywords of `EntropyController`, which moves the coefficient of the entropy; None: it stays."""
    reference_sync: tuple[int, float] | None = None
    """After how many steps the reference follows the policy, and the policy's share in it; None: never."""
    observation_coef: float = 0.0
    """Cross-entropy of the tokens that the environment wrote."""
    divergence: Part | None = None
    """How the whole distribution is compared with a teacher's; None: only sampled tokens are."""
    distill_coef: float = 0.0
    """Weight of that divergence beside the loss; the loss `distillation` is nothing else."""

    needs_critic: bool = False
    returns: Part | None = None
    """The credit that computes the critic's targets."""
    value_clip: float | None = None
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are discarded and replaced by new ones."""

    @property
    def value_reduction(self) -> Reduction | None:
        """The reduction of the critic's loss; None: the policy's."""
        is_per_turn = isinstance(self.returns, tuple) and self.returns[1].get("per") == "turn"
        return turn_starts() if is_per_turn else None


def kl_in_reward_of(preset: Preset) -> dict[str, Any]:
    """The keywords of that shaping; empty where there is none."""
    parts = (part for part in preset.shaping if part[0] == "kl_in_reward")
    return {"kind": "k1", **dict(part[1])} if isinstance(part := next(parts, None), tuple) else {}
