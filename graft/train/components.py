"""The objects of a run, as `build.build_run` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graft.actions.actions import Actions
from graft.algos.algorithm import Algorithm
from graft.config import Config
from graft.envs.dataset.base import num_rows
from graft.models.action_rows import ActionRows
from graft.models.io.tensor_names import weights_of
from graft.models.lora.training import Lora
from graft.protocols import Engine
from graft.rollout.collector import CollectorConfig
from graft.rollout.setup import RolloutSetup
from graft.rollout.user_calls import close_env
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.tasks import held_out_tasks, probe_of
from graft.types import Task


@dataclass(slots=True)
class RunComponents:
    """Everything that the phases of a run work with."""

    config: Config
    tokenizer: FastTokenizer
    chat: Chat
    policy: Any
    """The trained model: a decoder, one that is split over processes, or a model of transformers'."""
    actions: Actions | None
    engine: Engine
    algo: Algorithm
    setup: RolloutSetup
    held_out: RolloutSetup
    notes: list[str]
    weights: Path | None = None
    """The checkpoint that the run continues from."""
    lora: Lora | None = None
    """Made when training begins; to sample, the merged weights are enough."""
    rows: ActionRows | None = None
    """Likewise: the head rows of actions, where nothing else is trained."""
    shares_weights: bool = True
    """Whether the engine samples from the learner's own tensors."""
    processes: ProcessGroup = ALONE
    is_checked: bool = False
    """Whether engine and learner were compared."""

    @property
    def entropy_top_k(self) -> int:
        """Likeliest tokens that the engine's entropies are computed from; 0: all."""
        return getattr(self.engine, "entropy_top_k", 0)

    @property
    def collector_config(self) -> CollectorConfig:
        """What a collector of this run needs."""
        limits = self.config.rollout
        return CollectorConfig(
            self.setup, self.held_out, self.algo.branch, limits.concurrency, limits.samples
        )

    def rest_engine(self) -> None:
        """Nothing is sampled until the next weights: an engine with memory of its own gives it back."""
        sleep = getattr(self.engine, "sleep", None)
        if sleep is not None:
            sleep()

    def held_out_tasks(self, count: int) -> list[Task]:
        """`count` tasks of each environment; of one with fewer rows every row, once."""
        tasks: list[Task] = []
        for item in self.config.held_out_envs:
            probe = self.held_out.make_env(probe_of(item))
            tasks += held_out_tasks(item, count, num_rows(probe))
            close_env(probe)
        return tasks

    def weights_to_publish(self) -> Mapping[str, Tensor] | None:
        """The weights to send to the engines that sample; None: they hold the learner's tensors."""
        return None if self.shares_weights else weights_of(self.policy)
