"""The learner of each phase, from a recipe: optimizer, learning rates, adapters, critic, micro-batches."""

from __future__ import annotations

import math
from typing import Any

import torch

from graft.algos.losses.table import LOSSES
from graft.algos.losses.terms import with_kl
from graft.algos.parts import make
from graft.algos.presets import needs_old_logprobs, users_parts
from graft.algos.reductions import REDUCTIONS
from graft.config import Config, ConfigError
from graft.models.action_rows import ActionRows
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.io.hub import origin_of
from graft.models.lora.files import base_of, load_adapters
from graft.models.lora.training import Lora
from graft.train.actions import allowed_table
from graft.train.components import RunComponents
from graft.train.distributed.process_group import ProcessGroup
from graft.train.learner import Learner
from graft.train.memory.device_memory import device_memory_of
from graft.train.memory.plan import choose_micro, has_reference
from graft.train.model import load_base
from graft.train.optimizer import Optimizer, Schedule, schedule
from graft.train.rollouts.engine_check import check_engine
from graft.train.rollouts.rollout_engine import ways
from graft.train.rollouts.truncation import truncation_of
from graft.train.run_dir.checkpoint import ADAPTER_FOLDER, latest_model
from graft.train.teachers.build import make_teachers

TRANSFORMERS_MICRO = 2048
"""Tokens of a micro-batch of a model that transformers computes, where the recipe gives no number."""


def make_lora(components: RunComponents) -> Lora | None:
    """The run's adapters, the same in both phases: new ones, or those of its checkpoint."""
    config, policy, section = components.config, components.policy, components.config.lora
    if not section.rank or components.lora is not None:
        return components.lora
    folder = None if components.weights is None else components.weights / ADAPTER_FOLDER
    origin = _origin(config) if folder is None else base_of(folder)
    base = None if folder is None else load_base(folder, origin, policy)
    components.lora = Lora(
        policy,
        rank=section.rank,
        alpha=section.alpha,
        targets=section.targets,
        origin=origin,
        seed=config.run.seed,
        base=base,
    )
    if folder is not None:
        load_adapters(components.lora, folder)
    return components.lora


def make_rows(components: RunComponents) -> ActionRows | None:
    """The head rows of actions, where the recipe trains nothing else; the same in both phases."""
    if components.config.actions.freeze_base and components.rows is None:
        components.rows = ActionRows(components.policy)
    return components.rows


def _origin(config: Config) -> str:
    """The recipe's model as adapters name their base: a hub name with its commit, or a path."""
    path = latest_model(config.model.path)
    named = origin_of(path)
    return str(path) if named is None else "@".join(named)


def make_learner(components: RunComponents, reference: Decoder | None) -> Learner:
    """The learner of the RL phase. A critic starts from the present policy.

    With adapters there is no reference model: the present adapters are kept as the reference.
    """
    config, algo, policy = components.config, components.algo, components.policy
    train, preset, plan = config.train, algo.preset, rate_plan(config)
    lora, rows = make_lora(components), make_rows(components)
    critic = critic_optimizer = None
    if preset.needs_critic:
        critic, critic_lr = make_critic(policy), config.algo.critic_lr or train.lr
        critic_optimizer = make_optimizer(components, critic, critic_lr, plan)
    learner = Learner(
        policy=policy,
        optimizer=make_optimizer(components, lora or rows or policy, train.lr, plan),
        loss=algo.loss,
        reduction=algo.reduction,
        tokens_per_micro=micro_budget(config, policy, components.processes),
        temperature=config.rollout.temperature,
        truncation=truncation_of(config),
        allowed=allowed_table(components.actions, policy),
        critic=critic,
        critic_optimizer=critic_optimizer,
        value_clip=preset.value_clip,
        value_reduction=preset.value_reduction,
        reference=reference,
        lora=lora,
        rows=rows,
        anchor=lora.snapshot() if lora is not None and has_reference(config) else None,
        reference_sync=preset.reference_sync,
        old_is_engine=preset.old_policy == "engine",
        needs_old=needs_old_logprobs(preset),
        observation_coef=preset.observation_coef,
        router_balance=train.router_balance,
        router_z=train.router_z,
        epochs=train.epochs,
        minibatches=train.minibatches,
        seed=config.run.seed,
        processes=components.processes,
        teachers=make_teachers(components),
        users_parts=users_parts(preset),
        with_collisions="collisions" in algo.credit.needs,
    )
    if preset.reference_sync and learner.is_joint and policy.shape.extra:
        raise ConfigError(
            "algo.reference_sync copies the rows of tokens into the reference, and here processes hold parts "
            "of a head that has rows of actions too; take parallel.shard=false and parallel.tp=1"
        )
    check_engine(components, learner)
    return learner


