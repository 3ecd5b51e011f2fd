"""Checks of environments that users write: their members, and what their methods return.

Every error names the method and its file and line, as in `graft.user_code`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any
from weakref import WeakSet

from graft.types import Author, Turn
from graft.user_code import (
    HOOKS,
    MAX_REWARD,
    Owner,
    UserCodeError,
    UserObject,
    as_reward,
    describe_value,
    method_named,
    named,
    refusal,
    short,
)

OBSERVED_AS = ("user", "tool", "inline", "prompt", "raw")
MEMBERS = ("reset", "step", "fork", "close", "blocking", "forkable", "stop", "observe_as")
ROLES = ["system", "user", "assistant", "tool"]
FOREIGN_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant"}
"""Roles of other formats -> those of chat templates."""


def as_flag(value: Any, owner: Owner, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) or (hasattr(value, "dtype") and getattr(value, "shape", ()) == ()):
        return bool(value)
    raise refusal(owner, value, "True or False", f"gave as {name}")


def as_observation(value: Any, owner: Owner, verb: str = "returned") -> str | list[dict[str, Any]]:
    """A text, or a copy of the messages, since the environment may change its own list later."""
    if isinstance(value, str):
        return value
    wanted = 'a text, or messages such as [{"role": "user", "content": "..."}]'
    if not isinstance(value, list | tuple) or not value:
        raise refusal(owner, value, wanted, verb)
    for message in value:
        if why := why_no_message(message):
            raise UserCodeError(
                f"{owner} {verb} {describe_value(value)}, in which {short(message)} is no "
                f"message: {why}. It must "
                f"return {wanted}"
            )
    return [dict(message) for message in value]


def why_no_message(message: Any) -> str:
    """Why something is not a chat message; "": it is one."""
    if not isinstance(message, Mapping):
        return "it is no dict"
    role = message.get("role")
    if not isinstance(role, str):
        return "it has no role"
    meant = [FOREIGN_ROLES[role]] if role in FOREIGN_ROLES else get_close_matches(role, ROLES, n=1)
    if role not in ROLES and meant:  # the template decides about other roles
        return f"the role {role!r} is called {meant[0]!r}"
    if not isinstance(message.get("content"), str | list | None):
        return f"its content is {describe_value(message['content'])}"
    if message.get("content") is None and "tool_calls" not in message:
        return "it has no content"
    return ""


def as_reset(value: Any, owner: Owner) -> tuple[str | list[dict[str, Any]], dict[str, Any]]:
    """What `reset` returns: the observation and the info."""
    wanted = "(observation, info), as in `return prompt, {}`"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise refusal(owner, value, wanted)
    observation = as_observation(value[0], owner, "returned as its observation")
    info = as_info(value[1], owner)
    tools = info.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(one, Mapping) for one in tools)
    ):
        raise refusal(owner, tools, "a list of function schemas (dicts)", "gave as info['tools']")
    return observation, info


def as_info(value: Any, owner: Owner) -> dict[str, Any]:
    if type(value) is dict:
        return value
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refusal(owner, value, "a dict, or None", "gave as info")
    return dict(value)


def check_action(action: Any) -> None:
    """What `step` is given: a text."""
    if not isinstance(action, str):
        raise TypeError(
            f"step() was given {describe_value(action)}; it takes the text that the policy wrote"
        )


def as_turn(value: Any, owner: Owner) -> Turn:
    """What `step` returns: a Turn, or Gymnasium's five values in its order."""
    if not isinstance(value, Turn):
        if isinstance(value, tuple) and len(value) == 4:
            raise UserCodeError(
                f"{owner} returned four values, as Gym did before 0.26; return Turn(observation, reward, "
                "terminated, truncated, info): `done` became terminated (the world ended it) and "
                "truncated (a limit did)"
            )
        if not isinstance(value, tuple) or len(value) != 5:
            wanted = "a Turn, as in Turn(observation, reward=1.0, terminated=True)"
            raise refusal(owner, value, wanted)
        value = Turn(*value)
    observation, reward, terminated, truncated, info = value
    is_plain = type(terminated) is bool and type(truncated) is bool and type(info) is dict
    is_plain = is_plain and type(reward) is float and isinstance(observation, str)
    if is_plain and abs(reward) <= MAX_REWARD and "observe_as" not in info:
        return value
    ends = as_flag(terminated, owner, "terminated"), as_flag(truncated, owner, "truncated")
    if observation is None and any(ends):
        observation = ""  # it is not shown
    if not isinstance(observation, str):
        raise refusal(owner, observation, "a text", "gave as observation")
    earned = as_reward(reward, owner, "a finite number", "gave as reward")
    info = as_info(info, owner)
    role = info.get("observe_as", "user")
    if role not in (*OBSERVED_AS, "messages"):
        raise UserCodeError(
            f"{owner} gave info['observe_as'] = {role!r}; it must be one of {', '.join(OBSERVED_AS)}"
        )
    return Turn(observation, earned, *ends, info)


