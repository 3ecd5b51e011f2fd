"""Checks of what the user's Python returns, at the place where it enters.

Every error names the object and its file and line, the value seen, and what is expected:

    reward score (my_rewards.py:12) returned None; it must return a finite number. Is a `return` missing?

Tensors are checked by `graft.algos.checked`.
"""

from __future__ import annotations

import inspect
import json
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any
from weakref import WeakSet

from graft.deadlines import is_user_file, short_file
from graft.types import Author, Turn


class UserCodeError(ValueError):
    """The user's code returned something that cannot be used; the run stops."""


class NotFinite(UserCodeError):
    """A number that is NaN or infinite. From an environment it fails the attempt; the run continues."""


class UserObject:
    """The user's object that a value came from; its name is computed only for a message."""

    __slots__ = ("kind", "method", "thing")

    def __init__(self, thing: Any, kind: str, method: str = "") -> None:
        self.thing, self.kind, self.method = thing, kind, method

    def __str__(self) -> str:
        if self.method:
            return method_named(self.thing, self.kind, self.method)
        return named(self.thing, self.kind)


HOOKS = {"step": "respond", "reset": "pose"}
"""Method of graft -> the method that a subclass of BaseEnv writes instead."""


def method_named(env: Any, kind: str, method: str) -> str:
    """The user's method, of the outermost environment that has one: env Room.step (rooms.py:12)"""
    layers = [env]
    while (inner := getattr(layers[-1], "__dict__", {}).get("env")) is not None:
        layers.append(inner)
    for name in (method, HOOKS.get(method, method)):
        for layer in layers:
            for owner in type(layer).__mro__:
                code = getattr(vars(owner).get(name), "__code__", None)
                if code is not None and is_user_file(code.co_filename):
                    place = f"{short_file(code.co_filename)}:{code.co_firstlineno}"
                    return f"{kind} {type(layer).__name__}.{name} ({place})"
    return f"{kind} {type(layers[-1]).__name__}.{method}"


def source_of(thing: Any) -> Any:
    """The function or class behind an object, through tools, partials and bound methods."""
    while True:
        inner = getattr(thing, "function", None) or getattr(thing, "__func__", None)
        if isinstance(thing, partial):
            inner = thing.func
        if inner is None:
            break
        thing = inner
    return thing if inspect.isroutine(thing) or isinstance(thing, type) else type(thing)


def place_of(thing: Any) -> str:
    """File and line of the object's source; "" if unknown."""
    source = inspect.unwrap(source_of(thing)) if callable(thing) else source_of(thing)
    try:
        file = inspect.getsourcefile(source)
        if isinstance(source, type):
            line = inspect.getsourcelines(source)[1]
        else:
            line = source.__code__.co_firstlineno
    except (TypeError, OSError, AttributeError):
        return ""
    return f"{short_file(file)}:{line}" if file else ""


def named(thing: Any, kind: str) -> str:
    """The object's name in messages: reward score (my_rewards.py:12)."""
    name = getattr(thing, "name", None)
    if not isinstance(name, str):
        name = getattr(source_of(thing), "__qualname__", type(thing).__name__)
    place = place_of(thing)
    return f"{kind} {name.removeprefix('<locals>.')}" + (f" ({place})" if place else "")


def is_users_own(function: Any) -> bool:
    """Whether a function was written outside of graft."""
    code = getattr(inspect.unwrap(source_of(function)), "__code__", None)
    return code is not None and is_user_file(code.co_filename)


