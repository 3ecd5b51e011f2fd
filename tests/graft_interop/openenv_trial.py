"""Run by a Python that has OpenEnv (it cannot share a venv with verifiers): prints what happened.

`serve PORT` is a real OpenEnv server of a small counting game; `play URL` plays it through graft.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def serve(port: int) -> None:
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Count(Action):
        message: str

    class Seen(Observation):
        text: str = ""

    class Counter(Environment):
        """Starts at the seed; numbers are added, "end" ends it and pays the total."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
            self.total = seed or 0
            self.steps = 0
            return Seen(text=f"start {self.total}", done=False, reward=0.0)

        def step(self, action: Count, timeout_s: float | None = None, **_: Any) -> Seen:  # pyright: ignore
            self.steps += 1
            if action.message == "end":
                return Seen(text=f"end {self.total}", done=True, reward=float(self.total))
            self.total += int(action.message) if action.message.isdecimal() else 0
            return Seen(text=f"total {self.total}", done=False, reward=0.5)

        @property
        def state(self) -> State:
            return State(episode_id="counter", step_count=self.steps)

    app = create_fastapi_app(Counter, Count, Seen, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def play(url: str) -> None:
    from openenv.core import GenericEnvClient

    from graft_interop.openenv import OpenEnvClient

    result: dict[str, Any] = {}
    env = OpenEnvClient(url, show="text")
    result["reset"] = env.reset(seed=7)[0]
    result["turns"] = [env.step(text) for text in ("3", "not a number é", "end")]
    env.reset(seed=1)
    env.step("4")
    state = json.loads(json.dumps(env.get_state()))
    other = OpenEnvClient(
        GenericEnvClient(base_url=url),
        write=lambda text: {"message": text.strip("<>")},
        show=lambda seen: seen["text"].upper(),
    )
    other.set_state(state)
    result["same state"] = [env.step("1")[0], other.step("<1>")[0]]
    result["whole"] = json.loads(OpenEnvClient(url).reset(seed=2)[0])
    result["flags"] = [env.blocking, env.forkable]
    env.close()
    other.close()
    print(json.dumps(result))


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1] == "serve" else play(sys.argv[2])
