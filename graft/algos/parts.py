"""A part of an algorithm from its name: the factory of a table, or the user's own function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from graft.algos.checked import ARGUMENTS, CHECKED, checked
from graft.algos.losses.covariance import SelectiveLoss
from graft.algos.part_numbers import check_bounds, check_numbers
from graft.algos.preset import Part
from graft.algos.weights import BatchWeight
from graft.registry import resolve
from graft.user_code import UserCodeError, UserObject, describe_value, naming, refusal


def part_name(part: Part | Callable[..., Any]) -> str:
    """The name of a part; of a function given in place of one, "module:function"."""
    if isinstance(part, str):
        return part
    return f"{part.__module__}:{getattr(part, '__qualname__', part)}" if callable(part) else part[0]


def is_users_part(part: Part | Callable[..., Any]) -> bool:
    """Whether it is the user's own, which may read anything."""
    return ":" in part_name(part)


def make(part: Part | Callable[..., Any], table: Mapping[str, Any], what: str) -> Any:
    """Find the factory and call it with its keywords; a function may be given instead of a name.

    >>> make(("clip", {"hihg": 0.28}), LOSSES, "loss")
    Traceback (most recent call last):
    ValueError: loss 'clip' cannot be made with (hihg=0.28): got an unexpected keyword argument
    'hihg'; it is clip(low=0.2, high=0.2, dual=None)
    """
    if isinstance(part, str) or callable(part):
        name, keywords = part, dict[str, Any]()
    else:
        name, keywords = part
    factory = resolve(name, table, what)
    if not callable(factory):
        raise UserCodeError(
            f"{what} {name!r} is {describe_value(factory)}; it must be a function that returns the {what}"
        )
    signature = inspect.signature(factory)
    bare = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()]
    given = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
    try:
        signature.bind(**keywords)
        if name in table:
            check_numbers(signature, keywords)
        with naming(factory, what):
            made = factory(**keywords)
        if name in table:  # behind the factory, which knows more about its own numbers
            check_bounds(signature, keywords)
    except ValueError as error:  # a value that the part itself refuses
        if name not in table:
            raise
        raise ValueError(f"{what} {name!r}: {error}") from error
    except TypeError as error:
        if name in table:
            raise ValueError(
                f"{what} {name!r} cannot be made with ({given}): {error}; it is {name}({', '.join(bare)})"
            ) from error
        if _takes(signature, [None] * len(ARGUMENTS[what]), keywords):
            return _finished(partial(factory, **keywords) if keywords else factory, what)
        wanted = f"({', '.join(ARGUMENTS[what])})"
        more = f", called with ({given})," if given else ""
        raise UserCodeError(
            f"{UserObject(factory, what)}{more} takes ({', '.join(bare)}); it must take {wanted}, or be a "
            f"factory: keywords with defaults that return a function of {wanted}"
        ) from error
    if not callable(made):
        raise refusal(UserObject(factory, what), made, f"the {what}, a function")
    return _finished(made, what)


def _takes(signature: inspect.Signature, args: list[Any], keywords: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        return False
    return True


def _finished(made: Any, what: str) -> Any:
    if isinstance(made, BatchWeight):
        return replace(made, weigh=checked(made.weigh, what))
    if isinstance(made, SelectiveLoss):
        return replace(made, loss=checked(made.loss, what))
    return checked(made, what) if what in CHECKED else made
