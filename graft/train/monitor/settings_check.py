"""Checks of a recipe's settings before anything is loaded: settings that cannot learn, or hardly.

    rollout.samples=1 with grpo           one attempt has no others to compare with     fail
    rollout.samples=1, dynamic_rounds=4   a group of one never has any spread           fail
    rebn, one attempt of one turn         whitening one number gives 0                  fail
    train.warmup=50, train.steps=20       the learning rate never reaches its peak      warn
    rollout.max_context=8192              the model has 2048 positions                  warn

A run stops at the first that fails and prints each warning once; `graft doctor RECIPE` shows all.
"""

from __future__ import annotations

from typing import Any

from graft.algos.credits.scaling import rebn
from graft.algos.credits.table import CREDITS
from graft.algos.preset import Preset
from graft.config import Config, ConfigError
from graft.recipe.attempt_keys import EnvItem
from graft.registry import resolve
from graft.train.algorithm import preset_of, rounds_of
from graft.train.memory.workload import longest_context
from graft.train.monitor.check import FAIL, WARN, Check

GROUP_RELATIVE = tuple(
    CREDITS[name]
    for name in (
        *("grpo", "dr_grpo", "rloo", "cpo", "opo", "gpg", "maxrl", "grpo_passk", "pass_at_k"),
        *("gdpo", "gigpo", "treerpo", "optimal_token_baseline"),
    )
)
"""Credits that compare the attempts at a task."""
MIN_TEMPERATURE = 0.1
"""Below it, attempts at a task are nearly all the same."""
MIN_CHANGE = 1e-8
"""AdamW changes a weight by about the learning rate per update: less than this in a whole run is below
the rounding of weights of usual size (0.02)."""


def compares_attempts(preset: Preset) -> str:
    """The name of the credit that compares attempts at the same task; "" if none does."""
    return next((name for name, made in _credits(preset) if made in GROUP_RELATIVE), "")


def reads_rewards(preset: Preset) -> bool:
    """Whether a credit reads rewards; those of a teacher alone do not."""
    return any(made is not CREDITS["teacher_kl"] for _, made in _credits(preset))


def _credits(preset: Preset) -> list[tuple[str, Any]]:
    names = [part[0] if isinstance(part, tuple) else part for part in preset.credit]
    return [(name, resolve(name, CREDITS, "credit")) for name in names]


def settings_checks(config: Config) -> list[Check]:
    """Problems of a recipe's combination of settings; empty if there are none."""
    if not config.train.steps:
        return []
    preset = preset_of(config)
    found = [_one_attempt(config, preset), _one_number(config, preset), *_learning_rate(config)]
    if config.rollout.temperature < MIN_TEMPERATURE:
        seen = (
            f"rollout.temperature={config.rollout.temperature:g}: attempts at a task will be nearly the "
            "same, and equal attempts have no gradient"
        )
        remedy = "use rollout.temperature=1; held-out tasks are also attempted greedily"
        found.append(Check("settings", WARN, seen, remedy))
    return [check for check in found if check is not None]


def _one_attempt(config: Config, preset: Preset) -> Check | None:
    if config.rollout.samples > 1:
        return None
    if name := compares_attempts(preset):
        return Check(
            "settings",
            FAIL,
            f"rollout.samples=1 with algo.name={config.algo.name}: its credit {name!r} compares the "
            "attempts at a task, and there is only one",
            "raise rollout.samples (8 is usual), or use algo.name=reinforce, rebn or ppo, which "
            "compare with the other tasks of the batch or with a critic",
        )
    if rounds_of(config, preset) > 1:
        return Check(
            "settings",
            FAIL,
            "rollout.samples=1 with dynamic sampling: groups in which all attempts earn the same are "
            "replaced, and in a group of one they always do",
            "raise rollout.samples, or set rollout.dynamic_rounds=1",
        )
    return None


def _one_number(config: Config, preset: Preset) -> Check | None:
    rollout = config.rollout
    if rollout.tasks * rollout.samples > 1 or not any(made is rebn for _, made in _credits(preset)):
        return None
    seen = (
        f"rollout.tasks=1 and rollout.samples=1 with algo.name={config.algo.name}: 'rebn' compares "
        "the turns of a batch, and"
    )
    remedy = "raise rollout.tasks (16 is usual)"
    if rollout.max_turns == 1:
        return Check("settings", FAIL, f"{seen} there is only one: every advantage is 0", remedy)
    return Check("settings", WARN, f"{seen} all belong to one attempt", remedy)


def _learning_rate(config: Config) -> list[Check]:
    train = config.train
    found: list[Check] = []
    if train.warmup >= train.steps > 1:
        reached = train.lr * train.steps / max(train.warmup, 1)
        seen = (
            f"train.warmup={train.warmup} does not end within train.steps={train.steps}: the learning "
            f"rate rises to {reached:.3g}, and train.lr={train.lr:g} is"
        )
        reaches = (
            "reached in the last step only" if train.warmup == train.steps else "never reached"
        )
        remedy = "lower train.warmup, or raise train.steps"
        found.append(Check("settings", WARN, f"{seen} {reaches}", remedy))
    moved = train.lr * train.steps * train.epochs * train.minibatches
    if moved < MIN_CHANGE:
        seen = f"train.lr={train.lr:g} changes a weight by about {moved:.1g} in the whole run, which is "
        remedy = "1e-6 is usual for a model of a billion weights"
        found.append(Check("settings", WARN, f"{seen}below rounding", remedy))
    return found


def positions_check(config: Config, shape: Any) -> Check | None:
    """Whether attempts may exceed the model's positions, where every engine ends a turn."""
    context, most = longest_context(config), shape.max_positions
    if context <= most:
        return None
    section = "rollout" if context == config.rollout.max_context else "eval"
    scaling = dict(getattr(shape, "rope_scaling", None) or {})
    window = scaling.get("original_max_position_embeddings")
    reach = int(float(scaling.get("factor") or 1.0) * window) if window else most
    seen = (
        f"{section}.max_context={context} is more than the {most} positions of the model "
        "(max_position_embeddings): attempts end there"
    )
    if config.sft.is_on and config.rollout.max_context > most:
        seen += ", and longer examples would be learned at positions that it was not trained on"
    remedy = f"set {section}.max_context={most}"
    if reach > most:
        remedy += (
            f". Its rope scaling reaches {reach}: max_position_embeddings={reach} in its config.json "
            "enables it"
        )
    return Check("positions", WARN, seen, remedy)


def graded_check(config: Config, item: EnvItem, env: Any) -> Check | None:
    """Whether the attempts at a file of prompts get a reward."""
    share = getattr(getattr(env, "unwrapped", env), "ungraded", 0.0)
    # an agent may earn its reward itself; where it does not, the first attempt says so
    if not share or item.reward or config.task.agent or not config.train.steps:
        return None
    seen = f"{share:.0%} of the rows of task.env={item.label} have no answer, so attempts earn 0"
    remedy = "set task.reward, or task.args.answer_key to the column of the answers"
    return Check("graded", FAIL if share == 1 else WARN, seen, remedy)


def refuse(checks: list[Check]) -> list[str]:
    """Warnings as notes; the first failed check is an error."""
    for check in checks:
        if check.verdict == FAIL:
            raise ConfigError(f"{check.seen}; {check.remedy}")
    return [f"{check.seen}; {check.remedy}" for check in checks]
