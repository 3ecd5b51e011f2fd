"""Build the objects of a run from a recipe. Config objects end here; below, functions take arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from graft.actions.actions import Actions
from graft.algos.preset import Preset
from graft.algos.presets import algorithm_of
from graft.config import Config, ConfigError
from graft.data.fields import named_tools
from graft.data.tables import RowTable
from graft.engine.checks import check_structure
from graft.engine.errors import EngineError
from graft.envs.base import CopyableEnv, Wrapper
from graft.envs.table import build_env
from graft.envs.tool_env import ToolEnv
from graft.models.decoder import Decoder
from graft.models.device import has_kernels, why_no_kernels
from graft.models.device_choice import choose_device, choose_dtype
from graft.models.lora.training import num_trained
from graft.models.product_probe import find_kernel_order
from graft.models.shape import ModelShape
from graft.models.tree.attention import why_no_kernel
from graft.protocols import Engine, Env
from graft.recipe.attempt_keys import EnvItem, TaskSection
from graft.rewards import make_reward
from graft.rewards.weighted import WeightedSum
from graft.rollout.setup import EnvSetup, RolloutSetup
from graft.structure import Structure
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.actions import check_calls, check_head
from graft.train.algorithm import branch_of, branch_part, preset_of, rounds_of
from graft.train.components import RunComponents
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.memory.footprint import num_parameters
from graft.train.model import load_tokenizer, make_chat, open_policy, source_of
from graft.train.rollouts.agents import external_note, make_agents, refuse_forks
from graft.train.rollouts.frozen_players import frozen_models, frozen_players
from graft.train.rollouts.rollout_engine import (
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
from graft.train.rollouts.truncation import refuse_truncation
from graft.train.tasks import probe_of
from graft.train.teachers.check import check_tokenizers, refuse_teachers
from graft.types import Sampling, Task

LISTED_ROWS = 200
"""Rows whose lists of tools are compared with the recipe's before a run."""


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
    refuse_teachers(config, preset, processes)
    source = source_of(config, weights)
    tokenizer = load_tokenizer(config, source)
    check_tokenizers(config, tokenizer)
    env = env_factory(config, tokenizer)
    held_out = env_factory(config, tokenizer, held_out=True)
    chat = make_chat(config, tokenizer)
    history = chat.history_note() if is_chatty(config, env) or config.sft.data else ""
    is_shared = shares_weights(config, processes)
    group = processes.engine_group(engine_tp(config)) if with_engine else None
    policy, sampled, actions = open_policy(
        config, source, tokenizer, device, dtype, processes, is_shared, with_engine, group
    )
    check_calls(config, actions, env, config.task.envs)
    if config.eval.env:
        check_calls(config, actions, held_out, config.held_out_envs)
    check_head(config, actions, is_split=ways(config, processes) > 1)
    branch = branch_of(config, preset, actions)
    refuse_forks(config, branch)
    refuse_async(config, branch, is_dynamic=rounds_of(config, preset) > 1)
    if not with_engine:
        vocab_size = policy.shape.vocab_size
        engine: Engine = NoEngine(vocab_size, known_elsewhere(config, vocab_size))
    elif is_external(config):
        engine = make_external(config, policy, tokenizer, source, processes, group)
    else:
        engine = make_engine(config, sampled, tokenizer, actions, processes, group)
    models = frozen_models(config, tokenizer, policy, engine, processes)
    agents = make_agents(config, models)
    setup = replace(make_setup(config, engine, chat, env, actions), agent=agents)
    if with_engine and setup.sampling.structure is not None:
        try:
            check_structure(engine, setup.sampling.structure)
        except EngineError as error:
            raise ConfigError(f"rollout.answer_schema: {error}") from error
    players = frozen_players(config, tokenizer, policy, env, processes)
    notes = [note, *policy_notes(policy), tool_note(config, env), stale_note(config, preset)]
    notes += [order_note(config, policy), kv_note(config), entropy_note(config, engine), history]
    notes.append(draft_note(config, engine))
    notes += [external_note(config, agents, processes.is_first), layout_note(config, processes)]
    return RunComponents(
        config=config,
        tokenizer=tokenizer,
        chat=chat,
        policy=policy,
        actions=actions,
        engine=engine,
        algo=algorithm_of(preset, branch),
        setup=replace(setup, frozen=players, self_play=True),
        held_out=held_out_setup(config, setup, held_out),
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
    if not preset.importance_cap:  # algo.old_policy or algo.weights account for it
        return ""
    return (
        f"tokens may be up to {config.rollout.staleness} versions old, so each is weighted by its "
        f"probability ratio, at most {preset.importance_cap:g} (algo.importance_cap)"
    )


def layout_note(config: Config, processes: ProcessGroup) -> str:
    """That one process splits nothing, where a recipe asks for it."""
    parallel = config.parallel
    asked = [name for name in ("shard", "offload") if getattr(parallel, name)]
    asked = [f"parallel.{name}=true" for name in asked if name in parallel.model_fields_set]
    if not asked or processes.world > 1 or config.cluster.address:
        return ""
    return f"{', '.join(asked)}: this run has one process, so nothing is split and all is on its device"


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
    if reason := why_no_kernels(policy.device):
        return [f"plain PyTorch replaces the kernels, many times slower: {reason}"]
    notes = []
    if policy.shape.recurrence is not None:
        notes = ["recurrent layers are computed by kernels that have not yet run on a GPU"]
    why = why_no_kernel(policy.shape.head_dim, policy.dtype, policy.device)
    return notes + [f"training attention runs in plain PyTorch, slower: {why}"] * bool(why)


def order_note(config: Config, policy: Any) -> str:
    """Say why engine and learner will differ in the last bits on a GPU, or what it takes that they do not."""
    if not config.model.exact or is_external(config) or policy.device.type != "cuda":
        return ""
    if not isinstance(policy, Decoder) or not has_kernels(policy.device):
        return ""  # `policy_notes` says it
    order, note = find_kernel_order(policy)
    if order is not None and policy.order is None:
        return "model.exact has no effect: the engine is split over processes, or has pages of its own size"
    return note


def kv_note(config: Config) -> str:
    if not config.engine.rounds_kv:
        return ""
    return (
        f"engine.kv={config.engine.kv}: keys and values are rounded to eight bits, in the engine and in "
        "training; sampling elsewhere, where they are not, is from a slightly different policy"
    )


def draft_note(config: Config, engine: Engine) -> str:
    """Say why no tokens are drafted, where they should be."""
    has_drafts = getattr(engine, "drafts", None)  # None: not graft's own
    if has_drafts or config.rollout.drafts == "off" or isinstance(engine, NoEngine):
        return ""
    if has_drafts is None:
        return f"rollout.drafts has no effect: {config.engine.name} draws by its own rules"
    decoder = getattr(engine, "decoder", None)
    if isinstance(decoder, Decoder) and decoder.shape.recurrence is not None:
        return "rollout.drafts has no effect: recurrent layers take one token in a step"
    return "rollout.drafts has no effect: a prompt does not have the bits of decoding here (model.exact)"


def is_chatty(config: Config, env: Callable[[Task], Env]) -> bool:
    """Whether turns follow each other as chat messages, which a template may rewrite."""
    if config.rollout.max_turns == 1:
        return False
    return any(env(probe_of(item)).observe_as in ("user", "tool") for item in config.task.envs)


def tool_note(config: Config, env: Callable[[Task], Env]) -> str:
    """The tools that an attempt may call, with their limits; "" where there are none."""
    envs = config.task.envs
    notes: list[str] = []
    for item in envs:
        posed = env(probe_of(item))
        found: list[str] = []
        known: list[str] = []
        while isinstance(posed, Wrapper):
            if isinstance(posed, ToolEnv) and posed.tools:
                limit = "any number of" if posed.max_uses is None else f"at most {posed.max_uses}"
                found.append(f"{', '.join(posed.tools)} ({limit} calls an attempt)")
                known += posed.tools
            posed = posed.env
        if known:
            refuse_row_tools(posed, known)
        where = f" of {item.label}" if len(envs) > 1 else ""
        notes += [f"tools{where}: {'; '.join(found)}"] if found else []
    return "; ".join(notes)


def refuse_row_tools(env: Any, known: Sequence[str]) -> None:
    """Refuse rows that list a tool which the recipe does not have: they would be asked without it."""
    table = getattr(env, "table", None)
    if not isinstance(table, RowTable):
        return  # its tasks are drawn
    for place, row in enumerate(islice(table.scan(), LISTED_ROWS)):
        names = named_tools(row) if isinstance(row, Mapping) else []
        if strange := [name for name in names if name not in known]:
            raise ConfigError(
                f"{table.source}, row {place + 1} lists the tool {strange[0]!r}, and the tools of "
                f"task.wrappers are {', '.join(known)}. Add it there, or correct the row's `tools`"
            )


def env_factory(
    config: Config, tokenizer: FastTokenizer, held_out: bool = False
) -> Callable[[Task], Env]:
    """A fresh environment for a task, in the recipe's wrappers; of several the one that the task names."""
    model, items = config.model, config.held_out_envs if held_out else config.task.envs
    # GEM: the template `no` leaves alone what concat_chat has written with the tokenizer's own
    has_template = model.chat_template not in ("", "no") or model.template_args
    if has_template and any(item.wrappers for item in items):
        tokenizer.chat = make_chat(config, tokenizer)
    salt = "" if held_out else config.task.salt  # scores on held-out tasks compare between runs
    factories = {item.label: _maker(item, tokenizer, held_out, salt) for item in items}
    if len(factories) == 1:
        return next(iter(factories.values()))

    def make(task: Task) -> Env:
        if task.env not in factories:
            known = ", ".join(factories) or "no environment (task.env is empty)"
            raise ConfigError(
                f"task {task.id!r} is of environment {task.env!r}; the recipe has {known}"
            )
        return factories[task.env](task)

    return make


def _maker(
    item: EnvItem, tokenizer: FastTokenizer, held_out: bool, salt: str
) -> Callable[[Task], Env]:
    args = item.held_out_args if held_out else item.args or {}
    wrappers = item.wrappers or ()

    def make(task: Task) -> Env:
        env = build_env(item.env, wrappers=wrappers, tokenizer=tokenizer, **args)
        if salt:
            inner = getattr(env, "unwrapped", env)
            if not isinstance(inner, CopyableEnv):
                raise ConfigError(
                    f"task.salt: env {item.env!r} draws its tasks itself, from the seed alone; derive it "
                    "from graft.BaseEnv, or leave task.salt empty"
                )
            inner.task_salt = salt
        return env

    return make


def make_setup(
    config: Config,
    engine: Engine,
    chat: Chat,
    env: Callable[[Task], Env],
    actions: Actions | None = None,
) -> RolloutSetup:
    rollout, items = config.rollout, config.task.envs
    own = _own_setups(items or [config.task], chat)
    shared = next(iter(own.values()))
    return RolloutSetup(
        engine=engine,
        chat=chat,
        make_env=env,
        sampling=sampling_of(config),
        reward=shared.reward,
        max_turns=rollout.max_turns,
        cut_turns=rollout.cut_turns,
        max_context=rollout.max_context,
        deadline=rollout.deadline,
        actions=actions,
        prefill=shared.prefill,
        by_env=own if len(items) > 1 else {},
        start=config.actions.start,
    )


def sampling_of(config: Config, held_out: bool = False) -> Sampling:
    """How attempts are drawn: in training, or at held-out tasks."""
    rollout = config.as_evaluated().rollout if held_out else config.rollout
    drawn = Sampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        structure=Structure.of(rollout.answer_schema) if rollout.answer_schema else None,
    )
    return replace(drawn, **config.eval.draws) if held_out else drawn


