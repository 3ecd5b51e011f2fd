"""An OpenEnv server as a graft env, through OpenEnv's own client.

env = OpenEnvClient("http://localhost:8000")          field "message" in, all fields out
env = OpenEnvClient(CodingEnv(base_url=...), write=lambda text: CodeAction(code=text),
                    show=lambda observation: observation.stdout)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graft.envs.plain import plain
from graft.types import Turn
from graft_interop.external import ExternalEnv, as_text


class OpenEnvClient(ExternalEnv):
    """One session of a server. It does not fork: the server's state cannot be copied."""

    blocking = True
    forkable = False

    def __init__(
        self,
        client: Any,
        *,
        write: Callable[[str], Any] | str = "message",
        show: Callable[[Any], str] | str | None = None,
        pass_seed: bool = True,
        max_turns: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        """`client`: an OpenEnv client, or the address of a server.

        `write` makes an action of the policy's text: a function, or the field it goes into. `show`
        makes text of an observation: a function, or the field to show (None: all, as JSON).
        `pass_seed`: whether the server's reset takes a seed; if not, episodes cannot be repeated.
        `timeout`: seconds to wait for a response if `client` is an address; a client has its own.
        """
        super().__init__(max_turns)
        openenv = library()
        if isinstance(client, str):
            client = openenv.GenericEnvClient(base_url=client, message_timeout_s=timeout)
        # the client is asynchronous; sync() drives it from a thread of the library
        self.client: Any = client.sync() if isinstance(client, openenv.EnvClient) else client
        self.write = write if callable(write) else lambda text: {write: text}
        if show is None:
            show = as_text
        self.show = show if callable(show) else lambda seen: as_text(field(seen, show))
        self.pass_seed = pass_seed

    def begin(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        result = self.client.reset(**({"seed": seed} if self.pass_seed else {}))
        return self.show(result.observation), self.info_of(result)

    def respond(self, action: str) -> Turn:
        result = self.client.step(self.write(action))
        # OpenEnv does not say why an episode ended: counted as terminated
        reward, is_over = float(result.reward or 0.0), bool(result.done)
        return Turn(self.show(result.observation), reward, is_over, False, self.info_of(result))

    def info_of(self, result: Any) -> dict[str, Any]:
        return {"observation": plain(result.observation), **plain(result.metadata or {})}

    def close(self) -> None:
        self.client.close()


def field(observation: Any, name: str) -> Any:
    if isinstance(observation, Mapping):
        return observation.get(name, "")
    return getattr(observation, name, "")


def library() -> Any:
    try:
        import openenv.core
    except ImportError as error:
        raise ImportError('OpenEnv is not installed: pip install "graft-rl[openenv]"') from error
    return openenv.core
