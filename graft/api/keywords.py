"""Arguments under the names that other libraries have for them: the error names ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from graft.recipe.peer_keys import PEER_KEYS
from graft.registry import nearest

F = TypeVar("F", bound=Callable[..., Any])


def names_ours(function: F) -> F:
    """Refuse an unknown argument with the nearest name that there is.

    graft.Learner(policy, learning_rate=1e-6)   no argument 'learning_rate'; did you mean 'lr'?
    """
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    shown = function.__qualname__.removesuffix(".__init__").removeprefix("Policy")

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options.keys() - known:
            ours = PEER_KEYS.get(name, "").split(" ")[0].rpartition(".")[2]
            hint = ours if ours in known else nearest(name, known)
            meant = f" did you mean {hint!r}?" if hint else ""
            raise TypeError(
                f"{shown}() has no argument {name!r};{meant} It takes {', '.join(known)}"
            )
        return function(*args, **options)

    return checked  # type: ignore[return-value]
