"""From a recipe to the objects of a run. Config objects end here; below, functions take arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graft.actions.actions import Actions
from graft.algos.credit import CREDITS, Credit
from graft.algos.losses import LOSSES
from graft.algos.presets import Preset, build, make
from graft.algos.reductions import REDUCTIONS
from graft.algos.shaping import Shaping
from graft.config import Config, ConfigError
from graft.engine import ENGINES
from graft.envs import make as make_env
from graft.envs.base import Wrapper
from graft.envs.tooled import ToolEnv
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.device import choose_device, choose_dtype, has_kernels
from graft.models.gguf import gguf_shape, open_gguf, open_tokenizer
from graft.models.load import load_model, read_config, shape_of
from graft.models.lora import Lora, base_of, num_trained
from graft.models.shape import Shape
from graft.models.tree_attention import why_no_kernel
from graft.protocols import Engine, Env
from graft.registry import resolve
from graft.rewards.choose import make_reward
from graft.rollout.branch import Branch
from graft.rollout.episode import Setting
from graft.text.chat import Chat
from graft.text.tokenizer import Tokenizer
from graft.train.acting import actions_of, allowed_table, check_calls, with_actions
from graft.train.algorithm import branch_of, preset_of
from graft.train.checkpoint import ADAPTER_FOLDER, latest_model
from graft.train.footprint import num_parameters
from graft.train.learner import Learner, check_served
from graft.train.optimizer import Optimizer, schedule
from graft.train.plan import check_fits, choose_micro, has_reference, kv_tokens_for
from graft.train.room import room_on
from graft.types import Sampling, Task


@dataclass(slots=True)
class Parts:
    """Everything a loop works with."""

    config: Config
    tokenizer: Tokenizer
    chat: Chat
    policy: Decoder
    actions: Actions | None
    engine: Engine
    preset: Preset
    branch: Branch
    shape: Shaping
    credit: Credit
    returns: Credit | None
    setting: Setting
    held_out: Setting
    notes: list[str]
    weights: Path | None = None
    """The checkpoint that the run goes on from."""
    lora: Lora | None = None
    """Made when training begins: whoever only samples needs the merged weights alone."""


def assemble(config: Config, weights: Path | None = None) -> Parts:
    """Build a run; `weights` is the checkpoint to go on from, instead of the recipe's model."""
    device = choose_device(config.model.device)
    dtype, note = choose_dtype(config.model.dtype, device)
    preset = preset_of(config)
    refuse_critic(config, preset)
    source = weights or (latest_model(config.model.path) if config.model.path else None)
    tokenizer = load_tokenizer(config, source)
    env = env_factory(config, config.task.args, tokenizer)
    held_out = env_factory(config, {**config.task.args, **config.task.eval_args}, tokenizer)
    chat = Chat(tokenizer, config.model.chat_template or None)
    if is_chatty(config, env):
        chat.check_append_only()
    policy = load_policy(config, source, tokenizer)
    actions = actions_of(config, tokenizer, policy.shape.vocab_size)
    if actions is not None:
        policy = with_actions(policy, actions, source, config.actions.init_from_base)
    policy = policy.to(device=device, dtype=dtype)
    policy.recompute = choose_micro(config, policy.shape, dtype, room_on(device)).recompute
    check_calls(config, actions, env)
    branch = branch_of(config, preset, actions)
    engine = make_engine(config, policy, tokenizer, actions)
    shape, credit, _, _ = build(preset)
    setting = make_setting(config, engine, chat, env, actions)
    return Parts(
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
        setting=setting,
        held_out=replace(setting, make_env=held_out),
        notes=[text for text in (note, *kernel_notes(policy), tool_note(config, env)) if text]
        + lora_notes(config, policy.shape),
        weights=weights,
    )


def refuse_critic(config: Config, preset: Preset) -> None:
    if config.lora.rank and preset.needs_critic and config.train.steps:
        raise ConfigError(
            f"algo.name={config.algo.name} trains a critic, a second model as large as the policy, "
            f"and lora.rank={config.lora.rank} is there to avoid such a thing; take an algorithm "
            "without one, such as grpo, or lora.rank=0"
        )


