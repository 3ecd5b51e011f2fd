"""Settings that cannot learn, or not what they seem to: known before anything is loaded.

    rollout.samples=1 with grpo           one attempt has none to be compared with      fail
    rollout.samples=1, dynamic_rounds=4   a group of one never has any spread           fail
    rebn, one attempt of one turn         whitening one number gives 0                  fail
    train.warmup=50, train.steps=20       the learning rate never reaches its peak      warn
    rollout.max_context=8192              the model was made for 2048 positions         warn

A run stops at the first that fails, and says each of the others once; `graft doctor RECIPE` shows all.
"""

from __future__ import annotations

from typing import Any

from graft.algos.credit import CREDITS, cpo, dr_grpo, grpo, rebn, rloo
from graft.algos.presets import Preset
from graft.config import Config, ConfigError
from graft.registry import resolve
from graft.train.algorithm import preset_of
from graft.train.monitor.check import FAIL, WARN, Check

GROUP_RELATIVE = (grpo, dr_grpo, rloo, cpo)
"""Credits that compare the attempts at a task with each other."""
COLD = 0.1
"""A temperature below which attempts at a task are nearly all the same."""
STANDS_STILL = 1e-8
"""AdamW moves a weight by about the learning rate in an update: less than this in a whole run is
below the rounding of weights of usual size (0.02)."""


def compares_attempts(preset: Preset) -> str:
    """The name of the credit that compares attempts at the same task; "" if none does."""
    return next((name for name, made in _credits(preset) if made in GROUP_RELATIVE), "")


def _credits(preset: Preset) -> list[tuple[str, Any]]:
    names = [part if isinstance(part, str) else part[0] for part in preset.credit]
    return [(name, resolve(name, CREDITS, "credit")) for name in names]


def settings_checks(config: Config) -> list[Check]:
    """What is wrong with how a recipe's settings go together; empty where nothing is."""
    if not config.train.steps:
        return []
    preset = preset_of(config)
    found = [_one_attempt(config, preset), _one_number(config, preset), *_learning_rate(config)]
    if config.rollout.temperature < COLD:
        seen = (
            f"rollout.temperature={config.rollout.temperature:g}: attempts at a task will be nearly"
        )
        remedy = "take rollout.temperature=1; held-out tasks are attempted greedily too"
        found.append(
            Check("settings", WARN, f"{seen} the same, and equal ones teach nothing", remedy)
        )
    return [check for check in found if check is not None]


def _one_attempt(config: Config, preset: Preset) -> Check | None:
    if config.rollout.samples > 1:
        return None
    name, rounds = compares_attempts(preset), config.rollout.dynamic_rounds
    if name:
        return Check(
            "settings",
            FAIL,
            f"rollout.samples=1 with algo.name={config.algo.name}: its credit {name!r} compares the "
            "attempts at a task with each other, and there is one",
            "raise rollout.samples (8 is usual), or take algo.name=reinforce, rebn or ppo, which "
            "compare with the other tasks of the batch or with a critic",
        )
    if rounds > 1 or (preset.dynamic_sampling and rounds != 1):
        return Check(
            "settings",
            FAIL,
            "rollout.samples=1 with dynamic sampling: groups whose attempts all earn the same are "
            "replaced, and a group of one always does",
            "raise rollout.samples, or set rollout.dynamic_rounds=1",
        )
    return None


def _one_number(config: Config, preset: Preset) -> Check | None:
    rollout = config.rollout
    if rollout.tasks * rollout.samples > 1 or not any(made is rebn for _, made in _credits(preset)):
        return None
    seen = (
        f"rollout.tasks=1 and rollout.samples=1 with algo.name={config.algo.name}: 'rebn' compares "
        "the turns of a batch with each other, and"
    )
    remedy = "raise rollout.tasks (16 is usual)"
    if rollout.max_turns == 1:
        return Check("settings", FAIL, f"{seen} there is one: every advantage is 0", remedy)
    return Check("settings", WARN, f"{seen} they are those of one attempt", remedy)


def _learning_rate(config: Config) -> list[Check]:
    train = config.train
    found: list[Check] = []
    if train.warmup >= train.steps > 1:
        reached = train.lr * train.steps / max(train.warmup, 1)
        seen = (
            f"train.warmup={train.warmup} is not over within train.steps={train.steps}: the learning "
            f"rate rises to {reached:.3g}, and train.lr={train.lr:g} is"
        )
        reaches = (
            "reached in the last step alone" if train.warmup == train.steps else "never reached"
        )
        remedy = "lower train.warmup, or raise train.steps"
        found.append(Check("settings", WARN, f"{seen} {reaches}", remedy))
    moved = train.lr * train.steps * train.epochs * train.minibatches
    if moved < STANDS_STILL:
        seen = (
            f"train.lr={train.lr:g} moves a weight by about {moved:.1g} in the whole run: nothing will "
            "change"
        )
        found.append(
            Check("settings", WARN, seen, "1e-6 is usual for a model of a billion weights")
        )
    return found


def positions_check(config: Config, shape: Any) -> Check | None:
    """Whether an attempt may grow beyond the positions that the model was made for: every engine ends
    a turn there, whatever the recipe allows."""
    asked, most = config.rollout.max_context, shape.max_positions
    if asked <= most:
        return None
    scaling = dict(getattr(shape, "rope_scaling", None) or {})
    window = scaling.get("original_max_position_embeddings")
    reach = int(float(scaling.get("factor") or 1.0) * window) if window else most
    seen = (
        f"rollout.max_context={asked} is more than the {most} positions of the model "
        "(max_position_embeddings): attempts end there"
    )
    if config.sft.is_on:
        seen += ", and longer examples would be learned at positions it has never seen"
    remedy = f"set rollout.max_context={most}"
    if reach > most:
        remedy += (
            f". Its rope scaling reaches {reach}: max_position_embeddings={reach} in its config.json "
            "makes use of it"
        )
    return Check("positions", WARN, seen, remedy)


def graded_check(config: Config, env: Any) -> Check | None:
    """Whether somebody says what the attempts at a file of prompts are worth."""
    share = getattr(getattr(env, "unwrapped", env), "ungraded", 0.0)
    if not share or config.task.reward or not config.train.steps:
        return None
    seen = (
        f"{share:.0%} of the rows of task.env={config.task.env} have no answer, so attempts earn 0"
    )
    remedy = "set task.reward, or task.args.answer_key to the column of the answers"
    return Check("graded", FAIL if share == 1 else WARN, seen, remedy)


def refuse(checks: list[Check]) -> list[str]:
    """The remarks among these as notes; the first fault is an error."""
    for check in checks:
        if check.verdict == FAIL:
            raise ConfigError(f"{check.seen}; {check.remedy}")
    return [f"{check.seen}; {check.remedy}" for check in checks]
