"""From a recipe to the objects of a run. Config objects end here; below, functions take arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graft.actions.actions import Actions, load_actions
from graft.algos.credit import CREDITS, Credit
from graft.algos.losses import LOSSES
from graft.algos.presets import Preset, build, make, resolve_preset
from graft.algos.reductions import REDUCTIONS
from graft.algos.shaping import Shaping
from graft.config import Config, ConfigError
from graft.engine import ENGINES
from graft.envs import make as make_env
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.device import choose_device, choose_dtype, has_kernels
from graft.models.extra import extend, load_rows
from graft.models.gguf import gguf_shape, open_gguf, open_tokenizer
from graft.models.load import load_model, read_config, shape_of
from graft.models.shape import Shape
from graft.models.tree_attention import why_no_kernel
from graft.protocols import Engine, Env
from graft.registry import resolve
from graft.rewards import REWARDS
from graft.rollout.branch import BRANCHES, Branch
from graft.rollout.counterfactual import Counterfactual
from graft.rollout.episode import Setting
from graft.text.chat import Chat
from graft.text.tokenizer import Tokenizer
from graft.train.checkpoint import action_names, latest_model
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.train.plan import check_fits, choose_micro, kv_tokens_for
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


def assemble(config: Config, weights: Path | None = None) -> Parts:
    """Build a run; `weights` is the checkpoint to go on from, instead of the recipe's model."""
    device = choose_device(config.model.device)
    dtype, note = choose_dtype(config.model.dtype, device)
    preset = preset_of(config)
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
        notes=[text for text in (note, *kernel_notes(policy)) if text],
    )


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


def preset_of(config: Config) -> Preset:
    """The preset with the recipe's changes; a name nobody knows is an error here.

    Lengths that a preset publishes for its own budget (constant reductions, DAPO's overlong
    penalty on the last fifth) are taken from `rollout.max_tokens` instead.
    """
    algo = config.algo
    preset = resolve_preset(algo.name)
    changes: dict[str, Any] = {}
    if algo.credit:
        changes["credit"] = tuple(as_part(entry) for entry in algo.credit)
    if algo.loss is not None:
        changes["loss"] = as_part(algo.loss)
    if algo.reduction is not None:
        changes["reduction"] = as_part(algo.reduction)
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
    if coef and algo.kl_in == "reward":
        if config.actions.file:
            raise ConfigError(
                "algo.kl_in=reward prices every decision, and a reference knows none of the actions "
                "beyond the vocabulary; take algo.kl_in=loss, which holds the words alone"
            )
        shaping.append(("kl_in_reward", {"coef": coef, "kind": algo.kl_kind}))
        coef = 0.0  # it acts in one place
    changes |= {"kl_coef": coef, "kl_kind": algo.kl_kind}
    changes["shaping"] = tuple(shaping)
    if algo.entropy_coef is not None:
        changes["entropy_coef"] = algo.entropy_coef
    if algo.importance_cap is not None:
        changes["importance_cap"] = algo.importance_cap
    return replace(preset, **changes)


def branch_of(config: Config, preset: Preset, actions: Actions | None) -> Branch:
    """The recipe's branch or the preset's, told what a run knows and the recipe need not repeat."""
    part = as_part(config.rollout.branch) if config.rollout.branch else preset.branch
    name, given = (part, {}) if isinstance(part, str) else part
    known: dict[str, Any] = {"samples": config.rollout.samples, "seed": config.run.seed}
    if actions is not None:
        known["tools"] = actions.tools
    takes = inspect.signature(resolve(name, BRANCHES, "branch")).parameters
    told = {key: value for key, value in known.items() if key in takes}
    branch = make((name, {**told, **given}), BRANCHES, "branch")
    if isinstance(branch, Counterfactual):
        if actions is None:
            raise ConfigError(
                "the branch 'counterfactual' forces calls, and this run has no actions to force; "
                "set actions.file, or take rollout.branch=independent"
            )
        branch.check_tools(actions)
    return branch


def as_part(entry: Any) -> Any:
    """A recipe's `name` or `{name: {key: value}}` as (name, keywords)."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, keywords),) = entry.items()
        return name, dict(keywords or {})
    raise ConfigError(f"{entry!r} is neither a name nor {{name: {{key: value}}}}")


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


def actions_of(config: Config, tokenizer: Tokenizer, vocab_size: int) -> Actions | None:
    """The recipe's actions, spelled with this tokenizer."""
    section = config.actions
    if not section.file:
        return None
    return load_actions(section.file, tokenizer, section.tools, vocab_size=vocab_size)


