"""The learner of each phase, from a recipe: optimizer, learning rates, adapters, critic, micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from graft.algos.losses import LOSSES
from graft.algos.presets import make
from graft.algos.reductions import REDUCTIONS
from graft.config import Config, ConfigError
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.io.hub import origin_of
from graft.models.lora.training import Lora, base_of
from graft.train.actions import allowed_table
from graft.train.components import RunComponents
from graft.train.distributed.collector import load_engines
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.learner import CHECKED, Learner, check_served
from graft.train.memory.device_memory import device_memory_of
from graft.train.memory.plan import choose_micro, has_reference
from graft.train.model import load_base
from graft.train.optimizer import Optimizer, Schedule, schedule
from graft.train.rollout_engine import NoEngine, is_external, ways
from graft.train.run_dir.checkpoint import ADAPTER_FOLDER, latest_model

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
        components.lora.load(folder)
    return components.lora


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
    train, preset = config.train, algo.preset
    plan = rate_plan(config)

    def optimizer(module: torch.nn.Module, lr: float) -> Optimizer:
        return Optimizer(
            [module],
            lr=lr,
            schedule=plan,
            weight_decay=train.weight_decay,
            betas=train.betas,
            max_grad_norm=train.max_grad_norm,
            processes=components.processes,
        )

    lora = make_lora(components)
    critic = make_critic(policy) if preset.needs_critic else None
    learner = Learner(
        policy=policy,
        optimizer=optimizer(lora or policy, train.lr),
        loss=algo.loss,
        reduction=algo.reduction,
        tokens_per_micro=micro_budget(config, policy, components.processes),
        temperature=config.rollout.temperature,
        allowed=allowed_table(components.actions, policy),
        critic=critic,
        critic_optimizer=optimizer(critic, config.algo.critic_lr or train.lr) if critic else None,
        value_clip=preset.value_clip,
        reference=reference,
        lora=lora,
        anchor=lora.snapshot() if lora is not None and has_reference(config) else None,
        epochs=train.epochs,
        minibatches=train.minibatches,
        seed=config.run.seed,
        processes=components.processes,
    )
    check_engine(components, learner)
    return learner


def rate_plan(config: Config) -> Schedule:
    """The factor on the learning rate of each update."""
    train = config.train
    rounds = train.epochs * train.minibatches
    return schedule(train.schedule, train.warmup * rounds, train.steps * rounds, train.min_lr)


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


def check_engine(components: RunComponents, learner: Learner) -> None:
    """Once in a run, where the engine may serve other weights than are trained: compare log-probs."""
    config, engine = components.config, components.engine
    is_certain = learner.lora is None and not is_external(config)
    if is_certain or components.is_checked or isinstance(engine, NoEngine):
        return

    def publish() -> None:
        load_engines(
            components.weights_to_publish(),
            engine.version,
            engine,
            components.processes,
            engine.load,
        )

    gap = check_served(learner, engine, publish, min(CHECKED, config.rollout.max_context - 1))
    components.is_checked = True
    if is_external(config):
        what = "log-probs" if learner.lora is None else "log-probs with adapters"
        components.notes.append(
            f"{config.engine.name}: {what} agree with the learner's, {gap:.1g} apart on average"
        )


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


def sft_learner(components: RunComponents, steps: int) -> Learner:
    """The learner of the SFT phase: cross-entropy, and its own optimizer for `steps` steps."""
    config, policy, sft = components.config, components.policy, components.config.sft
    lora = make_lora(components)
    plan = schedule("linear", sft.warmup, steps, 0.1)
    optimizer = Optimizer(
        [lora or policy],
        lr=sft.lr,
        schedule=plan,
        weight_decay=config.train.weight_decay,
        betas=config.train.betas,
        max_grad_norm=config.train.max_grad_norm,
        processes=components.processes,
    )
    loss, reduction = make("sft", LOSSES, "loss"), make("token", REDUCTIONS, "reduction")
    learner = Learner(
        policy,
        optimizer,
        loss,
        reduction,
        micro_budget(config, policy, components.processes),
        allowed=allowed_table(components.actions, policy),
        lora=lora,
        processes=components.processes,
    )
    check_engine(components, learner)
    return learner


def micro_budget(config: Config, policy: Any, processes: ProcessGroup = ALONE) -> int:
    """Tokens of a micro-batch: the recipe's number, or what fits into memory."""
    if not isinstance(policy, Decoder):  # its memory use is not known
        return config.train.tokens_per_micro or TRANSFORMERS_MICRO
    room = device_memory_of(policy.device, ways(config, processes))
    return choose_micro(config, policy.shape, policy.dtype, room).tokens
