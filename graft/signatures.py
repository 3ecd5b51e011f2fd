"""Calls whose arguments do not fit: the error says what was given, what there is, and what was meant.

graft.Learner(policy, learning_rate=1e-6)   Learner() has no argument 'learning_rate'; did you mean 'lr'?
graft.generate(policy)                      generate() lacks prompts: write generate(policy, prompts, ...)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

synonyms: Mapping[str, str] = {}
"""Arguments of other libraries -> the key of a recipe that means the same; `graft.api` fills it."""
CALLS = ("load", "Engine", "Learner", "collect", "evaluate", "generate")
"""Functions to which an argument may belong that was given to another of them."""


def explain_arguments(target: F, hint: str = "") -> F:
    """Let a function, or the `__init__` of a class, answer arguments that do not fit with a sentence.

    A call that fits costs one frame. `hint` is added to the sentence.
    """
    if isinstance(target, type):
        target.__init__ = explain_arguments(target.__init__, hint)
        return target  # type: ignore[return-value]

    @wraps(target)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return target(*args, **options)
        except TypeError:
            try:
                inspect.signature(target).bind(*args, **options)
            except TypeError as error:
                reason = _describe_misfit(target, args, options) or str(error)
            else:
                raise  # the arguments fit: the error is from inside
        raise TypeError(f"{reason}{hint and '; '}{hint}")

    return call  # type: ignore[return-value]


def _describe_misfit(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> str:
    """What is wrong with a call; "" if it is none of the usual mistakes."""
    name = _public_name(function, args)
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters, args = parameters[1:], args[1:]
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [one for one in parameters if one.kind not in several]
    known = [one.name for one in parameters]
    for option in options:
        if option not in known:
            return f"{name}() has no argument {option!r}; {_meant(option, known)}"
    by_place = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    if twice := [one for one in by_place[: len(args)] if one in options]:
        return f"{name}() got {twice[0]} twice: by its place and as {twice[0]}=; leave one out"
    if len(args) > len(by_place):
        others = ", ".join(f"{one}=" for one in known if one not in by_place)
        return (
            f"{name}() takes {len(by_place)} arguments without a name, and {len(args)} were given; "
            f"{f'write the others with theirs: {others}' if others else 'leave the others out'}"
        )
    required = [one.name for one in parameters if one.default is one.empty]
    missing = [one for one in required if one not in options and one not in by_place[: len(args)]]
    usage = ", ".join([*required, *(["..."] if len(known) > len(required) else [])])
    return f"{name}() lacks {' and '.join(missing)}: write {name}({usage})" if missing else ""


def _public_name(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """The name by which a user called it: of the class for its constructor, and as `import graft` has it."""
    owner, _, method = function.__qualname__.partition(".")
    if method in ("__init__", "__new__") and args:
        kind = args[0] if isinstance(args[0], type) else type(args[0])
        owner, method = kind.__name__, ""
    names = {path.rpartition(":")[2]: name for name, path in sys.modules["graft"]._LAZY.items()}
    return names.get(owner, owner) + (f".{method}" if method else "")


def _meant(option: str, known: Sequence[str]) -> str:
    """The argument that was meant, by the names of other libraries too; else the functions that have it."""
    from graft.spelling import nearest

    takes = f"t takes {', '.join(known) or 'none'}"
    peer = synonyms.get(option, "").split(" ")[0].rpartition(".")[2]
    if hint := peer if peer in known else nearest(option, list(known)):
        return f"did you mean {hint!r}? I{takes}"
    takers = [f"{name}()" for name in CALLS if option in _parameters(name)]
    have = f"{' and '.join(takers)} {'have' if takers[1:] else 'has'} it, " if takers else ""
    return f"{have}i{takes}"


def _parameters(name: str) -> Mapping[str, Any]:
    """Those of a function of graft; none before torch is imported, which takes seconds."""
    if "torch" not in sys.modules:
        return {}
    return inspect.signature(getattr(sys.modules["graft"], name)).parameters
