"""The user's own question in place of an environment's: same prompt, same tools, no grading.

    calculator, reset(seed)      "97+53-63="
    own_task(env, "12+34*5=")    "12+34*5=", and the calculator answers calls as before

A dataset's question is replaced inside its prompt, so the request for a boxed answer stays; a system
message stays too. Elsewhere the text is the whole prompt. The answer ends the episode with reward 0,
because the right one is not known.
"""

from __future__ import annotations

from typing import Any

from graft.envs.base import Wrapper
from graft.envs.dataset.base import DatasetEnv
from graft.protocols import Observation
from graft.types import Turn


class OwnTask(Wrapper):
    """Wrap the innermost env, and replace its question by `text`."""

    def __init__(self, env: Any, text: str) -> None:
        super().__init__(env)
        self.text = text

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed, **options)
        return reworded(observation, _question(self.env), self.text), {**info, "answer": None}

    def step(self, action: str) -> Turn:
        return Turn(terminated=True)


def own_task(env: Any, text: str) -> Any:
    """The same environment with the question `text`; refused if its turns depend on a hidden instance."""
    inner = getattr(env, "unwrapped", env)
    if getattr(inner, "max_turns", None) != 1:
        name = getattr(inner, "env_id", "") or type(inner).__name__
        raise ValueError(
            f"{name} cannot ask your own question: its answers depend on the instance that it drew (a game, "
            "an episode of several turns). Choose one of its tasks with --seed N"
        )
    if not isinstance(env, Wrapper):
        return OwnTask(env, text)
    outer = env
    while isinstance(outer.env, Wrapper):
        outer = outer.env
    outer.env = OwnTask(outer.env, text)
    return env


def reworded(observation: Observation, question: str, text: str) -> Observation:
    """`text` in place of `question`; if that is not found, in place of the last message's whole text.

    >>> reworded("2+2?\\n\\nBox the answer.", "2+2?", "3+3?")
    '3+3?\\n\\nBox the answer.'
    """
    if isinstance(observation, str):
        is_found = bool(question) and question in observation
        return observation.replace(question, text, 1) if is_found else text
    *others, last = observation
    content = last.get("content")
    before = content if isinstance(content, str) else ""  # a list of parts, such as images
    return [*others, {**last, "content": reworded(before, question, text)}]


def _question(env: Any) -> str:
    """The question of a dataset's current row; "" for other envs."""
    if not isinstance(env, DatasetEnv):
        return ""
    question = env.table[env.numbers[env.idx]].get(env.question_key)
    return question if isinstance(question, str) else ""
