"""Any graft env in TRL's GRPOTrainer: the policy acts by calling a tool.

    GRPOTrainer(
        model,
        environment_factory=environment_factory("game:GuessTheNumber-v0"),
        train_dataset=Dataset.from_list(task_rows(1000)),
        reward_funcs=[],  # or [score_answer], where a final text should count as an action
    )

TRL builds one env per rollout, resets it with a row of the dataset, shows what `reset` returns, offers
the public methods as tools and calls `get_reward` at the end. A GRPO group is several rollouts of one
row, so the row names its task by a seed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from graft.envs.base import as_messages
from graft.types import Turn

OVER = "The episode is over; no more actions are possible."


def task_rows(count: int, *, seed: int = 0, prompt: str = "") -> list[dict[str, Any]]:
    """Rows for `datasets.Dataset.from_list`: the tasks `seed`, `seed + 1`, ...; `prompt` precedes each.

    >>> task_rows(2, seed=5)[1]
    {'prompt': [{'role': 'user', 'content': ''}], 'seed': 6}
    """
    return [
        {"prompt": [{"role": "user", "content": prompt}], "seed": seed + number}
        for number in range(count)
    ]


def environment_factory(env_id: str, **kwargs: Any) -> type[Any]:
    """The class that GRPOTrainer takes as `environment_factory`.

    `kwargs` are those of `graft.envs.make`, `wrappers` included.
    """

    class TrlEnvironment:
        def __init__(self) -> None:
            from graft.envs.table import build_env

            self._env = build_env(env_id, **kwargs)
            self._is_over = True
            self._total = 0.0

        def reset(self, seed: int | None = None, **_: Any) -> str:
            """Start the task of a row; other columns are ignored."""
            if seed is None:
                raise ValueError(
                    "the dataset has no 'seed' column: without it the rollouts of a group would "
                    "get different tasks; use Dataset.from_list(task_rows(1000))"
                )
            observation, _info = self._env.reset(seed)
            self._is_over, self._total = False, 0.0
            return "\n\n".join(str(one["content"]) for one in as_messages(observation))

        def act(self, action: str) -> str:
            """Make the next move in the environment and see what happens.

            Args:
                action: The move, written as the task asks for it.

            Returns:
                What the environment answers.
            """
            if self._is_over:
                return OVER
            turn = self._step(str(action))
            self._total += turn.reward
            return turn.observation or OVER

        def get_reward(self) -> float:
            return self._total

        def _step(self, action: str) -> Turn:
            turn = self._env.step(action)
            self._is_over = turn.terminated or turn.truncated
            return turn

    # TRL logs the reward under the name of the class
    TrlEnvironment.__name__ = re.sub(r"\W+", "_", env_id)
    return TrlEnvironment


def score_answer(completions: Sequence[Any], environments: Sequence[Any], **_: Any) -> list[float]:
    """A reward function for TRL: the policy's last text is one more action, if the episode still runs.

    For envs whose action is an answer ("The result is \\boxed{42}"), so that no tool call is needed.
    It pays what that last action pays; `get_reward` pays for those before it.
    """
    rewards: list[float] = []
    for completion, env in zip(completions, environments, strict=True):
        text = completion if isinstance(completion, str) else last_text(completion)
        rewards.append(0.0 if env._is_over else env._step(text).reward)
    return rewards


def last_text(messages: Sequence[dict[str, Any]]) -> str:
    """The text of the policy's last message; "" if the last message is not the policy's."""
    if not messages or messages[-1].get("role") != "assistant":
        return ""
    return str(messages[-1].get("content") or "")
