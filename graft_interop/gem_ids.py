"""Every graft env under GEM's names, for trainers that call `gem.make`: Oat, ROLL and others.

    import gem
    from graft_interop.gem_ids import register_envs

    register_envs()
    env = gem.make("graft/game:GuessTheNumber-v0", seed=233)

GEM's vectors and wrappers go around them as around its own.
"""

from __future__ import annotations

from typing import Any

from graft.envs.base import Wrapper, as_messages
from graft.types import Turn
from graft_interop.gem import library


def register_envs(*env_ids: str, prefix: str = "graft/") -> list[str]:
    """Register graft's ids, all of them or those given, with GEM; return the names that it knows.

    An id may also be "your.module:Class". A second call is fine: names that GEM knows are left alone.
    """
    from graft.envs import ENVS, find

    gem_registry = library().envs.registration
    names: list[str] = []
    for env_id in env_ids or sorted(ENVS):
        find(env_id)  # an unknown one is refused here, not in the middle of a run
        names.append(f"{prefix}{env_id}")
        if names[-1] not in gem_registry.ENV_REGISTRY:
            gem_registry.register(names[-1], entry_point=f"{__name__}:as_gem", env=env_id)
    return names


def as_gem(env: str, seed: int | None = None, **kwargs: Any) -> GemView:
    """What `gem.make` builds; `seed` is that of the first episode, `kwargs` are those of `graft.make`."""
    from graft.envs import make

    return GemView(make(env, seed=seed, **kwargs))


class GemView(Wrapper):
    """An env with GEM's conventions: observations are texts, and a board is only in `info["suffix"]`.

    graft   observation "Pick a cell.\\n. . #", suffix ". . #"
    GEM     observation "Pick a cell.",         suffix ". . #"

    An episode that ran out of turns is terminated too: ROLL looks at `terminated` alone.
    """

    def reset(self, seed: int | None = None, **options: Any) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed, **options)
        text = "\n\n".join(str(message["content"]) for message in as_messages(observation))
        return without_margins(text, info), info

    def step(self, action: str, **_: Any) -> Turn:
        turn = self.env.step(action)
        text = without_margins(turn.observation, turn.info)
        return turn._replace(observation=text, terminated=turn.is_over)


def without_margins(text: str, info: dict[str, Any]) -> str:
    """`text` without the parts that GEM's wrappers and templates add again."""
    text = text.removeprefix(info.get("prefix") or "")
    if suffix := info.get("suffix"):
        text = text.removesuffix(suffix).removesuffix("\n")
    return text
