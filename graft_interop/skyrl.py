"""Any graft env in SkyRL: a SkyRL-Gym environment over `graft.make`.

    register("game:GuessTheNumber-v0", wrappers="python_tool")      in SkyRL's entry point
    Dataset.from_list(rows("game:GuessTheNumber-v0", 1000)).to_parquet("train.parquet")

SkyRL makes one env per rollout from the row's `env_class`, calls `init` with the row's prompt, then
`step` with each text of the policy. The row names its task by a seed, so the rollouts of a group get
the same one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from graft_interop.dialogue import Dialogue, posed_rows, row_seed

TRAINER = "SkyRL-Gym"


def register(env_id: str, *, name: str | None = None, **kwargs: Any) -> str:
    """Register an env with SkyRL-Gym and return its name, the `env_class` of rows.

    `name`: the env's id unless given; `kwargs` are those of `graft.make`. A second call with the same
    arguments changes nothing: SkyRL's entry point may run twice in one process.
    """
    gym = library()
    name = name or env_id
    known = gym.registry.get(name)
    given = {"env_id": env_id, "args": kwargs}
    if known is None:
        gym.register(id=name, entry_point=env_class(), kwargs=given)
    elif known.kwargs != given:
        raise ValueError(
            f"SkyRL-Gym has an env {name!r} already, with other arguments; give this one a name of its "
            f"own: register({env_id!r}, name=...)"
        )
    return name


def rows(
    env_id: str, count: int, *, seed: int = 0, name: str | None = None, **kwargs: Any
) -> list[dict[str, Any]]:
    """Rows of SkyRL's dataset: the tasks `seed`, `seed + 1`, ... of the env registered as `name`."""
    return [
        {"data_source": env_id, "env_class": name or env_id, **row}
        for row in posed_rows(env_id, count, seed, kwargs)
    ]


@cache
def env_class() -> type[Any]:
    """The class that SkyRL-Gym instantiates."""
    library()
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class SkyRLEnv(BaseTextEnv):
        def __init__(
            self, env_id: str, args: dict[str, Any], env_config: Any = None, extras: Any = None
        ) -> None:
            super().__init__()
            self.seed = row_seed(extras or {}, TRAINER)
            self.max_turns = (extras or {}).get("max_turns", self.max_turns)
            self.dialogue = Dialogue(env_id, args, TRAINER)

        def init(self, prompt: Any) -> tuple[list[Any], dict[str, Any]]:
            """The messages of the task; the row's prompt, which shows them too, is not used."""
            messages = self.dialogue.begin(self.seed)
            if self.dialogue.tools:
                raise ValueError(
                    "these tools are shown by the chat template, to which SkyRL passes no tools; use a "
                    "format that describes them in the prompt: {'tools': {..., 'format': 'tags'}}"
                )
            return messages, {"seed": self.seed}

        def step(self, action: str) -> Any:
            self.turns += 1
            for stop in self.dialogue.stop:
                if action.partition(stop)[2].strip():
                    raise ValueError(
                        f"the policy's text goes on after {stop!r}, where its turn ends; set "
                        f"generator.sampling_params.stop={self.dialogue.stop!r} (and eval_sampling_params)"
                    )
            turn = self.dialogue.reply(action)
            return BaseTextEnvStepOutput(
                observations=self.dialogue.fresh,
                reward=turn.reward,
                done=turn.is_over,
                metadata=turn.info,
                postprocessed_action=None,
            )

        def get_metrics(self) -> dict[str, Any]:
            return {"turns": self.turns, "reward": self.dialogue.reward}

        def close(self) -> None:
            self.dialogue.close()

    return SkyRLEnv


def library() -> Any:
    try:
        import skyrl_gym
    except ImportError as error:
        raise ImportError("SkyRL-Gym is not installed: pip install skyrl-gym") from error
    return skyrl_gym