def held_out_setup(config: Config, setup: RolloutSetup, env: Callable[[Task], Env]) -> RolloutSetup:
    """The setup of held-out attempts: that of training with what the section `eval` changes."""
    limits = config.as_evaluated().rollout
    if config.eval.env:
        own = _own_setups(config.held_out_envs, setup.chat)
        shared = next(iter(own.values()))
        own = own if len(own) > 1 else {}
        setup = replace(setup, reward=shared.reward, prefill=shared.prefill, by_env=own)
    return replace(
        setup,
        make_env=env,
        sampling=sampling_of(config, held_out=True),
        max_turns=limits.max_turns,
        max_context=limits.max_context,
    )


def _own_setups(items: Sequence[EnvItem | TaskSection], chat: Chat) -> dict[str, EnvSetup]:
    """The reward and the prefill of each environment; one reward is made for all that share it."""
    rewards: dict[int, Any] = {}
    setups: dict[str, EnvSetup] = {}
    for item in items:
        prefill = item.prefill or ""
        try:
            chat.tokenizer.encode(prefill)
        except ValueError as error:
            raise ConfigError(f"task.prefill={prefill!r}: {error}") from error
        if item.reward and id(item.reward) not in rewards:
            rewards[id(item.reward)] = make_reward(item.reward)
        setups[item.label] = EnvSetup(rewards.get(id(item.reward)), prefill)
    if len(setups) > 1:
        _refuse_equal_metrics(setups)
    return setups


def _refuse_equal_metrics(setups: Mapping[str, EnvSetup]) -> None:
    """The metric reward/NAME can mean an environment or a component of a reward, not both."""
    parts = {
        part.name
        for own in setups.values()
        if isinstance(own.reward, WeightedSum)
        for part in own.reward.components
    }
    if both := sorted(parts & setups.keys()):
        raise ConfigError(
            f"{both[0]!r} names an environment of task.env and a component of task.reward, so the metric "
            f"reward/{both[0]} would be both; give the environment another name: "
            f"{{env: ..., name: ...}}"
        )