def lora_notes(config: Config, shape: Shape) -> list[str]:
    lora = config.lora
    if not lora.rank:
        return []
    trained, total = num_trained(shape, lora.rank, lora.targets), num_parameters(shape)
    return [
        f"adapters of rank {lora.rank}: {trained:,} numbers are trained beside {total:,} of the model"
    ]


def make_lora(parts: Parts) -> Lora | None:
    """The run's adapters, the same in both phases: new ones, or those of its checkpoint."""
    config, policy, section = parts.config, parts.policy, parts.config.lora
    if not section.rank or parts.lora is not None:
        return parts.lora
    folder = None if parts.weights is None else parts.weights / ADAPTER_FOLDER
    origin = str(latest_model(config.model.path)) if folder is None else base_of(folder)
    base = None if folder is None else load_base(folder, origin, policy)
    parts.lora = Lora(
        policy,
        rank=section.rank,
        alpha=section.alpha,
        targets=section.targets,
        origin=origin,
        seed=config.run.seed,
        base=base,
    )
    if folder is not None:
        parts.lora.load(folder)
    return parts.lora


def load_base(folder: Path, origin: str, policy: Decoder) -> Decoder:
    """What the merged weights of a checkpoint were merged from, read from its own place."""
    if not Path(origin).exists():
        raise ConfigError(
            f"the adapters in '{folder}' belong on '{origin}', and nothing is there; put that model "
            "back, for they cannot be trained any further without it (the checkpoint itself is a "
            "whole model: a new run may start from it)"
        )
    base = load_model(origin, dtype=policy.dtype)
    if [p.shape for p in base.blocks.parameters()] != [p.shape for p in policy.blocks.parameters()]:
        raise ConfigError(
            f"the adapters in '{folder}' belong on '{origin}', and the model there has other sizes "
            "by now; give them back the model they were trained on"
        )
    return base


def kernel_notes(policy: Decoder) -> list[str]:
    """What runs slower than it could on a GPU, and why."""
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
    """Whether turns follow each other as chat messages, so that the template must only append."""
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
    config: Config, args: dict[str, Any], tokenizer: Tokenizer
) -> Callable[[Task], Env]:
    """A fresh environment for a task, in the recipe's wrappers."""
    env_id, wrappers = config.task.env, config.task.wrappers
    return lambda task: make_env(env_id, wrappers=wrappers, tokenizer=tokenizer, **args)


def load_tokenizer(config: Config, source: Path | None) -> Tokenizer:
    if source is not None:
        return open_tokenizer(source)
    alphabet = config.model.alphabet
    if alphabet == "bytes":
        return Tokenizer.bytes()
    if not alphabet and config.task.env:
        alphabet = getattr(make_env(config.task.env, **config.task.args), "alphabet", "")
    if not alphabet:
        raise ConfigError(
            f"model.alphabet is empty and environment {config.task.env!r} names no alphabet; "
            "give the characters, or model.alphabet=bytes"
        )
    return Tokenizer.characters(alphabet)


def load_policy(config: Config, source: Path | None, tokenizer: Tokenizer) -> Decoder:
    if source is not None:
        return load_model(source)
    return Decoder(new_shape(config, tokenizer)).initialise(config.run.seed)


def new_shape(config: Config, tokenizer: Tokenizer) -> Shape:
    """The shape of a model from scratch; its vocabulary is the tokenizer's."""
    given = dict(config.model.shape)
    known = {name for name in Shape.__dataclass_fields__ if name not in ("vocab_size", "extra")}
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"model.shape has no {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    return Shape(**given, vocab_size=tokenizer.vocab_size)


def recipe_shape(config: Config, weights: Path | None = None) -> Shape:
    """The shape of the model `assemble` would build, without reading a weight."""
    shape = _plain_shape(config, weights)
    if not config.actions.file:
        return shape
    source = weights or (latest_model(config.model.path) if config.model.path else None)
    actions = actions_of(config, load_tokenizer(config, source), shape.vocab_size)
    return replace(shape, extra=0 if actions is None else actions.space.extra)