def user_frame(error: BaseException) -> str:
    """File, line and function of the deepest frame in the user's code; "": there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return f"{short_file(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def seen(value: Any) -> str:
    """A short description of a value: None, the text 'abc', a list of 3, a Tensor of shape [4, 7]."""
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"the text {short(value)}"
    if inspect.iscoroutine(value):
        value.close()  # it will not be awaited: no warning about that
        return f"a coroutine ({value.__qualname__} is async)"
    if inspect.isgenerator(value):
        return f"a generator ({value.__qualname__} has a yield)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    if hasattr(value, "shape"):
        return f"{article} {kind} of shape {list(value.shape)}"
    if isinstance(value, bool | int | float | complex):
        return f"the {kind} {short(value)}"
    if isinstance(value, list | tuple | dict | set | bytes):
        return f"{article} {kind} of {len(value)}: {short(value)}"
    return f"{article} {kind}"


def short(value: Any) -> str:
    """The repr of anything, in a line."""
    try:
        text = repr(value)
    except Exception as error:  # of an object whose repr is broken, or an int too long to write
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"


Owner = str | UserObject


def refusal(owner: Owner, value: Any, wanted: str, verb: str = "returned") -> UserCodeError:
    """The error about a value that `owner` returned."""
    hint = ""
    if value is None:
        hint = ". Is a `return` missing?"
    elif inspect.iscoroutine(value):
        hint = ". Write a plain `def`; code that waits sets blocking = True and runs on a thread"
    return UserCodeError(f"{owner} {verb} {seen(value)}; it must {_verb(verb)} {wanted}{hint}")


def _verb(past: str) -> str:
    return "return" if past.startswith("returned") else "be"


def as_number(
    value: Any, owner: Owner, wanted: str = "a finite number", verb: str = "returned"
) -> float:
    """A finite float: of a bool, an int, a numpy scalar, a tensor with one element.

    >>> as_number(True, "reward f")
    1.0
    """
    if type(value) is float and math.isfinite(value):
        return value
    if value is None or isinstance(value, str | bytes | complex | type):
        raise refusal(owner, value, wanted, verb)
    if getattr(value, "shape", ()) not in ((), (1,)):
        raise refusal(owner, value, f"{wanted}, not one for each of many", verb)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise refusal(owner, value, wanted, verb) from None
    if not math.isfinite(number):
        raise NotFinite(str(refusal(owner, number, wanted, verb)))
    return number


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
        if why := _no_message(message):
            raise UserCodeError(
                f"{owner} {verb} {seen(value)}, in which {short(message)} is no message: {why}. It must "
                f"{_verb(verb)} {wanted}"
            )
    return [dict(message) for message in value]


ROLES = ["system", "user", "assistant", "tool"]
FOREIGN_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant"}
"""Roles of other formats -> those of chat templates."""


def _no_message(message: Any) -> str:
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
        return f"its content is {seen(message['content'])}"
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
        raise TypeError(f"step() was given {seen(action)}; it takes the text that the policy wrote")


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
    if is_plain and math.isfinite(reward) and "observe_as" not in info:
        return value
    ends = as_flag(terminated, owner, "terminated"), as_flag(truncated, owner, "truncated")
    if observation is None and any(ends):
        observation = ""  # it is not shown
    if not isinstance(observation, str):
        raise refusal(owner, observation, "a text", "gave as observation")
    earned = as_number(reward, owner, "a finite number", "gave as reward")
    info = as_info(info, owner)
    role = info.get("observe_as", "user")
    if role not in (*OBSERVED_AS, "messages"):
        raise UserCodeError(
            f"{owner} gave info['observe_as'] = {role!r}; it must be one of {', '.join(OBSERVED_AS)}"
        )
    return Turn(observation, earned, *ends, info)


def check_json(value: Any, owner: Owner, what: str) -> None:
    """Refuse what cannot be written into the record of the run."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserCodeError(
            f"{owner} gave {what} {short(value)}, which cannot be written as JSON ({error}); it must be "
            "plain data: texts, finite numbers, True, False, None, lists and dicts with text keys"
        ) from None


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
                f"{owner} returned {seen(value)}, in which {short(entry)} is no entry; it must return "
                f"{wanted}"
            )
        found.append((Author(entry[0]), entry[1]))
    return found


OBSERVED_AS = ("user", "tool", "inline", "prompt", "raw")
MEMBERS = ("reset", "step", "fork", "close", "blocking", "forkable", "stop", "observe_as")


_sound: WeakSet[type] = WeakSet()
"""Environment classes whose methods were checked."""


def check_env(env: Any, label: Owner) -> None:
    """Refuse an object that is not an environment before it is used; `label` is where it comes from."""
    if env is None or isinstance(env, type):
        raise UserCodeError(
            f"{label} gave {seen(env)}; name a class, or a function that returns an environment"
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


def _check_methods(env: Any) -> None:
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


def raised(owner: Owner, error: BaseException) -> UserCodeError:
    """An exception of the user's code, in one line."""
    at = f" at {frame}" if (frame := user_frame(error)) else ""
    why = f"{type(error).__name__}: {error}{at}"
    return UserCodeError(f"{owner} raised {why}; GRAFT_DEBUG=1 shows it whole")


@contextmanager
def naming(thing: Any, kind: str, *passed: type[Exception]) -> Iterator[None]:
    """Name the object and the line in exceptions of the user's code, except those in `passed`."""
    try:
        yield
    except (UserCodeError, *passed):
        raise
    except Exception as error:
        if not user_frame(error):
            raise
        raise raised(UserObject(thing, kind), error) from error
