"""Checks of what the user's Python returns, at the place where it enters.

Every error names the object and its file and line, the value seen, and what is expected:

    reward score (my_rewards.py:12) returned None; it must return a finite number. Is a `return` missing?

Tensors are checked by `graft.algos.checked`, environments by `graft.envs.checked`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from graft.deadlines import is_user_file, short_file
from graft.ours import FOLDERS

OURS = *FOLDERS, str(Path(asyncio.__file__).parent)
MAX_TEXT = 4_000
"""Characters of an exception's text that messages keep."""


class UserCodeError(ValueError):
    """The user's code returned something that cannot be used: its attempt fails, and where every attempt
    does, the run stops."""


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


def is_users(error: BaseException) -> bool:
    """Whether code outside of graft and asyncio raised it: else Ctrl-C did, or the end of a coroutine."""
    is_main = threading.current_thread() is threading.main_thread()
    is_anywhere = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Ctrl-C raises wherever the program is
    if isinstance(error, KeyboardInterrupt) and is_anywhere:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not trace.tb_frame.f_code.co_filename.startswith(OURS)


def describe_error(error: BaseException) -> str:
    """ "KeyError: 'x'", in valid Unicode and of bounded length, whatever the exception is."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"<its text raises {type(broken).__name__}>"
    return clean(f"{type(error).__name__}: {text}")


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """The text without halves of surrogate pairs, which no log can hold, and cut in its middle."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return text.encode(errors="replace").decode()


def describe_value(value: Any) -> str:
    """A short description of a value: None, the text 'abc', a list of 3, a Tensor of shape [4, 7]."""
    try:
        return _describe_value(value)
    except Exception:  # of an object whose attributes raise
        return f"a {type(value).__name__}"


def _describe_value(value: Any) -> str:
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
    must = "return" if verb.startswith("returned") else "be"
    return UserCodeError(f"{owner} {verb} {describe_value(value)}; it must {must} {wanted}{hint}")


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
    try:
        is_many = getattr(value, "shape", ()) not in ((), (1,))
        number = 0.0 if is_many else float(value)
    except Exception:  # of an object of the user's, any
        raise refusal(owner, value, wanted, verb) from None
    if is_many:
        raise refusal(owner, value, f"{wanted}, not one for each of many", verb)
    if not math.isfinite(number):
        raise NotFinite(str(refusal(owner, number, wanted, verb)))
    return number


MAX_REWARD = 1e12
"""In size: of larger ones the square that a std takes is no finite float32."""


def as_reward(
    value: Any, owner: Owner, wanted: str = "a finite number", verb: str = "returned"
) -> float:
    """`as_number`, of a size that advantages can be computed from."""
    number = as_number(value, owner, wanted, verb)
    if abs(number) > MAX_REWARD:
        raise refusal(owner, number, f"{wanted} from -1e12 to 1e12; 0 to 1 is usual", verb)
    return number


def check_json(value: Any, owner: Owner, what: str) -> None:
    """Refuse what cannot be written into the record of the run."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserCodeError(
            f"{owner} gave {what} {short(value)}, which cannot be written as JSON ({error}); it must be "
            "plain data: texts, finite numbers, True, False, None, lists and dicts with text keys"
        ) from None


def raised(owner: Owner, error: BaseException) -> UserCodeError:
    """An exception of the user's code, in one line."""
    at = f" at {frame}" if (frame := user_frame(error)) else ""
    why = f"{describe_error(error)}{at}"
    return UserCodeError(f"{owner} raised {why}; GRAFT_DEBUG=1 shows it whole")


@contextmanager
def naming(thing: Any, kind: str, *passed: type[Exception]) -> Iterator[None]:
    """Name the object and the line in exceptions of the user's code, except those in `passed`."""
    try:
        yield
    except (UserCodeError, *passed):
        raise
    except SystemExit as error:  # it would end the run without a word
        raise UserCodeError(
            f"{UserObject(thing, kind)} called exit({error.code}) at {user_frame(error)}; raise an exception "
            "that says what is wrong"
        ) from error
    except Exception as error:
        if not user_frame(error):
            raise
        raise raised(UserObject(thing, kind), error) from error
