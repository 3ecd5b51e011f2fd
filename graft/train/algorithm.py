"""From a recipe to its algorithm: the preset with the recipe's changes, and the branch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graft.actions.actions import Actions
from graft.algos.batch import Batch
from graft.algos.coefficients import Controller, EntropyController, KlController
from graft.algos.credits.credit import Chain, Credit
from graft.algos.credits.table import CREDITS
from graft.algos.losses.loss import Loss
from graft.algos.masked import masked_mean
from graft.algos.parts import make
from graft.algos.presets import Preset, build, kl_in_reward_of, prepare_of, resolve_preset
from graft.algos.reductions import Reduction
from graft.algos.shaping import Shaping, behaviour_kl
from graft.config import Config, ConfigError
from graft.protocols import Stateful
from graft.registry import resolve
from graft.rollout.branches.branch import BRANCHES, Branch
from graft.rollout.branches.counterfactual import Counterfactual
from graft.train.algorithm_check import refuse_combinations
from graft.types import Episode

DYNAMIC_ROUNDS = 4
"""Draws per step of a preset that replaces flat groups (DAPO), where the recipe gives no number."""

AS_GIVEN = (
    "old_policy", "importance_cap", "kl_corrected", "kl_control", "entropy_coef", "entropy_control",
    "reference_sync", "observation_coef",
)  # fmt: skip
"""Keys of `algo` that replace the preset's value where the recipe gives one."""

STALE_CAP = 2.0
"""Cap of the importance weight of tokens that older weights drew, where the preset has none."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """branch x credit x loss x reduction, with the terms around them."""

    preset: Preset
    branch: Branch
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

    @classmethod
    def of(cls, preset: Preset, branch: Branch) -> Algorithm:
        controllers = controllers_of(preset)
        shape, credit, loss, reduction = build(preset, controllers)
        returns = None if preset.returns is None else make(preset.returns, CREDITS, "credit")
        prepare = prepare_of(preset)
        return cls(preset, branch, shape, credit, returns, loss, reduction, prepare, controllers)

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


def controllers_of(preset: Preset) -> dict[str, Controller]:
    """Coefficients with a target."""
    found: dict[str, Controller] = {}
    if preset.kl_control is not None:
        coef = preset.kl_coef or kl_in_reward_of(preset).get("coef", 0.0)
        found["kl"] = KlController.of(coef, preset.kl_control)
    if preset.entropy_control is not None:
        found["entropy"] = EntropyController.of(preset.entropy_coef, preset.entropy_control)
    return found


def preset_of(config: Config) -> Preset:
    """The preset with the recipe's changes; an unknown name is an error here.

    Lengths that a preset publishes for its own budget (constant reductions, DAPO's overlong
    penalty on the last fifth) are taken from `rollout.max_tokens` instead.
    """
    algo = config.algo
    preset = resolve_preset(algo.name)
    changes: dict[str, Any] = {}
    if algo.credit:
        changes["credit"] = credit = tuple(as_part(entry, "algo.credit") for entry in algo.credit)
        given = dict(part if isinstance(part, tuple) else (part, {}) for part in credit)
        if preset.returns is not None and "gae" in given:
            changes["returns"] = ("gae_returns", given["gae"])  # one gamma, one lambda
    if algo.loss is not None:
        changes["loss"] = as_part(algo.loss, "algo.loss")
    if algo.reduction is not None:
        changes["reduction"] = as_part(algo.reduction, "algo.reduction")
    budget = config.rollout.max_tokens
    length, buffer = algo.overlong or (budget, max(budget // 5, 1))
    overlong = ("overlong", {"max_length": length, "buffer": buffer})
    shaping = [overlong if part[0] == "overlong" else part for part in preset.shaping]
    if algo.overlong and overlong not in shaping:
        shaping.append(overlong)
    if algo.reduction is None and preset.reduction[0] == "constant":
        changes["reduction"] = ("constant", {"length": budget})
    if algo.mask_truncated:
        shaping.append("mask_truncated")
    coef = preset.kl_coef if algo.kl_coef is None else algo.kl_coef
    kind = algo.kl_kind or preset.kl_kind
    if coef and algo.kl_in == "reward":
        if config.actions.file:
            raise ConfigError(
                "algo.kl_in=reward prices every decision, and a reference knows none of the actions "
                "beyond the vocabulary; take algo.kl_in=loss, which compares vocabulary tokens only"
            )
        shaping.append(("kl_in_reward", {"coef": coef, "kind": kind}))
        coef = 0.0  # it acts in one place
    changes |= {"kl_coef": coef, "kl_kind": kind}
    if config.distill.divergence is not None:
        changes["divergence"] = as_part(config.distill.divergence, "distill.divergence")
    if config.distill.coef is not None:
        changes["distill_coef"] = config.distill.coef
    changes["shaping"] = tuple(shaping)
    if algo.weights is not None:
        changes["weights"] = tuple(as_part(entry, "algo.weights") for entry in algo.weights)
    for name in AS_GIVEN:
        if (given := getattr(algo, name)) is not None:
            changes[name] = given
    changed = replace(preset, **changes)
    if config.rollout.staleness and algo.importance_cap is None and not is_corrected(changed):
        changed = replace(changed, importance_cap=STALE_CAP)
    refuse_combinations(config, changed)
    return changed


def is_corrected(preset: Preset) -> bool:
    """Whether ratios or weights already account for tokens that another policy drew."""
    weighted = any(part == "importance" or part[0] == "importance" for part in preset.weights)
    return preset.importance_cap is not None or weighted or preset.old_policy == "engine"


def rounds_of(config: Config, preset: Preset) -> int:
    """Draws per step; above 1 flat groups are replaced (dynamic sampling)."""
    return config.rollout.dynamic_rounds or (DYNAMIC_ROUNDS if preset.dynamic_sampling else 1)


def branch_part(config: Config, preset: Preset) -> tuple[str, Mapping[str, Any]]:
    """Name and keywords of the recipe's branch, or of the preset's."""
    given = config.rollout.branch
    part: Any = as_part(given, "rollout.branch") if given else preset.branch
    return part if isinstance(part, tuple) else (part, {})


def branch_of(config: Config, preset: Preset, actions: Actions | None) -> Branch:
    """The recipe's branch or the preset's, with samples, seed and tools of the run where it takes them."""
    name, given = branch_part(config, preset)
    known: dict[str, Any] = {"samples": config.rollout.samples, "seed": config.run.seed}
    if actions is not None:
        known["tools"] = actions.tools
    if "samples" in given:
        raise ConfigError(
            f"rollout.branch gives samples={given['samples']}; rollout.samples sets the number of attempts"
        )
    factory = resolve(name, BRANCHES, "branch")
    takes = inspect.signature(factory).parameters if callable(factory) else ()
    known = {key: value for key, value in known.items() if key in takes}
    branch = make((name, {**known, **given}), BRANCHES, "branch")
    if isinstance(branch, Counterfactual):
        if actions is None:
            raise ConfigError(
                "the branch 'counterfactual' forces calls, and this run has no actions to force; "
                "set actions.file, or take rollout.branch=independent"
            )
        branch.check_tools(actions)
    return branch


def as_part(entry: Any, key: str) -> Any:
    """What `key` of a recipe gives, `name` or `{name: {keyword: value}}`, as (name, keywords); a function
    as it is."""
    if isinstance(entry, str) or callable(entry):
        return entry
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, keywords),) = entry.items()
        if isinstance(keywords, dict | None):
            return name, dict(keywords or {})
    raise ConfigError(
        f"{key} has {entry!r}; it must be a name, or one name with its keywords, {{name: {{key: value}}}}"
    )
