"""From a recipe to the objects of a run. Config objects end here; below, functions take arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.actions.actions import Actions
from graft.algos.credit import CREDITS, Credit
from graft.algos.losses import LOSSES
from graft.algos.presets import Preset, build, make
from graft.algos.reductions import REDUCTIONS
from graft.algos.shaping import Shaping
from graft.config import Config, ConfigError
from graft.envs import make as make_env
from graft.envs.base import Wrapper
from graft.envs.tool_env import ToolEnv
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.device import choose_device, choose_dtype, has_kernels
from graft.models.io.hub import origin_of
from graft.models.lora.training import Lora, base_of, num_trained
from graft.models.policy import weights_of
from graft.models.shape import ModelShape
from graft.models.tree.attention import why_no_kernel
from graft.protocols import Engine, Env
from graft.rewards import make_reward
from graft.rollout.branches.branch import Branch
from graft.rollout.collectors.request import CollectorConfig
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.actions import allowed_table, check_calls
from graft.train.algorithm import branch_of, branch_part, preset_of
from graft.train.distributed.collector import load_engines
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.learner import CHECKED, Learner, check_served
from graft.train.memory.device_memory import device_memory_of
from graft.train.memory.footprint import num_parameters
from graft.train.memory.plan import choose_micro, has_reference
from graft.train.model import load_base, load_tokenizer, make_chat, open_policy, source_of
from graft.train.optimizer import Optimizer, Schedule, schedule
from graft.train.rollout_engine import (
    NoEngine,
    is_external,
    known_elsewhere,
    make_engine,
    make_external,
    refuse_external,
    refuse_working_ahead,
    shares_weights,
    ways,
)
from graft.train.run_dir.checkpoint import ADAPTER_FOLDER, latest_model
from graft.types import Sampling, Task

FOREIGN_MICRO = 2048
"""Tokens of a micro-batch of a model that is not ours, where the recipe does not say."""


@dataclass(slots=True)
class RunComponents:
    """Everything a loop works with."""

    config: Config
    tokenizer: FastTokenizer
    chat: Chat
    policy: Any
    """What is trained: a decoder, one that is split over processes, or a model of transformers'."""
    actions: Actions | None
    engine: Engine
    preset: Preset
    branch: Branch
    shape: Shaping
    credit: Credit
    returns: Credit | None
    setup: RolloutSetup
    held_out: RolloutSetup
    notes: list[str]
    weights: Path | None = None
    """The checkpoint that the run goes on from."""
    lora: Lora | None = None
    """Made when training begins: whoever only samples needs the merged weights alone."""
    shares_weights: bool = True
    """Whether the engine samples from the learner's own tensors."""
    processes: ProcessGroup = ALONE

    is_checked: bool = False
    """Whether engine and learner were seen to agree."""

    @property
    def entropy_top_k(self) -> int:
        """Likeliest tokens that the engine's entropies know of; 0: all."""
        return getattr(self.engine, "entropy_top_k", 0)

    @property
    def collector_config(self) -> CollectorConfig:
        """What a collector of this run needs."""
        limits = self.config.rollout
        return CollectorConfig(
            self.setup, self.held_out, self.branch, limits.concurrency, limits.samples
        )

    @property
    def is_ahead(self) -> bool:
        """Whether episodes are sampled while others are learned from."""
        return self.config.rollout.staleness > 0

    def published(self) -> Mapping[str, Tensor] | None:
        """The weights that whoever samples needs; None: it has them."""
        return None if self.shares_weights else weights_of(self.policy)


