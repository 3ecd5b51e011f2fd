"""`graft serve agent RECIPE|MODEL`: a policy, or a script, behind the API of a model provider, for agents.

$ graft serve agent runs/quickstart
serving runs/quickstart at http://127.0.0.1:41987
  export OPENAI_BASE_URL=http://127.0.0.1:41987/s/5d0c.../v1 OPENAI_API_KEY=...
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graft.config import ConfigError, find_recipe, load_config
from graft.files import append_text
from graft.serving.guard import new_token
from graft.serving.listening import address_of, listening
from graft.types import Episode

if TYPE_CHECKING:
    from graft.api.engine import PolicyEngine
    from graft.api.policy import Policy

TOKEN = "GRAFT_AGENT_TOKEN"
"""As in graft.train.rollouts.agents, which is slow to import."""
POLL_SECONDS = 0.5
LONGEST = 32_768
"""Tokens of a context, where the model's window is longer."""


def refuse_options(source: str, overrides: Sequence[str], options: Mapping[str, object]) -> bool:
    """Whether `source` is a recipe; what only goes with the other kind is refused."""
    try:
        find_recipe(source)
    except ConfigError as error:
        if overrides:
            raise ConfigError(
                f"{source} is no recipe, and overrides such as {overrides[0]} change recipes; a model has "
                "--temperature and --max-tokens"
            ) from error
        return False
    if given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(
            f"{given[0]} is for a model that is served, and {source} is a recipe: its run writes the "
            "episodes, and rollout.temperature and rollout.max_tokens are its settings"
        )
    if others := [one for one in overrides if one.startswith("task.agent=")]:
        raise ConfigError(
            f"{others[0]}: the agents of `graft serve agent` are elsewhere (task.agent=external); use "
            "`graft train` for an agent that the run starts"
        )
    return True


def recipe_overrides(
    recipe: str, host: str | None, port: int | None, overrides: list[str]
) -> list[str]:
    """The settings of a run whose attempts agents elsewhere make; None: as the recipe says.

    Prints where attempts are claimed, with the token, which is in the environment from now on.
    """
    from graft.gateway.address import split_address

    config = load_config(recipe, overrides)
    own_host, own_port = split_address(config.agent.host)
    token = os.environ.pop(TOKEN, "").strip() or new_token()
    more = ["task.agent=external"]
    if int(os.environ.get("RANK", 0)) == 0:  # of torchrun's processes the first one listens
        with listening(host or own_host, own_port if port is None else port) as listener:
            url = address_of(listener)
        typer.echo(f"agents claim attempts with POST {url}/graft/sessions?token={token}")
        more.append(f"agent.host={url.removeprefix('http://')}")
    os.environ[TOKEN] = token  # only now: values of such variables are masked in what is printed
    # the agents attempt held-out tasks too: only where the recipe was written for them, or the user says so
    is_meant = config.task.agent == "external" and "eval_tasks" in config.run.model_fields_set
    if not is_meant and not any(one.startswith("run.eval_tasks=") for one in overrides):
        more.append("run.eval_tasks=0")
    return [*overrides, *more]


def refuse_script(
    source: str, overrides: Sequence[str], script: Path | None, temperature: float | None
) -> Path:
    """The script that is served in place of a model."""
    if script is None:
        raise ConfigError(
            "give a recipe or a model to serve, or --script answers.jsonl, which needs neither"
        )
    given = [source] * bool(source) + [*overrides]
    if given or temperature is not None:
        raise ConfigError(
            f"--script {script} takes the place of a model, so {given[0] if given else '--temperature'} "
            "has no use; leave it out"
        )
    return script


def serve_script(script: Path, host: str, port: int, out: Path, max_tokens: int | None) -> None:
    """Serve the answers of a file until interrupted."""
    from graft.gateway.speakers.script import SHAPE, ScriptedEngine, ScriptError, read_script

    try:
        turns = read_script(script)
    except ScriptError as error:
        raise ConfigError(str(error)) from error
    import graft

    policy = graft.load(shape=SHAPE, alphabet="bytes", chat_template="chatml")
    with graft.Engine(policy) as engine:
        engine.sampler.close()
        engine.sampler = ScriptedEngine(policy.chat, turns)
        _serve(engine, f"the script {script}", host, port, out, max_tokens=max_tokens or 32_000)


def serve_model(
    source: str,
    host: str,
    port: int,
    out: Path,
    temperature: float | None,
    max_tokens: int | None,
    trust: bool,
) -> None:
    """Serve until interrupted; sessions that end are appended to `out`."""
    import graft

    policy = graft.load(source, trust=trust)
    drawn = 1.0 if temperature is None else temperature
    _serve(policy, source, host, port, out, temperature=drawn, max_tokens=max_tokens or 1024)


def _serve(
    policy: Policy | PolicyEngine, source: str, host: str, port: int, out: Path, **drawn: Any
) -> None:
    """Serve until Ctrl-C or SIGTERM; sessions that end, and those that run then, are appended to `out`."""
    import graft

    token = os.environ.pop(
        TOKEN, ""
    ).strip()  # values of such variables are masked in what is printed
    model = policy if isinstance(policy, graft.Policy) else policy.policy
    window = min(model.model.shape.max_positions, LONGEST)
    with graft.agent(
        policy,
        **drawn,
        max_context=window,
        max_calls=1_000_000,
        host=host,
        port=port,
        token=token,
    ) as gateway:
        session = gateway.session()
        url, key = f"{gateway.url}/graft/sessions?token={gateway.token}", session.key
        typer.echo(
            f"serving {source} at {gateway.url}\n"
            f"  export OPENAI_BASE_URL={session.base_url} OPENAI_API_KEY={key}\n"
            f"  export ANTHROPIC_BASE_URL={session.anthropic_base_url} ANTHROPIC_API_KEY={key}\n"
            "what uses these is one session; for others:\n"
            f"  curl -X POST '{url}'\n"
            f"episodes go to {out} when their sessions end; end with Ctrl-C"
        )
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            while True:
                time.sleep(POLL_SECONDS)
                _append(gateway.episodes(), out)
        finally:
            gateway.finish()
            _append(gateway.episodes(), out)


def _interrupt(number: int, frame: Any) -> None:
    """End as Ctrl-C does; a second signal does not disturb the saving."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _append(episodes: Iterable[Episode], file: Path) -> None:
    for episode in episodes:
        append_text(file, f"{episode.dumps()}\n")
