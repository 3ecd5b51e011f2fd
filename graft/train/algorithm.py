"""Build the parts of a recipe's algorithm: the preset with the recipe's changes, and the branch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graft.actions.actions import Actions
from graft.algos.parts import make
from graft.algos.preset import Preset
from graft.algos.presets import resolve_preset
from graft.config import Config, ConfigError
from graft.registry import resolve
from graft.rollout.branches.branch import BRANCHES, Branch
from graft.rollout.branches.counterfactual import Counterfactual
from graft.train.algorithm_check import refuse_combinations

DYNAMIC_ROUNDS = 4
"""Draws per step of a preset that replaces flat groups (DAPO), where the recipe gives no number."""

AS_GIVEN = (
    "old_policy", "importance_cap", "kl_corrected", "kl_control", "entropy_coef", "entropy_control",
    "reference_sync", "observation_coef",
)  # fmt: skip
"""Keys of `algo` that replace the preset's value where the recipe gives one."""

STALE_CAP = 2.0
"""Cap of the importance weight of tokens that older weights drew, where the preset has none."""


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
