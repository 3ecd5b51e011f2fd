"""An algorithm as the step uses it: the functions of a preset, and the parts that learn between steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.algos.batch import Batch
from graft.algos.coefficients import Controller
from graft.algos.credits.credit import Chain, Credit
from graft.algos.losses.loss import Loss
from graft.algos.masked import masked_mean
from graft.algos.preset import Preset, kl_in_reward_of
from graft.algos.reductions import Reduction
from graft.algos.shaping import Shaping, behaviour_kl
from graft.protocols import Stateful
from graft.types import Episode


@dataclass(frozen=True, slots=True)
class Algorithm:
    """branch x credit x loss x reduction, with the terms around them."""

    preset: Preset
    branch: Callable[[Any], Awaitable[None]]
    """It decides where episodes fork; the rollout calls it with an episode in progress."""
    shape: Shaping
    """Rewards before credit."""
    credit: Chain
    returns: Credit | None
    """What the critic learns; None: there is none."""
    loss: Loss
    reduction: Reduction
    prepare: Callable[[Batch], Batch]
    """What loss and weights need of the whole batch, before the update."""
    controllers: Mapping[str, Controller]
    """Coefficients that follow the policy: "kl", "entropy"."""

    def adapt(self, batch: Batch, updated: Mapping[str, float]) -> dict[str, float]:
        """Move the coefficients after an update; the metrics are those that it was made with."""
        used = {f"loss/{name}_coef": now() for name, now in self.controllers.items()}
        seen = dict(updated)
        if "kl" in self.controllers and "kl" not in seen:  # it is in the rewards
            kind = kl_in_reward_of(self.preset)["kind"]
            seen["kl"] = float(masked_mean(behaviour_kl(batch, kind), batch.mask))
        for controller in self.controllers.values():
            controller.update(seen, batch.num_rows)
        return used

    def settle(self, episodes: Sequence[Episode], batch: Batch) -> None:
        """Give parts that learn from step to step the episodes of this one and its batch."""
        if isinstance(self.branch, Stateful):
            self.branch.settle(episodes)
        for credit in self.credit.stateful:
            credit.settle(batch)

    @property
    def state(self) -> dict[str, Any]:
        """What these parts have learned, as plain JSON."""
        found: dict[str, Any] = {}
        if isinstance(self.branch, Stateful):
            found["branch"] = self.branch.state
        if credits := self.credit.stateful:
            found["credits"] = [credit.state for credit in credits]
        if self.controllers:
            found["coefficients"] = {name: one.state for name, one in self.controllers.items()}
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint; parts that it does not have begin anew."""
        if isinstance(self.branch, Stateful) and "branch" in state:
            self.branch.restore(state["branch"])
        saved = state.get("credits", ())
        for credit, one in zip(self.credit.stateful, saved, strict=bool(saved)):
            credit.restore(one)
        for name, one in state.get("coefficients", {}).items():
            if name in self.controllers:
                self.controllers[name].restore(one)