def check_calls(config: Config, actions: Actions | None, env: Callable[[Task], Env]) -> None:
    """Refuse actions and an environment that would never hear of each other's calls."""
    if actions is not None and config.sft.data:
        raise ConfigError(
            f"sft.data={config.sft.data}: recorded chats know no actions, and their calls would be "
            "learned as words; warm up from demonstrations (sft.data='') or leave actions.file out"
        )
    if not config.task.env:
        return
    probe = env(Task("probe", config.task.env))
    missing = object()
    takes: Any = getattr(probe, "action_tools", missing)
    probe.close()
    if takes is missing:  # an environment of the user's own
        return
    if takes and (actions is None or not actions.space.extra):
        raise ConfigError(
            f"{config.task.env} takes its calls from actions (task.args.dress=actions), and "
            f"actions.file={config.actions.file!r} has none beyond the vocabulary; give a file such "
            "as calculator, or another dress"
        )
    if actions is None:
        return
    if actions.space.extra and takes is None:
        raise ConfigError(
            f"actions.file={config.actions.file} makes calls by actions, and {config.task.env} looks "
            "for them in the text; set task.args.dress=actions, or take the file that ends in -tags"
        )
    if takes and not set(takes) & set(actions.tools):
        raise ConfigError(
            f"actions.file={config.actions.file} has {', '.join(actions.tools)}, and "
            f"{config.task.env} answers only {', '.join(takes)}; give the file of its tools"
        )


def with_actions(
    policy: Decoder, actions: Actions, source: Path | None, init_from_base: bool
) -> Decoder:
    """The policy with head rows for its actions: those of its checkpoint, or new ones."""
    if not actions.space.extra:
        return policy
    trained = None if source is None else load_rows(policy, source)
    if trained is not None:
        if trained.shape.extra != actions.space.extra:
            raise ConfigError(
                f"'{source}' was trained with {trained.shape.extra} actions beyond the vocabulary, "
                f"and actions.file has {actions.space.extra}; give the file it was trained with"
            )
        known = action_names(source)
        if known and known != list(actions.names):
            other = next(
                (a, b) for a, b in zip(known, actions.names, strict=True) if a != b
            )  # the first
            raise ConfigError(
                f"'{source}' was trained with the action {other[0]!r} where actions.file has "
                f"{other[1]!r}; give the file it was trained with"
            )
        return trained
    nothing = [None] * len(actions.init_tokens)
    return extend(policy, actions.init_tokens if init_from_base else nothing)


def allowed_table(actions: Actions | None, policy: Decoder) -> torch.Tensor | None:
    """[modes, head rows] of the policy's device: what the learner masks with."""
    if actions is None or actions.space.allowed is None:
        return None
    table = torch.zeros(actions.space.num_modes, policy.shape.head_rows, dtype=torch.bool)
    table[:, : actions.space.num_actions] = torch.from_numpy(actions.space.allowed.copy())
    return table.to(policy.device)


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
    """The learner of the RL phase. A critic starts from the policy as it is now."""
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

    critic = Critic(policy) if preset.needs_critic else None
    return Learner(
        policy=policy,
        optimizer=optimizer(policy, train.lr),
        loss=loss,
        reduction=reduction,
        tokens_per_micro=micro_budget(config, policy),
        temperature=config.rollout.temperature,
        allowed=allowed_table(parts.actions, policy),
        critic=critic,
        critic_optimizer=optimizer(critic, config.algo.critic_lr or train.lr) if critic else None,
        value_clip=preset.value_clip,
        reference=reference,
        epochs=train.epochs,
        minibatches=train.minibatches,
        seed=config.run.seed,
    )


def sft_learner(parts: Parts) -> Learner:
    """The same learner with cross-entropy, and an optimizer of its own."""
    config, policy, sft = parts.config, parts.policy, parts.config.sft
    plan = schedule("linear", sft.warmup, sft.steps, 0.1)
    optimizer = Optimizer(
        [policy],
        lr=sft.lr,
        schedule=plan,
        weight_decay=config.train.weight_decay,
        betas=config.train.betas,
        max_grad_norm=config.train.max_grad_norm,
    )
    loss, reduction = make("sft", LOSSES, "loss"), make("token", REDUCTIONS, "reduction")
    return Learner(
        policy,
        optimizer,
        loss,
        reduction,
        micro_budget(config, policy),
        allowed=allowed_table(parts.actions, policy),
    )


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
        reward=resolve(config.task.reward, REWARDS, "reward") if config.task.reward else None,
        max_turns=rollout.max_turns,
        max_context=rollout.max_context,
        deadline=rollout.deadline,
        actions=actions,
        prefill=config.task.prefill,
    )
