"""Supervised steps: demonstrations or recorded chats, the same learner, cross-entropy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from graft.data.rows import read_chats
from graft.rollout.batching import to_batch
from graft.rollout.demonstrate import conversation, demonstration
from graft.rollout.episode import draw_key
from graft.train.learner import Learner
from graft.train.rl import TaskStream
from graft.train.setup import Parts
from graft.types import Episode, Task

Examples = Callable[[int], list[Episode]]
"""step -> the examples of that step; a pure function, so a resumed run sees the same ones."""


def demonstrations(parts: Parts) -> Examples:
    """The environment's own teacher, on training tasks."""
    config = parts.config
    seed, count = config.run.seed, config.sft.batch

    def examples(step: int) -> list[Episode]:
        tasks = TaskStream(config.task.env, seed, cursor=(step - 1) * count)
        return [
            demonstration(
                task,
                parts.setting.make_env(task),
                parts.chat,
                seed=draw_key(seed, task.id, 0),
                actions=parts.actions,
                prefill=config.task.prefill,
                **config.sft.demo_args,
            )
            for task in (next(tasks) for _ in range(count))
        ]

    return examples


def recorded(parts: Parts) -> Examples:
    """Chats from a file; each epoch is shuffled anew."""
    config = parts.config
    chats = read_chats(config.sft.data)
    count = config.sft.batch

    @lru_cache(maxsize=2)  # a batch may straddle two epochs
    def order(epoch: int) -> list[int]:
        numbers = list(range(len(chats)))
        random.Random(draw_key(config.run.seed, "epoch", epoch)).shuffle(numbers)
        return numbers

    def examples(step: int) -> list[Episode]:
        places = [divmod(i, len(chats)) for i in range((step - 1) * count, step * count)]
        numbers = [order(epoch)[place] for epoch, place in places]
        return [
            conversation(Task(f"row:{n}", "", data_source=config.sft.data), chats[n], parts.chat)
            for n in numbers
        ]

    return examples


def sft_step(learner: Learner, episodes: Sequence[Episode]) -> dict[str, float]:
    """One optimizer step on these examples."""
    started = time.perf_counter()
    rows = [row for episode in episodes for row in episode.trajectories()]
    batch = to_batch(rows)
    updated = learner.update(rows, batch)
    tokens = sum(len(span) for episode in episodes for span in episode.spans)
    keep = ("loss", "entropy", "grad_norm", "learning_rate")
    seconds = time.perf_counter() - started
    return {
        **{name: updated[name] for name in keep},
        "num_tokens": float(tokens),
        "tokens_per_second": tokens / seconds,
        "step_time": seconds,
    }
