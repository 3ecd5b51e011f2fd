"""The border to the user's Python: what it returns is checked where it enters.

Every complaint says which object it is about and where that is written, what came, and what is wanted:

    reward score (my_rewards.py:12) returned None; it must return a finite number. Is a `return` missing?

Nothing here knows tensors: `graft.algos.checked` looks at theirs.
"""

from __future__ import annotations

import inspect
import json
import math
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any

from graft.types import Turn
from graft.waits import is_users, short_file


class UserCodeError(ValueError):
    """Code of the user's gave something that cannot be used; the run ends here."""


def source_of(thing: Any) -> Any:
    """The function or class behind what the user gave: through tools, partials and bound methods."""
    while True:
        inner = getattr(thing, "function", None) or getattr(thing, "__func__", None)
        if isinstance(thing, partial):
            inner = thing.func
        if inner is None:
            break
        thing = inner
    return thing if inspect.isroutine(thing) or isinstance(thing, type) else type(thing)


def place_of(thing: Any) -> str:
    """File and line at which the object was written; "" where that cannot be known."""
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
    """As messages name it: reward score (my_rewards.py:12)."""
    name = getattr(thing, "name", None)
    if not isinstance(name, str):
        name = getattr(source_of(thing), "__qualname__", type(thing).__name__)
    place = place_of(thing)
    return f"{kind} {name.removeprefix('<locals>.')}" + (f" ({place})" if place else "")


def user_frame(error: BaseException) -> str:
    """File, line and function of the deepest frame of the user's own code; "": there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{short_file(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def seen(value: Any) -> str:
    """What came, in a few words: None, the text 'abc', a list of 3, a Tensor of shape [4, 7]."""
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"the text {_short(value)}"
    if inspect.iscoroutine(value):
        value.close()  # nobody awaits it any more
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
        return f"the {kind} {_short(value)}"
    if isinstance(value, list | tuple | dict | set | bytes):
        return f"{article} {kind} of {len(value)}: {_short(value)}"
    return f"{article} {kind}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # of an object whose repr is broken, or an int too long to write
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"


def refusal(who: str, value: Any, wanted: str, verb: str = "returned") -> UserCodeError:
    """The complaint about what `who` gave."""
    hint = ""
    if value is None:
        hint = ". Is a `return` missing?"
    elif inspect.iscoroutine(value):
        hint = ". Write a plain `def`; code that waits sets blocking = True and runs on a thread"
    return UserCodeError(f"{who} {verb} {seen(value)}; it must {_verb(verb)} {wanted}{hint}")


def _verb(past: str) -> str:
    return {"returned": "return", "gave": "give", "has": "have"}.get(past, "be")


def as_number(
    value: Any, who: str, wanted: str = "a finite number", verb: str = "returned"
) -> float:
    """A finite float: of a bool, an int, a numpy scalar, a tensor with one element.

    >>> as_number(True, "reward f")
    1.0
    """
    if type(value) is float and math.isfinite(value):
        return value
    if value is None or isinstance(value, str | bytes | complex | type):
        raise refusal(who, value, wanted, verb)
    if getattr(value, "shape", ()) not in ((), (1,)):
        raise refusal(who, value, f"{wanted}, not one for each of many", verb)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise refusal(who, value, wanted, verb) from None
    if not math.isfinite(number):
        raise refusal(who, number, wanted, verb)
    return number


def as_flag(value: Any, who: str, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) or (hasattr(value, "dtype") and getattr(value, "shape", ()) == ()):
        return bool(value)
    raise refusal(who, value, "True or False", f"gave as {name}")


def as_observation(value: Any, who: str, verb: str = "returned") -> str | list[dict[str, Any]]:
    """A text, or messages, copied: the environment may go on writing into its own list."""
    if isinstance(value, str):
        return value
    wanted = 'a text, or messages such as [{"role": "user", "content": "..."}]'
    if not isinstance(value, list | tuple) or not value:
        raise refusal(who, value, wanted, verb)
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserCodeError(
                f"{who} {verb} {seen(value)}, in which {_short(message)} is no message; it must "
                f"{_verb(verb)} {wanted}"
            )
    return [dict(message) for message in value]


def as_posed(value: Any, who: str) -> tuple[str | list[dict[str, Any]], dict[str, Any]]:
    """What `reset` returns: the observation and the info."""
    wanted = "(observation, info), as in `return prompt, {}`"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise refusal(who, value, wanted)
    observation = as_observation(value[0], who, "returned as its observation")
    return observation, as_info(value[1], who)


def as_info(value: Any, who: str) -> dict[str, Any]:
    if type(value) is dict:
        return value
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refusal(who, value, "a dict, or None", "gave as info")
    return dict(value)


def as_turn(value: Any, who: str) -> Turn:
    """What `step` returns: a Turn, or Gymnasium's five values in its order."""
    if not isinstance(value, Turn):
        if isinstance(value, tuple) and len(value) == 4:
            raise UserCodeError(
                f"{who} returned four values, as Gym did before 0.26; return Turn(observation, reward, "
                "terminated, truncated, info): `done` became terminated (the world ended it) and "
                "truncated (a limit did)"
            )
        if not isinstance(value, tuple) or len(value) != 5:
            raise refusal(
                who, value, "a Turn, as in Turn(observation, reward=1.0, terminated=True)"
            )
        value = Turn(*value)
    observation, reward, terminated, truncated, info = value
    is_plain = type(terminated) is bool and type(truncated) is bool and type(info) is dict
    is_plain = is_plain and type(reward) is float and isinstance(observation, str)
    if is_plain and math.isfinite(reward):
        return value
    ends = as_flag(terminated, who, "terminated"), as_flag(truncated, who, "truncated")
    if observation is None and any(ends):
        observation = ""  # nobody reads it
    if not isinstance(observation, str):
        raise refusal(who, observation, "a text", "gave as observation")
    earned = as_number(reward, who, "a finite number", "gave as reward")
    return Turn(observation, earned, *ends, as_info(info, who))


def check_json(value: Any, who: str, what: str) -> None:
    """Refuse what cannot be written into the record of the run."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserCodeError(
            f"{who} gave {what} {_short(value)}, which cannot be written as JSON ({error}); it must be "
            "plain data: texts, finite numbers, True, False, None, lists and dicts with text keys"
        ) from None
