"""Settings of an algorithm that cannot work together, or that nothing reads."""

from __future__ import annotations

from itertools import pairwise

from graft.algos.credits.table import CREDITS, FROM_ADVANTAGES
from graft.algos.parts import is_users_part, part_name
from graft.algos.preset import Preset, kl_in_reward_of
from graft.config import Config, ConfigError
from graft.train.rollouts.truncation import truncation_of
from graft.train.teachers.paths import REFERENCE

CRITICS = ("gae", "gae_returns")
"""Credits that read a critic's values."""
WITHOUT_ADVANTAGES = ("distillation", "sampled_kl", "sft")
"""Losses that do not read advantages."""


def refuse_combinations(config: Config, preset: Preset) -> None:
    """Settings that have no meaning together."""
    if preset.reference_sync and preset.reference_sync[1] < 1 and config.lora.rank:
        steps, share = preset.reference_sync
        raise ConfigError(
            f"algo.reference_sync=[{steps}, {share:g}] mixes two models, and the mean of two adapters is not "
            f"the adapter of the mean; with lora.rank take algo.reference_sync=[{steps}, 1]"
        )
    if preset.observation_coef and config.actions.file:
        raise ConfigError(
            "algo.observation_coef trains the tokens of observations, and actions.file allows some of them "
            "nowhere; take one of the two"
        )
    if preset.observation_coef and truncation_of(config) is not None:
        raise ConfigError(
            "algo.observation_coef needs the log-probs of whole distributions, and rollout.top_p, top_k or "
            "min_p cut them; set them to keep every token"
        )
    if preset.old_policy == "engine" and preset.importance_cap:
        raise ConfigError(
            f"algo.importance_cap={preset.importance_cap:g} bounds the weight of the old policy against the "
            "engine, and under algo.old_policy=engine the two are one, so that every weight is 1; leave "
            "algo.importance_cap out, or take algo.old_policy=learner"
        )
    if config.train.steps:
        _refuse_kl(config, preset)
        _refuse_critic(config, preset)
        _refuse_credits(config, preset)


def _refuse_kl(config: Config, preset: Preset) -> None:
    algo, in_reward = config.algo, bool(kl_in_reward_of(preset))
    has_kl = bool(preset.kl_coef or in_reward)
    if preset.kl_control is not None and not has_kl:
        raise ConfigError(
            "algo.kl_control changes the coefficient of the KL by a factor, and algo.kl_coef is 0; set its "
            "first value, such as algo.kl_coef=0.01"
        )
    if preset.reference_sync and not (has_kl or REFERENCE in config.distill.teachers.values()):
        raise ConfigError(
            "algo.reference_sync moves the reference of a KL term or a teacher, and there is none; set "
            "algo.kl_coef or distill.teacher=reference, or leave algo.reference_sync out"
        )
    given = {
        "kl_kind": algo.kl_kind is not None,
        "kl_in": algo.kl_in == "reward",
        "kl_corrected": bool(algo.kl_corrected),
    }
    idle = [f"algo.{name}={getattr(algo, name)}" for name, is_given in given.items() if is_given]
    if idle and not has_kl and algo.kl_coef is None:
        raise ConfigError(
            f"{idle[0]} belongs to a KL term, and algo.name={algo.name} has none; set algo.kl_coef, such as "
            f"algo.kl_coef=0.01, or leave {idle[0].partition('=')[0]} out"
        )
    if (in_reward or algo.overlong) and not _reads_rewards(preset):
        what = "algo.kl_in=reward" if in_reward else f"algo.overlong={algo.overlong}"
        raise ConfigError(
            f"{what} changes rewards, and algo.name={algo.name} reads none: a teacher is all it learns from; "
            f"take {'algo.kl_in=loss' if in_reward else 'a credit of rewards'}, or algo.name=mopd, which "
            "reads both"
        )


def _reads_rewards(preset: Preset) -> bool:
    if part_name(preset.loss) in WITHOUT_ADVANTAGES:
        return False
    return any(part_name(part) not in FROM_ADVANTAGES for part in preset.credit)


def _refuse_critic(config: Config, preset: Preset) -> None:
    name, names = config.algo.name, [part_name(part) for part in preset.credit]
    read = [one for one in names if one in CRITICS]
    if read and not preset.needs_critic:
        raise ConfigError(
            f"the credit {read[0]!r} reads the values of a critic, and algo.name={name} trains none; take "
            "algo.name=ppo, whose loss and reduction can be replaced too"
        )
    if preset.needs_critic and not read and not any(map(is_users_part, preset.credit)):
        raise ConfigError(
            f"algo.name={name} trains a critic, and algo.credit=[{', '.join(names)}] does not read its "
            "values; add gae, or take an algorithm without a critic, such as grpo"
        )
    if config.algo.critic_lr and not preset.needs_critic:
        raise ConfigError(
            f"algo.critic_lr={config.algo.critic_lr:g} is the learning rate of a critic, and algo.name="
            f"{name} trains none; leave it out, or take algo.name=ppo"
        )


def _refuse_credits(config: Config, preset: Preset) -> None:
    names = [part_name(part) for part in preset.credit]
    if config.algo.credit and (loss := part_name(preset.loss)) in WITHOUT_ADVANTAGES:
        raise ConfigError(
            f"algo.credit=[{', '.join(names)}] computes advantages, and the loss {loss!r} reads none; leave "
            "algo.credit out, or take another loss, such as algo.loss=clip"
        )
    if names and names[0] in FROM_ADVANTAGES and names[0] != "teacher_kl":
        raise ConfigError(
            f"algo.credit begins with {names[0]!r}, which changes advantages, and there are none yet; put "
            f"one of rewards before it, as in [grpo, {names[0]}]"
        )
    for before, name in pairwise(names):
        if name in CREDITS and name not in FROM_ADVANTAGES:
            raise ConfigError(
                f"algo.credit: {name!r} computes advantages from rewards and replaces those of {before!r} "
                f"before it; put {name!r} first, or leave {before!r} out"
            )
    # without an environment, as in a replay, rewards come with the rows
    envs = config.task.envs
    has_several = any(isinstance(item.reward, list) and len(item.reward) > 1 for item in envs)
    if "gdpo" in names and envs and not has_several and not config.task.agent:
        raise ConfigError(
            "the credit 'gdpo' compares several rewards one by one, and task.reward is not a list of two or "
            "more (a function that returns a dict is one reward, its score); write one function per part, "
            "or take algo.name=grpo"
        )
    for part in preset.credit:
        k = part[1].get("k", 4) if isinstance(part, tuple) else 4
        if part_name(part) == "pass_at_k" and config.rollout.samples <= k:
            raise ConfigError(
                f"the credit 'pass_at_k' compares sets of k={k} attempts at a task, and "
                f"rollout.samples={config.rollout.samples} makes one set or none, so all advantages are 0; "
                f"raise rollout.samples above {k}, or lower k"
            )
