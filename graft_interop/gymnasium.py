r"""A Gymnasium env as a graft env: text in, text out.

    env = GymnasiumEnv("FrozenLake-v1", names=["left", "down", "right", "up"])
    env.reset(seed=0)               "0", or what `show` makes of the observation
    env.step("I go \\boxed{down}")  Turn("4")

Text spaces need nothing. A Discrete action space is read from the last \boxed{...}: its number, or
one of `names`. For any other space give `parse` (text -> action, None if there is none) and `show`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graft.text.parse import last_boxed
from graft.trust import check_name
from graft.types import Turn
from graft_interop.external import ExternalEnv, as_text, can_copy

Parse = Callable[[str], Any]
Show = Callable[[Any], str]


class GymnasiumEnv(ExternalEnv):
    """An action outside of the space gets `hint` as its answer; the inner env does not see it.

    It forks if the inner env can be deep-copied.
    """

    def __init__(
        self,
        env: Any,
        *,
        parse: Parse | None = None,
        show: Show | None = None,
        names: Sequence[str] = (),
        rules: str = "",
        hint: str = "",
        max_turns: int | None = None,
        **kwargs: Any,
    ) -> None:
        """`env`: a Gymnasium env, or its id with `kwargs` for `gymnasium.make`.

        `rules` precede the first observation. `max_turns` counts all turns, also those without a valid
        action; the inner env may have its own limit.
        """
        super().__init__(max_turns)
        gymnasium = library()
        if isinstance(env, str) and ":" in env:  # gymnasium imports the part before the colon
            check_name(env, "Gymnasium env")
        self.env: Any = gymnasium.make(env, **kwargs) if isinstance(env, str) else env
        if kwargs and not isinstance(env, str):
            raise ValueError(
                f"{sorted(kwargs)}: arguments for gymnasium.make, but env is an env already"
            )
        space = self.env.action_space
        if parse is None:
            parse = reader(space, [name.casefold() for name in names])
        self.parse, self.show = parse, show or as_text
        self.rules = rules
        self.hint = hint or f"This is not a valid action. {describe_space(space, names)}"
        self.names = list(names)
        self.forkable = can_copy(self.env)

    def begin(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        self.env.action_space.seed(seed)
        observation, info = self.env.reset(seed=seed)
        shown = self.show(observation)
        return f"{self.rules}\n{shown}" if self.rules else shown, info

    def respond(self, action: str) -> Turn:
        chosen = self.parse(action)
        if chosen is None or not self.env.action_space.contains(chosen):
            return Turn(self.hint, info={"invalid": True})
        observation, reward, is_terminated, is_truncated, info = self.env.step(chosen)
        return Turn(
            self.show(observation), float(reward), bool(is_terminated), bool(is_truncated), info
        )

    def sample_random_action(self) -> str:
        """Draw from a text or discrete space only: other spaces have a `parse` without an inverse."""
        chosen = self.env.action_space.sample()
        if isinstance(chosen, str):
            return chosen
        start = getattr(self.env.action_space, "start", 0)
        return f"\\boxed{{{self.names[chosen - start] if self.names else chosen}}}"

    def close(self) -> None:
        self.env.close()


def reader(space: Any, names: Sequence[str]) -> Parse:
    spaces = library().spaces
    if isinstance(space, spaces.Text):
        return lambda text: text
    if not isinstance(space, spaces.Discrete):
        raise ValueError(
            f"action space {space}: only Text and Discrete are read automatically; give "
            "parse=function from text to action"
        )
    if names and len(names) != space.n:
        raise ValueError(f"{len(names)} names for {space.n} actions")
    start = int(space.start)

    def parse(text: str) -> int | None:
        boxed = last_boxed(text)
        name = (text if boxed is None else boxed).strip().casefold()
        if name in names:
            return start + names.index(name)
        # no action number has more digits; int() of a very long text takes long
        return int(name) if len(name) < 10 and name.isdecimal() else None

    return parse


def describe_space(space: Any, names: Sequence[str]) -> str:
    if names:
        return f"Answer with one of: {', '.join(names)}, written as \\boxed{{{names[0]}}}."
    if not hasattr(space, "n"):
        return f"Answer with an element of {space}."
    first, last = int(space.start), int(space.start) + int(space.n) - 1
    return f"Answer with a number from {first} to {last}, written as \\boxed{{{first}}}."


def library() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(
            'Gymnasium is not installed: pip install "graft-rl[gymnasium]"'
        ) from error
    return gymnasium
