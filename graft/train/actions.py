"""The actions of a run: spelled with its tokenizer, given head rows, checked against env and checkpoint.

An action file, an environment and a checkpoint each define part of the calls; combinations that do not
fit are refused here, before anything is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from graft.actions.actions import Actions, load_actions
from graft.config import ActionsSection, Config, ConfigError
from graft.models.decoder import Decoder
from graft.models.extra_actions import extend, load_rows
from graft.protocols import Env
from graft.recipe.attempt_keys import EnvItem
from graft.rollout.user_calls import close_env
from graft.text.tokenizer import FastTokenizer
from graft.train.run_dir.checkpoint import action_names
from graft.train.tasks import probe_of
from graft.types import Task


def actions_of(config: Config, tokenizer: FastTokenizer, vocab_size: int) -> Actions | None:
    """The recipe's actions, spelled with this tokenizer."""
    section = config.actions
    if not section.file:
        if section.start:
            raise ConfigError(
                f"actions.start={section.start} is a tool of actions.file, and there is no file; give "
                "one such as calculator"
            )
        return None
    actions = load_actions(section.file, tokenizer, section.tools, vocab_size=vocab_size)
    if section.start and section.start not in actions.tools:
        raise ConfigError(
            f"actions.start={section.start} is no tool of actions.file={section.file}; it has "
            f"{', '.join(actions.tools)}"
        )
    return actions


def check_calls(
    config: Config,
    actions: Actions | None,
    env: Callable[[Task], Env],
    items: Sequence[EnvItem],
) -> None:
    """Refuse actions and environments that do not understand each other's calls."""
    for item in items:
        probe = env(probe_of(item))
        missing = object()
        takes: Any = getattr(probe, "action_tools", missing)
        close_env(probe)
        if takes is not missing:  # an environment of the user's own
            _check_calls_of(item.label, config.actions.file, actions, takes)


def _check_calls_of(env: str, file: str, actions: Actions | None, takes: Any) -> None:
    if takes and (actions is None or not actions.space.extra):
        raise ConfigError(
            f"{env} takes its calls from actions (task.args.syntax=actions), and "
            f"actions.file={file!r} has none beyond the vocabulary; give a file such "
            "as calculator, or another syntax"
        )
    if actions is None:
        return
    if actions.space.extra and takes is None:
        raise ConfigError(
            f"actions.file={file} makes calls by actions, and {env} looks "
            "for them in the text; set task.args.syntax=actions, or take the file that ends in -tags"
        )
    if takes and not set(takes) & set(actions.tools):
        raise ConfigError(
            f"actions.file={file} has {', '.join(actions.tools)}, and "
            f"{env} answers only {', '.join(takes)}; give the file of its tools"
        )


def check_head(config: Config, actions: Actions | None, is_split: bool) -> None:
    """Refuse actions.freeze_base and actions.bias where no action needs them, or weights are split."""
    section = config.actions
    given = [key for key in ("freeze_base", "bias") if getattr(section, key)]
    if not given:
        return
    key = f"actions.{given[0]}"
    if actions is None or not actions.space.extra:
        raise ConfigError(
            f"{key} is for the head rows of actions beyond the vocabulary, and "
            f"actions.file={section.file!r} has none; give a file such as calculator"
        )
    if config.lora.rank:
        raise ConfigError(
            f"{key} with lora.rank={config.lora.rank}: adapters leave the base as it is, and train the "
            "rows of the actions beside them, without a bias; use one of the two"
        )
    if is_split:
        raise ConfigError(
            f"{key} is for a head in one piece, and these processes would split it; use "
            "parallel.shard=false and parallel.tp=1, so each process holds all"
        )


def with_actions(
    policy: Decoder, actions: Actions, source: Path | None, section: ActionsSection
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
        for known, given in zip(action_names(source), actions.names, strict=False):
            if known != given:
                raise ConfigError(
                    f"'{source}' was trained with the action {known!r} where actions.file has {given!r}; "
                    "give the file it was trained with"
                )
        if trained.shape.extra_bias != section.bias:
            raise ConfigError(
                f"'{source}' was trained with actions.bias={str(trained.shape.extra_bias).lower()}; set it "
                "so, or start from the model before that training"
            )
        return trained
    random = [None] * len(actions.init_tokens)
    init_tokens = actions.init_tokens if section.init_from_base else random
    return extend(policy, init_tokens, section.bias)


def allowed_table(actions: Actions | None, policy: Decoder) -> torch.Tensor | None:
    """[modes, head rows] on the policy's device: the mask of the learner."""
    if actions is None or actions.space.allowed is None:
        return None
    table = torch.zeros(actions.space.num_modes, policy.shape.head_rows, dtype=torch.bool)
    table[:, : actions.space.num_actions] = torch.from_numpy(actions.space.allowed.copy())
    return table.to(policy.device)
