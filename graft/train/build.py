"""From a recipe to the objects of a run. Config objects end here; below, functions take arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.actions.actions import Actions
from graft.algos.presets import Preset
from graft.config import Config, ConfigError
from graft.envs import make as make_env
from graft.envs.base import Wrapper
from graft.envs.tool_env import ToolEnv
from graft.models.decoder import Decoder
from graft.models.device import choose_device, choose_dtype, has_kernels
from graft.models.lora.training import num_trained
from graft.models.shape import ModelShape
from graft.models.tree.attention import why_no_kernel
from graft.protocols import Engine, Env
from graft.rewards import make_reward
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.actions import check_calls, check_head
from graft.train.algorithm import Algorithm, branch_of, branch_part, preset_of, rounds_of
from graft.train.components import RunComponents
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.memory.footprint import num_parameters
from graft.train.model import load_tokenizer, make_chat, open_policy, source_of
from graft.train.rollout_engine import (
    NoEngine,
    engine_tp,
    is_external,
    known_elsewhere,
    make_engine,
    make_external,
    refuse_async,
    refuse_engine_group,
    refuse_external,
    shares_weights,
    ways,
)
from graft.train.truncation import refuse_truncation
from graft.types import Sampling, Task


def build_run(
    config: Config,
    weights: Path | None = None,
    processes: ProcessGroup = ALONE,
    with_engine: bool = True,
) -> RunComponents:
    """Build a run; `weights` is the checkpoint to continue from, instead of the recipe's model.

    `with_engine` False: no task is attempted in this process.
    """
    device = choose_device(config.model.device)
    dtype, note = choose_dtype(config.model.dtype, device)
    preset = preset_of(config)
    refuse_critic(config, preset)
    refuse_layout(config, processes)
    refuse_external(config, branch_part(config, preset)[0])
    refuse_engine_group(config, processes, with_engine)
    refuse_truncation(config, branch_part(config, preset)[0])
    source = source_of(config, weights)
    tokenizer = load_tokenizer(config, source)
    env = env_factory(config, config.task.args, tokenizer)
    held_out = env_factory(config, {**config.task.args, **config.task.eval_args}, tokenizer)
    chat = make_chat(config, tokenizer)
    history = chat.history_note() if is_chatty(config, env) or config.sft.data else ""
    is_shared = shares_weights(config, processes)
    group = processes.engine_group(engine_tp(config)) if with_engine else None
    policy, sampled, actions = open_policy(
        config, source, tokenizer, device, dtype, processes, is_shared, with_engine, group
    )
    check_calls(config, actions, env)
    check_head(config, actions, is_split=ways(config, processes) > 1)
    branch = branch_of(config, preset, actions)
    refuse_async(config, branch, is_dynamic=rounds_of(config, preset) > 1)
    if not with_engine:
        vocab_size = policy.shape.vocab_size
        engine: Engine = NoEngine(vocab_size, known_elsewhere(config, vocab_size))
    elif is_external(config):
        engine = make_external(config, policy, tokenizer, source, processes, group)
    else:
        engine = make_engine(config, sampled, tokenizer, actions, processes, group)
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
        algo=Algorithm.of(preset, branch),
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
        f"{config.engine.name} reports the {known} likeliest tokens, so entropies of its samples are "
        "lower bounds (sampling/entropy_top_k)"
    )


def stale_note(config: Config, preset: Preset) -> str:
    if not config.rollout.staleness or config.algo.importance_cap is not None:
        return ""
    return (
        f"tokens may be up to {config.rollout.staleness} versions old, so each is weighted by its "
        f"probability ratio, at most {preset.importance_cap:g} (algo.importance_cap)"
    )


def refuse_critic(config: Config, preset: Preset) -> None:
    if config.lora.rank and preset.needs_critic and config.train.steps:
        raise ConfigError(
            f"algo.name={config.algo.name} trains a critic, a second model as large as the policy, "
            f"which lora.rank={config.lora.rank} should avoid; take an algorithm without a critic, such "
            "as grpo, or lora.rank=0"
        )


def refuse_layout(config: Config, processes: ProcessGroup) -> None:
    """Refuse layouts that several processes cannot train with."""
    parallel, world = config.parallel, processes.world
    if config.lora.rank and world > 1 and (parallel.shard or parallel.tp > 1):
        raise ConfigError(
            f"lora.rank={config.lora.rank} puts adapters on whole matrices, and {world} processes would "
            f"split them (parallel.shard={str(parallel.shard).lower()}, parallel.tp={parallel.tp}). "
            "Adapters are small: use parallel.shard=false and parallel.tp=1, so each process holds all"
        )
    if not parallel.shard and 1 < parallel.tp < world:
        raise ConfigError(
            f"parallel.shard=false lets each of {world // parallel.tp} groups of parallel.tp="
            f"{parallel.tp} processes hold all weights, and split layers cannot; "
            "leave parallel.shard out, or take parallel.tp=1"
        )


def lora_notes(config: Config, shape: ModelShape) -> list[str]:
    lora = config.lora
    if not lora.rank:
        return []
    trained, total = num_trained(shape, lora.rank, lora.targets), num_parameters(shape)
    return [
        f"adapters of rank {lora.rank}: {trained:,} parameters are trained beside {total:,} of the model"
    ]


def policy_notes(policy: Any) -> list[str]:
    """What runs slower than it could on a GPU or with another model, and why."""
    if not isinstance(policy, Decoder):
        return [f"{policy.shape.family} trains as transformers computes it", *policy.notes]
    if policy.device.type != "cuda":
        return []
    if not has_kernels(policy.device):
        return [
            "triton is not installed, so plain PyTorch replaces the kernels, many times slower; "
            "pip install triton"
        ]
    why = why_no_kernel(policy.shape.head_dim, policy.dtype, policy.device)
    return [f"training attention runs in plain PyTorch, slower: {why}"] if why else []


def is_chatty(config: Config, env: Callable[[Task], Env]) -> bool:
    """Whether turns follow each other as chat messages, which a template may rewrite."""
    if not config.task.env or config.rollout.max_turns == 1:
        return False
    return env(Task("probe", config.task.env)).observe_as in ("user", "tool")


def tool_note(config: Config, env: Callable[[Task], Env]) -> str:
    """The tools that an attempt may call, with their limits; "" where there are none."""
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
    # GEM: the template `no` leaves alone what concat_chat has written with the tokenizer's own
    if wrappers and (model.chat_template not in ("", "no") or model.template_args):
        tokenizer.chat = make_chat(config, tokenizer)
    return lambda task: make_env(env_id, wrappers=wrappers, tokenizer=tokenizer, **args)


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
        sampling=Sampling(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            max_tokens=rollout.max_tokens,
        ),
        reward=make_reward(config.task.reward) if config.task.reward else None,
        max_turns=rollout.max_turns,
        max_context=rollout.max_context,
        deadline=rollout.deadline,
        actions=actions,
        prefill=config.task.prefill,
        start=config.actions.start,
    )
