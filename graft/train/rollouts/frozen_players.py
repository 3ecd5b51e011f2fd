"""Seats of a game that another model plays: a checkpoint, or the policy that RL started from.

rollout:
  frozen: {O: runs/first/checkpoints/step-40}     or {O: reference}

Each has an engine of its own over weights that never change; they are read at its first action. What
it writes is neither recorded nor trained; the policy sees it as moves of the game.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError
from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.load import load_model
from graft.protocols import Context, Engine, Env
from graft.rollout.match import check_frozen, match_of
from graft.text.tokenizer import FastTokenizer
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.model import refuse_family
from graft.train.rollouts.rollout_engine import make_engine
from graft.train.run_dir.checkpoint import latest_model
from graft.train.tasks import probe_of
from graft.train.teachers.paths import REFERENCE
from graft.types import Task


def has_frozen_reference(config: Config) -> bool:
    return REFERENCE in (*config.rollout.frozen.values(), *config.agent.frozen.values())


def frozen_players(
    config: Config,
    tokenizer: FastTokenizer,
    policy: Any,
    env: Callable[[Task], Env],
    processes: ProcessGroup = ALONE,
) -> dict[str, FrozenPlayer]:
    """The models of `rollout.frozen`, checked; their weights are read later."""
    if not config.rollout.frozen:
        return {}
    games = [match_of(env(probe_of(item))) for item in config.task.envs]
    for game in games:
        if game is None:
            raise ConfigError(
                f"rollout.frozen={config.rollout.frozen} names seats of a game, and an environment of "
                "task.env is not played by several seats; leave it out"
            )
        check_frozen(config.rollout.frozen, [one for one in game.agents if one not in game.fixed])
    found: dict[str, FrozenPlayer] = {}
    for seat, name in config.rollout.frozen.items():
        where = f"rollout.frozen={{{seat}: {name}}}"
        path = _folder(name, where, config, tokenizer)
        found[seat] = FrozenPlayer(config, path, tokenizer, policy, processes)
    return found


def frozen_models(
    config: Config,
    tokenizer: FastTokenizer,
    policy: Any,
    engine: Engine,
    processes: ProcessGroup = ALONE,
) -> dict[str, FrozenPlayer]:
    """The frozen models of `agent.models` by their paths, checked; their weights are read later.

    engine: of the policy, which is the reference until RL has begun, as for `graft doctor`.
    """
    players: dict[str, FrozenPlayer] = {}
    for name, path in config.agent.frozen.items():
        if path not in players:
            folder = _folder(path, f"agent.models={{{name}: {path}}}", config, tokenizer)
            stand_in = engine if path == REFERENCE else None
            players[path] = FrozenPlayer(config, folder, tokenizer, policy, processes, stand_in)
    return players


def _folder(name: str, where: str, config: Config, tokenizer: FastTokenizer) -> Path:
    """The folder of a frozen model, which must read the policy's tokens."""
    if name == REFERENCE:
        return Path(config.run.dir) / config.run.name / REFERENCE
    path = latest_model(name)
    refuse_family(path, config)
    if not is_same_vocabulary(open_tokenizer(path), tokenizer):
        raise ConfigError(
            f"{where} has another tokenizer than the policy, and both read the same tokens; "
            "use a model of the same family"
        )
    return path


def is_same_vocabulary(one: FastTokenizer, other: FastTokenizer) -> bool:
    """Whether every token stands for the same text in both."""
    if one.vocab_size != other.vocab_size:
        return False
    return all(one.decode([i]) == other.decode([i]) for i in range(one.vocab_size))


class FrozenPlayer:
    """An engine over fixed weights, which are read when it first acts."""

    def __init__(
        self,
        config: Config,
        path: Path,
        tokenizer: FastTokenizer,
        policy: Any,
        processes: ProcessGroup,
        stand_in: Engine | None = None,
    ) -> None:
        """stand_in: is asked in its place as long as there is no folder at the path."""
        self.config, self.path, self.tokenizer = config, path, tokenizer
        self.processes, self.policy_shape = processes, policy.shape
        self.dtype, self.device = policy.dtype, policy.device
        self.version, self.vocab_size = 0, tokenizer.vocab_size
        self._engine: Engine | None = None
        self._stand_in = stand_in

    def open(self, tokens: Sequence[int], key: int | None = None) -> Context:
        if self._engine is None and self._stand_in is not None and not self.path.exists():
            return self._stand_in.open(tokens, key)
        if self._engine is None:
            decoder = load_model(self.path, dtype=self.dtype, device=self.device)
            self._engine = make_engine(
                self.config,
                decoder.requires_grad_(False),
                self.tokenizer,
                processes=self.processes,
                planned=self.policy_shape,
            )
        return self._engine.open(tokens, key)

    def score(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a frozen player is not scored")

    def load(self, weights: Any, version: int) -> None:
        """Its weights never change."""

    def pause(self) -> None:
        if self._engine is not None:
            self._engine.pause()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