def build_run(
    config: Config,
    weights: Path | None = None,
    processes: ProcessGroup = ALONE,
    samples: bool = True,
) -> RunComponents:
    """Build a run; `weights` is the checkpoint to go on from, instead of the recipe's model.

    Without `samples` there is no engine in this process: others attempt the tasks.
    """
    device = choose_device(config.model.device)
    dtype, note = choose_dtype(config.model.dtype, device)
    preset = preset_of(config)
    refuse_critic(config, preset)
    refuse_layout(config, processes)
    refuse_external(config, branch_part(config, preset)[0], processes, samples)
    source = source_of(config, weights)
    tokenizer = load_tokenizer(config, source)
    env = env_factory(config, config.task.args, tokenizer)
    held_out = env_factory(config, {**config.task.args, **config.task.eval_args}, tokenizer)
    chat = make_chat(config, tokenizer)
    history = chat.history_note() if is_chatty(config, env) or config.sft.data else ""
    is_shared = shares_weights(config, processes)
    policy, sampled, actions = open_policy(
        config, source, tokenizer, device, dtype, processes, is_shared, samples
    )
    check_calls(config, actions, env)
    branch = branch_of(config, preset, actions)
    is_dynamic = (config.rollout.dynamic_rounds or 2) > 1 and (
        preset.dynamic_sampling or config.rollout.dynamic_rounds > 1
    )
    refuse_working_ahead(config, branch, is_dynamic)
    if not samples:
        vocab_size = policy.shape.vocab_size
        engine: Engine = NoEngine(vocab_size, known_elsewhere(config, vocab_size))
    elif is_external(config):
        engine = make_external(config, policy, tokenizer, source, processes)
    else:
        engine = make_engine(config, sampled, tokenizer, actions, processes)
    shape, credit, _, _ = build(preset)
    setup = make_setup(config, engine, chat, env, actions)
    notes = [note, *policy_notes(policy), tool_note(config, env), stale_note(config, preset)]
    notes += [entropy_note(config, engine), history]
    return RunComponents(
        config=config,
        tokenizer=tokenizer,
        chat=chat,
        policy=policy,
        actions=actions,
        engine=engine,
        preset=preset,
        branch=branch,
        shape=shape,
        credit=credit,
        returns=None if preset.returns is None else make(preset.returns, CREDITS, "credit"),
        setup=setup,
        held_out=replace(setup, make_env=held_out),
        notes=[text for text in notes if text] + lora_notes(config, policy.shape),
        weights=weights,
        shares_weights=is_shared,
        processes=processes,
    )


def entropy_note(config: Config, engine: Engine) -> str:
    known = getattr(engine, "entropy_top_k", 0)
    if not known:
        return ""
    return (
        f"{config.engine.name} tells the {known} likeliest tokens: entropies of what it samples are "
        "lower bounds (sampling/entropy_top_k)"
    )


def stale_note(config: Config, preset: Preset) -> str:
    if not config.rollout.staleness or config.algo.importance_cap is not None:
        return ""
    return (
        f"tokens may be up to {config.rollout.staleness} versions old, so each is weighed by how likely "
        f"it is now, at most {preset.importance_cap:g} times (algo.importance_cap)"
    )


def refuse_critic(config: Config, preset: Preset) -> None:
    if config.lora.rank and preset.needs_critic and config.train.steps:
        raise ConfigError(
            f"algo.name={config.algo.name} trains a critic, a second model as large as the policy, "
            f"and lora.rank={config.lora.rank} is there to avoid such a thing; take an algorithm "
            "without one, such as grpo, or lora.rank=0"
        )


def refuse_layout(config: Config, processes: ProcessGroup) -> None:
    """What several processes cannot do together."""
    parallel, world = config.parallel, processes.world
    if config.lora.rank and world > 1 and (parallel.shard or parallel.tp > 1):
        raise ConfigError(
            f"lora.rank={config.lora.rank} puts adapters on whole matrices, and {world} processes would "
            f"split them (parallel.shard={str(parallel.shard).lower()}, parallel.tp={parallel.tp}). "
            "Adapters are small: use parallel.shard=false and parallel.tp=1, and each process holds all"
        )
    if not parallel.shard and 1 < parallel.tp < world:
        raise ConfigError(
            f"parallel.shard=false lets each of {world // parallel.tp} groups of parallel.tp="
            f"{parallel.tp} processes hold all weights, which layers that are split are not made for; "
            f"leave parallel.shard out, or take parallel.tp=1"
        )


def lora_notes(config: Config, shape: ModelShape) -> list[str]:
    lora = config.lora
    if not lora.rank:
        return []
    trained, total = num_trained(shape, lora.rank, lora.targets), num_parameters(shape)
    return [
        f"adapters of rank {lora.rank}: {trained:,} numbers are trained beside {total:,} of the model"
    ]


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


def policy_notes(policy: Any) -> list[str]:
    """What runs slower than it could on a GPU, or with another model, and why."""
    if not isinstance(policy, Decoder):
        return [f"{policy.shape.family} trains as transformers computes it", *policy.notes]
    if policy.device.type != "cuda":
        return []
    if not has_kernels(policy.device):
        return [
            "triton is not installed, so plain PyTorch computes what kernels would, many times "
            "slower; pip install triton"
        ]
    why = why_no_kernel(policy.shape.head_dim, policy.dtype, policy.device)
    return [f"training attention runs in plain PyTorch, slower: {why}"] if why else []