def as_trace(value: Any, owner: Owner) -> list[tuple[Author, str]]:
    """What `demonstrate` returns: authors and their texts, in order."""
    wanted = "[(Author.POLICY, text), (Author.ENV, text), ...]"
    if not isinstance(value, list | tuple) or not value:
        raise refusal(owner, value, wanted)
    found: list[tuple[Author, str]] = []
    for entry in value:
        is_pair = isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[1], str)
        if not is_pair or entry[0] not in (Author.POLICY, Author.ENV):
            raise UserCodeError(
                f"{owner} returned {describe_value(value)}, in which {short(entry)} is no entry; "
                "it must return "
                f"{wanted}"
            )
        author = entry[0]
        found.append((author if type(author) is Author else Author(author), entry[1]))
    return found


_sound: WeakSet[type] = WeakSet()
"""Environment classes whose methods were checked."""


def check_env(env: Any, label: Owner) -> None:
    """Refuse an object that is not an environment before it is used; `label` is where it comes from."""
    if env is None or isinstance(env, type):
        raise UserCodeError(
            f"{label} gave {describe_value(env)}; name a class, or a function that returns an environment"
        )
    if fault := _env_fault(env):
        raise UserCodeError(f"{label}: {named(env, 'class')} has {fault}")
    if type(env) not in _sound:
        _check_methods(env)
        _sound.add(type(env))


def _env_fault(env: Any) -> str:
    """What is wrong with its members; "": nothing."""
    if missing := [name for name in MEMBERS if not hasattr(env, name)]:
        return (
            f"no {', '.join(missing)}; derive it from graft.envs.base.BaseEnv, which has everything except "
            "what you write (pose and respond, or reset and step)"
        )
    stop, most = env.stop, getattr(env, "max_turns", None)
    if not isinstance(stop, tuple | list) or not all(isinstance(s, str) and s for s in stop):
        return f"stop = {stop!r}; it must be a tuple of texts, as in stop = ('</answer>',)"
    if env.observe_as not in OBSERVED_AS:
        return f"observe_as = {env.observe_as!r}; it must be one of {', '.join(OBSERVED_AS)}"
    for name in ("blocking", "forkable"):
        if not isinstance(getattr(env, name), bool):
            return f"{name} = {getattr(env, name)!r}; it must be True or False"
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        return f"max_turns = {most!r}; it must be a whole number from 1, or None for no limit"
    return ""


HOOK_RESULTS = {
    "pose": "def pose(self)`, which returns the prompt",
    "respond": "def respond(self, action)`, which returns a graft.Turn",
}


def _check_methods(env: Any) -> None:
    for method, hook in HOOKS.items():
        written = [
            getattr(getattr(type(env), name, None), "__qualname__", "") for name in (method, hook)
        ]
        if written == [f"BaseEnv.{method}", f"BaseEnv.{hook}"]:
            raise UserCodeError(
                f"{named(env, 'class')} has no {hook}(); write `{HOOK_RESULTS[hook]}"
            )
    for method, given in {"reset": "seed=None", "step": "action"}.items():
        function = getattr(env, method)
        if inspect.iscoroutinefunction(function):
            raise UserCodeError(
                f"{method_named(env, 'env', method)} is async; write a plain `def {method}` and set "
                "blocking = True on the class: it then runs on a thread"
            )
        try:
            inspect.signature(function).bind(0)
        except TypeError as error:
            called = f"env.{method}({given.partition('=')[0]})"
            raise UserCodeError(
                f"{method_named(env, 'env', method)} cannot be called as {called} ({error}); write "
                f"def {method}(self, {given})"
            ) from None


def check_fork(twin: Any, env: Any) -> None:
    """Refuse a result of fork() that is not a copy."""
    owner = UserObject(env, "env", "fork")
    if twin is env:
        raise UserCodeError(
            f"{owner} returned the environment itself, so all attempts would act on the same one; "
            "return a copy, or use BaseEnv's fork()"
        )
    if not hasattr(twin, "step"):
        raise refusal(owner, twin, "a copy of the environment")