def _plain_shape(config: Config, weights: Path | None) -> Shape:
    source = weights or (latest_model(config.model.path) if config.model.path else None)
    if source is None:
        return new_shape(config, load_tokenizer(config, None))
    if not source.exists():
        load_tokenizer(config, source)  # says what is missing, and how to get it
    if source.suffix == ".gguf":
        return gguf_shape(open_gguf(source), source)
    return shape_of(read_config(source), source / "config.json")


def refuse_what_cannot_fit(config: Config, weights: Path | None = None) -> None:
    """Before anything large is allocated."""
    device = choose_device(config.model.device)
    dtype, _ = choose_dtype(config.model.dtype, device)
    check_fits(config, recipe_shape(config, weights), dtype, room_on(device))


def make_engine(
    config: Config, policy: Decoder, tokenizer: Tokenizer, actions: Actions | None = None
) -> Engine:
    section = config.engine
    return resolve(section.name, ENGINES, "engine")(
        policy,
        tokenizer=tokenizer,
        eos_ids=() if tokenizer.eos_id is None else (tokenizer.eos_id,),
        kv_tokens=section.kv_tokens
        or kv_tokens_for(config, policy.shape, policy.dtype, room_on(policy.device)),
        page_size=section.page_size or None,
        seed=config.run.seed,
        space=None if actions is None else actions.space,
    )


def make_learner(parts: Parts, reference: Decoder | None) -> Learner:
    """The learner of the RL phase. A critic starts from the policy as it is now.

    With adapters there is no reference model: the adapters of this moment stand for it.
    """
    config, preset, policy = parts.config, parts.preset, parts.policy
    train = config.train
    _, _, loss, reduction = build(preset)
    rounds = train.epochs * train.minibatches
    plan = schedule(train.schedule, train.warmup * rounds, train.steps * rounds, train.min_lr)

    def optimizer(module: torch.nn.Module, lr: float) -> Optimizer:
        return Optimizer(
            [module],
            lr=lr,
            schedule=plan,
            weight_decay=train.weight_decay,
            betas=train.betas,
            max_grad_norm=train.max_grad_norm,
        )

    lora = make_lora(parts)
    critic = Critic(policy) if preset.needs_critic else None
    learner = Learner(
        policy=policy,
        optimizer=optimizer(lora or policy, train.lr),
        loss=loss,
        reduction=reduction,
        tokens_per_micro=micro_budget(config, policy),
        temperature=config.rollout.temperature,
        allowed=allowed_table(parts.actions, policy),
        critic=critic,
        critic_optimizer=optimizer(critic, config.algo.critic_lr or train.lr) if critic else None,
        value_clip=preset.value_clip,
        reference=reference,
        lora=lora,
        anchor=lora.snapshot() if lora is not None and has_reference(config) else None,
        epochs=train.epochs,
        minibatches=train.minibatches,
        seed=config.run.seed,
    )
    check_served(learner, parts.engine)
    return learner


def sft_learner(parts: Parts, steps: int) -> Learner:
    """The same learner with cross-entropy, and an optimizer of its own for so many steps."""
    config, policy, sft = parts.config, parts.policy, parts.config.sft
    lora = make_lora(parts)
    plan = schedule("linear", sft.warmup, steps, 0.1)
    optimizer = Optimizer(
        [lora or policy],
        lr=sft.lr,
        schedule=plan,
        weight_decay=config.train.weight_decay,
        betas=config.train.betas,
        max_grad_norm=config.train.max_grad_norm,
    )
    loss, reduction = make("sft", LOSSES, "loss"), make("token", REDUCTIONS, "reduction")
    learner = Learner(
        policy,
        optimizer,
        loss,
        reduction,
        micro_budget(config, policy),
        allowed=allowed_table(parts.actions, policy),
        lora=lora,
    )
    check_served(learner, parts.engine)
    return learner


def micro_budget(config: Config, policy: Decoder) -> int:
    """The recipe's, or what fits beside everything else."""
    return choose_micro(config, policy.shape, policy.dtype, room_on(policy.device)).tokens


def make_setting(
    config: Config,
    engine: Engine,
    chat: Chat,
    env: Callable[[Task], Env],
    actions: Actions | None = None,
) -> Setting:
    rollout = config.rollout
    return Setting(
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
