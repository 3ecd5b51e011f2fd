"""From a recipe to its algorithm: the preset with the recipe's changes, and the branch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graft.actions.actions import Actions
from graft.algos.credit import CREDITS, Credit
from graft.algos.losses import Loss
from graft.algos.presets import Preset, build, make, resolve_preset
from graft.algos.reductions import Reduction
from graft.algos.shaping import Shaping
from graft.config import Config, ConfigError
from graft.protocols import Stateful
from graft.registry import resolve
from graft.rollout.branches.branch import BRANCHES, Branch
from graft.rollout.branches.counterfactual import Counterfactual
from graft.types import Episode

DYNAMIC_ROUNDS = 4
"""Draws per step of a preset that replaces flat groups (DAPO), where the recipe gives no number."""

STALE_CAP = 2.0
"""Cap of the importance weight of tokens that older weights drew, where the preset has none."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """branch x credit x loss x reduction, with the terms around them."""

    preset: Preset
    branch: Branch
    shape: Shaping
    """Rewards before credit."""
    credit: Credit
    returns: Credit | None
    """What the critic learns; None: there is none."""
    loss: Loss
    reduction: Reduction

    @classmethod
    def of(cls, preset: Preset, branch: Branch) -> Algorithm:
        shape, credit, loss, reduction = build(preset)
        returns = None if preset.returns is None else make(preset.returns, CREDITS, "credit")
        return cls(preset, branch, shape, credit, returns, loss, reduction)

    def settle(self, episodes: Sequence[Episode]) -> None:
        """Give a branch that learns from step to step the episodes of this one."""
        if isinstance(self.branch, Stateful):
            self.branch.settle(episodes)


def preset_of(config: Config) -> Preset:
    """The preset with the recipe's changes; an unknown name is an error here.

    Lengths that a preset publishes for its own budget (constant reductions, DAPO's overlong
    penalty on the last fifth) are taken from `rollout.max_tokens` instead.
    """
    algo = config.algo
    preset = resolve_preset(algo.name)
    changes: dict[str, Any] = {}
    if algo.credit:
        changes["credit"] = credit = tuple(as_part(entry) for entry in algo.credit)
        given = dict(part if isinstance(part, tuple) else (part, {}) for part in credit)
        if preset.returns is not None and "gae" in given:
            changes["returns"] = ("gae_returns", given["gae"])  # one gamma, one lambda
    if algo.loss is not None:
        changes["loss"] = as_part(algo.loss)
    if algo.reduction is not None:
        changes["reduction"] = as_part(algo.reduction)
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
    if coef and algo.kl_in == "reward":
        if config.actions.file:
            raise ConfigError(
                "algo.kl_in=reward prices every decision, and a reference knows none of the actions "
                "beyond the vocabulary; take algo.kl_in=loss, which compares vocabulary tokens only"
            )
        shaping.append(("kl_in_reward", {"coef": coef, "kind": algo.kl_kind}))
        coef = 0.0  # it acts in one place
    changes |= {"kl_coef": coef, "kl_kind": algo.kl_kind}
    changes["shaping"] = tuple(shaping)
    if algo.entropy_coef is not None:
        changes["entropy_coef"] = algo.entropy_coef
    if algo.importance_cap is not None:
        changes["importance_cap"] = algo.importance_cap
    elif config.rollout.staleness and preset.importance_cap is None:
        changes["importance_cap"] = STALE_CAP
    return replace(preset, **changes)


def rounds_of(config: Config, preset: Preset) -> int:
    """Draws per step; above 1 flat groups are replaced (dynamic sampling)."""
    return config.rollout.dynamic_rounds or (DYNAMIC_ROUNDS if preset.dynamic_sampling else 1)


def branch_part(config: Config, preset: Preset) -> tuple[str, Mapping[str, Any]]:
    """Name and keywords of the recipe's branch, or of the preset's."""
    part: Any = as_part(config.rollout.branch) if config.rollout.branch else preset.branch
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


def as_part(entry: Any) -> Any:
    """A recipe's `name` or `{name: {key: value}}` as (name, keywords); a function as it is."""
    if isinstance(entry, str) or callable(entry):
        return entry
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, keywords),) = entry.items()
        if isinstance(keywords, dict | None):
            return name, dict(keywords or {})
    raise ConfigError(f"{entry!r} is neither a name nor {{name: {{key: value}}}}")
