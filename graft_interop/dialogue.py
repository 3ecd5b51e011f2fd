"""One episode of an environment as a conversation: what the adapters for other trainers share.

    dialogue = Dialogue("game:GuessTheNumber-v0", {}, "SkyRL-Gym")
    dialogue.begin(3)                  [{"role": "user", "content": "Guess the number ..."}]
    dialogue.reply("\\\\boxed{4}")       the Turn; `fresh` are the messages that answer it
    dialogue.reward                    the sum of the rewards so far

A trainer keeps the conversation and samples the policy's turns; the environment adds to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graft.envs.base import as_messages
from graft.types import Message, Turn

REWRITES = ("prompt", "raw", "messages")
"""Values of `observe_as` that replace the conversation instead of adding to it."""


class Dialogue:
    """`env_id` is anything that `graft.make` takes, `args` are its keywords, `wrappers` included.

    `only_appends`: the trainer's conversation only grows, so environments that rewrite it are refused.
    """

    def __init__(
        self, env_id: Any, args: Mapping[str, Any], trainer: str, *, only_appends: bool = True
    ) -> None:
        from graft.envs.table import build_env

        self.env = build_env(env_id, **args)
        self.trainer, self.only_appends = trainer, only_appends
        if only_appends and self.env.observe_as in REWRITES:
            self.env.close()
            raise ValueError(
                f"a wrapper of {env_id!r} rewrites the history, and {trainer} adds to one conversation, "
                "which shows every turn anyway; leave concat, concat_chat, max_history and the like out"
            )
        self.messages: list[Message] = []
        """The conversation, the policy's turns included."""
        self.fresh: list[Message] = []
        """The messages since the policy's last turn; none once the episode is over."""
        self.tools: list[Any] | None = None
        """Schemas of the tools that the chat template must show; None without any."""
        self.observed_as = ""
        """How the last observation enters the context, as in `Env.observe_as`."""
        self.rewards: list[float] = []
        """One per turn of the policy."""
        self.is_over = True

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    @property
    def stop(self) -> list[str]:
        """The strings that end a turn of the policy and belong to it; sampling must stop there."""
        return list(self.env.stop)

    def begin(self, seed: int) -> list[Message]:
        """Start the task of this seed; return its messages."""
        observation, info = self.env.reset(seed)
        self.messages = list(as_messages(observation))
        self.fresh, self.rewards, self.is_over = list(self.messages), [], False
        self.tools, self.observed_as = info.get("tools"), self.env.observe_as
        return self.fresh

    def reply(self, action: str) -> Turn:
        """One turn of the policy; `fresh` has the answer."""
        turn: Turn = self.env.step(action)
        self.rewards.append(turn.reward)
        self.is_over = turn.is_over
        self.messages.append({"role": "assistant", "content": action})
        self.fresh = [] if self.is_over else self._observe(turn)
        return turn

    async def begin_async(self, seed: int) -> list[Message]:
        """`begin` on an event loop: an environment that blocks runs in a thread."""
        return await asyncio.to_thread(self.begin, seed) if self.env.blocking else self.begin(seed)

    async def reply_async(self, action: str) -> Turn:
        return (
            await asyncio.to_thread(self.reply, action) if self.env.blocking else self.reply(action)
        )

    def close(self) -> None:
        self.env.close()

    def _observe(self, turn: Turn) -> list[Message]:
        role = self.observed_as = turn.info.get("observe_as", self.env.observe_as)
        if role in REWRITES:
            if self.only_appends:
                raise ValueError(
                    f"the environment started another conversation (a sub-agent's, or a rewritten "
                    f"history), and {self.trainer} has only one; train on it with graft, verifiers or RL2"
                )
            whole = role == "messages"
            self.messages = turn.info["messages"] if whole else [*as_messages(turn.observation)]
            self.tools = turn.info.get("tools") if whole else self.tools
            return list(self.messages)
        several = turn.info.get("tool_results") if role == "tool" else None
        # a result inside the policy's own turn has no message of its own; as one it is the user's
        role = "user" if role == "inline" else role
        fresh = [{"role": role, "content": text} for text in several or [turn.observation]]
        self.messages += fresh
        return fresh


def until_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the end of its first stop string.

    >>> until_stop("<add>2+3</add> 5, so", ["</add>"])
    '<add>2+3</add>'
    """
    ends = [at + len(one) for one in stop if (at := text.find(one)) >= 0]
    return text[: min(ends)] if ends else text


def row_seed(row: Mapping[str, Any], trainer: str) -> int:
    """The seed of a row; without one the attempts of a group would get different tasks.

    A label of OpenRLHF's is a text: {"seed": "7"} -> 7
    """
    seed: Any = row.get("seed")
    is_number = isinstance(seed, str) and seed.isdecimal()
    if not is_number and (isinstance(seed, bool) or not hasattr(seed, "__index__")):
        raise ValueError(
            f"a row for {trainer} has the seed {seed!r}; it must be a whole number, which names the task: "
            "without it the attempts of a group get different tasks"
        )
    return int(seed)


def posed_rows(
    env_id: str, count: int, seed: int, args: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The tasks of the seeds `seed`, `seed + 1`, ... as {"seed", "prompt"}: messages as they are posed.

    The environment poses the task again in the rollout, so prompts are there for a trainer's limits
    of length and its logs.
    """
    from graft.envs.table import build_env

    if count < 1:
        raise ValueError(f"count={count}: must be 1 or more")
    env = build_env(env_id, **args)
    try:
        for number in range(seed, seed + count):
            yield {"seed": number, "prompt": list(as_messages(env.reset(number)[0]))}
    finally:
        env.close()