def make_optimizer(
    components: RunComponents, module: torch.nn.Module, lr: float, plan: Schedule
) -> Optimizer:
    train = components.config.train
    return Optimizer(
        [module],
        lr=lr,
        schedule=plan,
        weight_decay=train.weight_decay,
        betas=train.betas,
        max_grad_norm=train.max_grad_norm,
        processes=components.processes,
    )


def rate_plan(config: Config) -> Schedule:
    """The factor on the learning rate of each update."""
    train = config.train
    rounds = train.epochs * train.minibatches
    return schedule(train.schedule, train.warmup * rounds, train.steps * rounds, train.min_lr)


def sft_rate_plan(config: Config, steps: int) -> Schedule:
    """The factor on sft.lr of each of `steps` steps."""
    sft = config.sft
    # a share is rounded up, as transformers does
    warmup = math.ceil(sft.warmup * steps) if 0 < sft.warmup < 1 else int(sft.warmup)
    return schedule(sft.schedule, warmup, steps, sft.min_lr)


def rates_of(config: Config) -> dict[str, Any]:
    """The settings of the learning rates besides train.steps, by key."""
    train = config.train
    return {
        "train.lr": train.lr,
        "train.schedule": train.schedule,
        "train.warmup": train.warmup,
        "train.min_lr": train.min_lr,
        "algo.critic_lr": config.algo.critic_lr,
    }


def set_rates(learner: Learner, config: Config) -> None:
    """Continue with the learning rates of `config`."""
    learner.optimizer.lr, learner.optimizer.schedule = config.train.lr, rate_plan(config)
    if (critic := learner.critic_optimizer) is not None:
        critic.lr = config.algo.critic_lr or config.train.lr
        critic.schedule = learner.optimizer.schedule


def make_critic(policy: Any) -> Any:
    if not isinstance(policy, Decoder):
        raise ConfigError(
            f"a critic needs one of our own decoders, and this model ({policy.shape.family}) trains as "
            "transformers computes it; take an algorithm without a critic, such as grpo"
        )
    if policy.is_whole:
        return Critic(policy)
    from graft.models.parallel.critic import sharded_critic

    return sharded_critic(policy)  # type: ignore[arg-type]


def sft_learner(components: RunComponents, steps: int, reference: Decoder | None = None) -> Learner:
    """The learner of the SFT phase: cross-entropy, and its own optimizer for `steps` steps.

    With sft.kl_coef also a KL: to `reference`, or to the present adapters.
    """
    config, policy, sft = components.config, components.policy, components.config.sft
    lora, rows = make_lora(components), make_rows(components)
    plan = sft_rate_plan(config, steps)
    optimizer = make_optimizer(components, lora or rows or policy, sft.lr, plan)
    loss, reduction = make("sft", LOSSES, "loss"), make("token", REDUCTIONS, "reduction")
    if sft.kl_coef:
        loss = with_kl(loss, sft.kl_coef)
    learner = Learner(
        policy,
        optimizer,
        loss,
        reduction,
        micro_budget(config, policy, components.processes),
        allowed=allowed_table(components.actions, policy),
        reference=reference,
        lora=lora,
        anchor=lora.snapshot() if lora is not None and sft.kl_coef else None,
        rows=rows,
        router_balance=config.train.router_balance,
        router_z=config.train.router_z,
        processes=components.processes,
    )
    check_engine(components, learner)
    return learner


def micro_budget(config: Config, policy: Any, processes: ProcessGroup) -> int:
    """Tokens of a micro-batch: the recipe's number, or what fits into memory."""
    if not isinstance(policy, Decoder):  # its memory use is not known
        return config.train.tokens_per_micro or TRANSFORMERS_MICRO
    room = device_memory_of(policy.device, ways(config, processes))
    return choose_micro(config, policy.shape, policy.dtype, room).tokens
