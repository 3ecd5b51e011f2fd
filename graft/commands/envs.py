"""`graft envs` and `graft play`: list the environments, and play one by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graft.envs import ENVS, find, make
from graft.envs.entry import family_of
from graft.envs.games.base import BOX, Game
from graft.envs.needs import missing
from graft.envs.webshop.env import WebShop
from graft.registry import load
from graft.types import Turn

COMMANDS = (
    "  :random plays a random action, :quit ends; a line that ends with \\ goes on in the next"
)


def list_envs(pattern: str = "") -> list[dict[str, Any]]:
    """A row per environment whose id contains `pattern` (case aside)."""
    rows: list[dict[str, Any]] = []
    for env_id in sorted(ENVS, key=lambda name: (family_of(name), name)):
        if pattern.lower() not in env_id.lower():
            continue
        entry = ENVS[env_id]
        lacks = missing(entry)
        rows.append(
            {
                "id": env_id,
                "family": family_of(env_id),
                "turns": entry.turns,
                "needs": list(entry.needs),
                "can_run": not lacks,
                "missing": lacks,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Lines of plain text: readable in a terminal and in a file."""
    width = max((len(row["id"]) for row in rows), default=2)
    yield f"{'id':<{width}}  {'family':<7} {'turns':>5}  {'here':<4}  needs"
    for row in rows:
        turns = "drawn" if row["turns"] is None else str(row["turns"])
        here = "yes" if row["can_run"] else "no"
        needs = row["missing"] or ", ".join(row["needs"]) or "nothing"
        yield f"{row['id']:<{width}}  {row['family']:<7} {turns:>5}  {here:<4}  {needs}"
    ready = sum(row["can_run"] for row in rows)
    yield f"{len(rows)} environments, {ready} can run here"


def play(
    env: Any,
    seed: int | None,
    say: Callable[[str], None] = print,
    ask: Callable[[str], str] = input,
) -> dict[str, Any]:
    """One episode with a person as the policy; its result. End of input ends the episode."""
    observation, info = env.reset(seed)
    say(_words(observation))
    say(COMMANDS)
    total, count, turn = 0.0, 0, Turn()
    is_boxed = isinstance(env.unwrapped, Game | WebShop)
    while not turn.is_over:
        action = _read(ask, f"[{count + 1}] > ")
        if action is None:
            say("")  # end of input: the prompt still stands in its line
            break
        if action.strip() == ":quit":
            break
        if action.strip() == ":random":
            action = env.sample_random_action()
            say(action)
        elif is_boxed and BOX not in action and not action.rstrip().endswith(env.stop or ("\0",)):
            action = f"{BOX}{action.strip()}}}"  # a person need not type the box
        turn = env.step(action)
        count += 1
        total += turn.reward
        say(f"{turn.observation}\n[reward {turn.reward:g}, {total:g} in all]")
    result = {
        "env": env.unwrapped.env_id,
        "seed": info.get("seed"),
        "turns": count,
        "reward": total,
        "terminated": turn.terminated,
        "truncated": turn.truncated,
    }
    turns = "1 turn" if count == 1 else f"{count} turns"
    if turn.is_over:
        answer = info.get("answer")
        solution = "" if answer is None else f"; the answer was {answer!r}"
        say(f"over after {turns}, reward {total:g}{solution}")
    else:
        say(f"left after {turns}, reward {total:g}")
    return result


def _read(ask: Callable[[str], str], prompt: str) -> str | None:
    lines: list[str] = []
    try:
        while True:
            lines.append(ask("... " if lines else prompt))
            if not lines[-1].endswith("\\"):
                return "\n".join(lines)
            lines[-1] = lines[-1][:-1]
    except EOFError:
        return "\n".join(lines) or None


def _words(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"[{message['role']}] {message.get('content')}" for message in observation)


def open_env(env_id: str, wrappers: str, overrides: Sequence[str]) -> Any:
    """`make` with arguments as they are typed: digits=3 numbers=[1,9] tool=true.

    `wrappers` are names, "python_tool,concat", or a recipe's list: "[{max_history: {turns: 2}}]".
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    bad = [text for text in overrides if "=" not in text]
    if bad:
        raise ValueError(f"{bad[0]!r} is not key=value; arguments of the environment look like n=3")
    listed = [f"wrappers={wrappers}"] if wrappers.startswith("[") else []
    try:
        args = OmegaConf.to_container(OmegaConf.from_dotlist([*overrides, *listed]))
    except OmegaConfBaseException as error:
        raise ValueError(f"cannot read {' '.join([*overrides, *listed])}: {error}") from error
    assert isinstance(args, dict)
    settings = {"wrappers": wrappers, **{str(key): value for key, value in args.items()}}
    try:
        return make(env_id, **settings)
    except TypeError as error:  # an argument that the environment does not have, or of a wrong kind
        build = load(entry, "env") if isinstance(entry := find(env_id).build, str) else entry
        raise ValueError(f"{env_id}: {error}; it is {written(build)}") from error


def written(build: Callable[..., Any]) -> str:
    """How a thing is called: "Wordle(*, word_length=5, max_turns=15, only_real_words=False)"."""
    parameters = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in inspect.signature(build).parameters.values()
    ]
    # a functools.partial has no name of its own
    return f"{getattr(build, '__name__', 'built with ')}{inspect.Signature(parameters)}"
