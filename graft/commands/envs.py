"""`graft envs` and `graft play`: list the environments, and play one by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graft.config import read_arguments
from graft.envs import ENVS, find
from graft.envs.entry import family_of, missing
from graft.envs.table import build_env
from graft.types import Turn

COMMANDS = (
    "  :random plays a random action, :quit ends; a line that ends with \\ continues in the next"
)


def list_envs(pattern: str = "") -> list[dict[str, Any]]:
    """A row per environment whose id contains `pattern`, ignoring case."""
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
    """The rows as lines of plain text."""
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
    write: Callable[[str], None] = print,
    read: Callable[[str], str] = input,
) -> dict[str, Any]:
    """Play one episode with the user as the policy, and return its result. End of input ends it."""
    observation, info = env.reset(seed)
    write(_as_text(observation))
    write(COMMANDS)
    total, count, turn = 0.0, 0, Turn()
    box = getattr(env.unwrapped, "box", "")
    while not turn.is_over:
        action = _read(read, f"[{count + 1}] > ")
        if action is None:
            write("")  # end of input: the prompt still stands in its line
            break
        if action.strip() == ":quit":
            break
        if action.strip() == ":random":
            action = env.sample_random_action()
            write(action)
        elif box and box not in action and not action.rstrip().endswith(env.stop or ("\0",)):
            action = f"{box}{action.strip()}}}"  # the user need not type the box
        turn = env.step(action)
        count += 1
        total += turn.reward
        write(f"{turn.observation}\n[reward {turn.reward:g}, {total:g} in all]")
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
        write(f"over after {turns}, reward {total:g}{solution}")
    else:
        write(f"left after {turns}, reward {total:g}")
    return result


def _read(read: Callable[[str], str], prompt: str) -> str | None:
    lines: list[str] = []
    try:
        while True:
            lines.append(read("... " if lines else prompt))
            if not lines[-1].endswith("\\"):
                return "\n".join(lines)
            lines[-1] = lines[-1][:-1]
    except EOFError:
        return "\n".join(lines) or None


def _as_text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"[{message['role']}] {message.get('content')}" for message in observation)


def open_env(env_id: str, wrappers: str, overrides: Sequence[str]) -> Any:
    """`make` with arguments from the command line: digits=3 numbers=[1,9] tool=true.

    `wrappers` are names, "python_tool,concat", or a recipe's list: "[{max_history: {turns: 2}}]".
    """
    bad = [text for text in overrides if "=" not in text]
    if bad:
        raise ValueError(f"{bad[0]!r} is not key=value; arguments of the environment look like n=3")
    listed = [f"wrappers={wrappers}"] if wrappers.startswith("[") else []
    arguments = read_arguments([*overrides, *listed])
    try:
        return build_env(env_id, **{"wrappers": wrappers, **arguments})
    except TypeError as error:  # an unknown argument, or one of a wrong type
        signature = signature_of(find(env_id).builder())
        raise ValueError(f"{env_id}: {error}; its signature is {signature}") from error


def signature_of(build: Callable[..., Any]) -> str:
    """The signature without annotations: "Wordle(*, word_length=5, max_turns=15, only_real_words=False)"."""
    parameters = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in inspect.signature(build).parameters.values()
    ]
    # a functools.partial has no name of its own
    return f"{getattr(build, '__name__', 'built with ')}{inspect.Signature(parameters)}"