def is_chatty(config: Config, env: Callable[[Task], Env]) -> bool:
    """Whether turns follow each other as chat messages, which a template may rewrite."""
    if not config.task.env or config.rollout.max_turns == 1:
        return False
    return env(Task("probe", config.task.env)).observe_as in ("user", "tool")


def tool_note(config: Config, env: Callable[[Task], Env]) -> str:
    """Which tools an attempt may call, and how often; "" where there are none."""
    if not config.task.env:
        return ""
    posed = env(Task("probe", config.task.env))
    found: list[str] = []
    while isinstance(posed, Wrapper):
        if isinstance(posed, ToolEnv) and posed.tools:
            limit = "any number of" if posed.max_uses is None else f"at most {posed.max_uses}"
            found.append(f"{', '.join(posed.tools)} ({limit} calls an attempt)")
        posed = posed.env
    return f"tools: {'; '.join(found)}" if found else ""


def env_factory(
    config: Config, args: dict[str, Any], tokenizer: FastTokenizer
) -> Callable[[Task], Env]:
    """A fresh environment for a task, in the recipe's wrappers."""
    env_id, wrappers, model = config.task.env, config.task.wrappers, config.model
    if wrappers and (model.chat_template or model.template_args):
        tokenizer.chat = make_chat(config, tokenizer)
    return lambda task: make_env(env_id, wrappers=wrappers, tokenizer=tokenizer, **args)


def make_learner(components: RunComponents, reference: Decoder | None) -> Learner:
    """The learner of the RL phase. A critic starts from the policy as it is now.

    With adapters there is no reference model: the adapters of this moment stand for it.
    """
    config, preset, policy = components.config, components.preset, components.policy
    train = config.train
    _, _, loss, reduction = build(preset)
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
        loss=loss,
        reduction=reduction,
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
    """The factor on the learning rate, update by update."""
    train = config.train
    rounds = train.epochs * train.minibatches
    return schedule(train.schedule, train.warmup * rounds, train.steps * rounds, train.min_lr)


def rates_of(config: Config) -> dict[str, Any]:
    """What the learning rates depend on besides train.steps, by key."""
    train = config.train
    return {
        "train.lr": train.lr,
        "train.schedule": train.schedule,
        "train.warmup": train.warmup,
        "train.min_lr": train.min_lr,
        "algo.critic_lr": config.algo.critic_lr,
    }


def set_rates(learner: Learner, config: Config) -> None:
    """Learn on with the learning rates of `config`."""
    learner.optimizer.lr, learner.optimizer.schedule = config.train.lr, rate_plan(config)
    if (critic := learner.critic_optimizer) is not None:
        critic.lr = config.algo.critic_lr or config.train.lr
        critic.schedule = learner.optimizer.schedule


def check_engine(components: RunComponents, learner: Learner) -> None:
    """Once in a run, where it is not plain that the engine serves what is trained."""
    config, engine = components.config, components.engine
    is_plain = learner.lora is None and not is_external(config)
    if is_plain or components.is_checked or isinstance(engine, NoEngine):
        return

    def publish() -> None:
        load_engines(
            components.published(), engine.version, engine, components.processes, engine.load
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
    """The same learner with cross-entropy, and an optimizer of its own for so many steps."""
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
    """The recipe's, or what fits beside everything else."""
    if not isinstance(policy, Decoder):  # nobody has counted what it keeps
        return config.train.tokens_per_micro or FOREIGN_MICRO
    room = device_memory_of(policy.device, ways(config, processes))
    return choose_micro(config, policy.shape, policy.dtype, room).tokens


def make_setup(
    config: Config,
    engine: Engine,
    chat: Chat,
    env: Callable[[Task], Env],
    actions: Actions | None = None,
) -> RolloutSetup:
    rollout = config.rollout
    try:
        chat.tokenizer.encode(config.task.prefill)
    except ValueError as error:
        raise ConfigError(f"task.prefill={config.task.prefill!r}: {error}") from error
    return RolloutSetup(
        engine=engine,
        chat=chat,
        make_env=env,
        sampling=Sampling(temperature=rollout.temperature, max_tokens=rollout.max_tokens),
        reward=make_reward(config.task.reward) if config.task.reward else None,
        max_turns=rollout.max_turns,
        max_context=rollout.max_context,
        deadline=rollout.deadline,
        actions=actions,
        prefill=config.task.prefill,
    )
