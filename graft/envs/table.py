"""The table of environments, and `make`, which builds one of them.

`ENVS` lists every id; your own may also be written "your.module:Class" without an entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from graft.envs.base import BaseEnv, EnvSource, FirstSeed
from graft.envs.checked import check_env
from graft.envs.dataset import DATASETS
from graft.envs.entry import EnvEntry, family_of
from graft.envs.multi_agent.base import MultiAgentEnv
from graft.envs.multi_agent.seat import SeatEnv
from graft.envs.own_tools import with_own_tools
from graft.envs.wrappers import Wrappers, wrap
from graft.ours import is_ours
from graft.plugins import Table, entries
from graft.protocols import Env
from graft.registry import UnknownName, check_options, load, load_named
from graft.signatures import explain_arguments
from graft.spelling import nearest
from graft.trust import check_name
from graft.user_code import UserCodeError, describe_value, named, naming, place_of, source_of

BUNDLED: dict[str, EnvEntry] = {
    "arithmetic": EnvEntry("graft.envs.arithmetic:Arithmetic"),
    "calculator": EnvEntry("graft.envs.calculator:CalculatorTask", turns=6),
    "countdown": EnvEntry("graft.envs.countdown:Countdown"),
    "prompts": EnvEntry("graft.envs.dataset.prompts:PromptsEnv", needs=("data:rows of your own",)),
    **DATASETS,
}


class EnvTable(Table):
    """Every id, and how it is built."""

    def find(self) -> dict[str, EnvEntry]:
        found = {name: EnvEntry(place, turns=None) for name, place in super().find().items()}
        for name, place in entries("graft.env_tables").items():
            found |= load(place, f"table of environments {name!r}")
        return found


ENVS = EnvTable("graft.envs", BUNDLED)


@explain_arguments
def make(
    env_id: str | Callable[..., Any] | Env,
    *,
    seed: int | None = None,
    wrappers: Wrappers = (),
    tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """Build an Env; keyword arguments override the ones it was registered with.

    >>> make("calculator", operands=(2, 2)).reset(seed=0)[0]
    '127-41='
    >>> make("calculator", operands=(2, 2), seed=0).reset()[0]
    '127-41='

    Instead of an id: a class or function of your own, `make(MyEnv, wrappers="python_tool", size=3)`,
    or an instance, of which a copy is taken.

    `seed` is that of the first episode that `reset` starts without one; a class of your own whose
    constructor takes a seed gets it instead. `wrappers` are names, or functions from env to env,
    innermost first: "python_tool,concat". Those that render chats take the `tokenizer`.
    """
    given = {"wrappers": wrappers, "tokenizer": tokenizer, **kwargs}
    if seed is None:
        return build_env(env_id, **given)
    if _takes_seed(_entry_of(env_id)[1].builder()):
        return build_env(env_id, seed=seed, **given)
    env = FirstSeed(build_env(env_id, **given), seed)
    env.made_by = partial(make, env_id, seed=seed, **given)
    return env


def _takes_seed(build: Any) -> bool:
    """Whether a builder that is not bundled has a parameter for a seed."""
    if not callable(build) or _is_bundled(build):
        return False
    parameters = inspect.signature(build).parameters.values()
    return any(one.name == "seed" or one.kind is one.VAR_KEYWORD for one in parameters)


def _is_bundled(build: Any) -> bool:
    return is_ours(build)


def build_env(
    env_id: str | Callable[..., Any] | Env,
    *,
    wrappers: Wrappers = (),
    tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """`make` for callers that give every reset a seed: a keyword `seed` is the constructor's."""
    given, (env_id, entry) = env_id, _entry_of(env_id)
    build: Any = entry.builder()
    if not callable(build):
        raise UserCodeError(
            f"env {env_id!r} is {describe_value(build)}; name a class, or a function that "
            "returns an environment: "
            "every task gets its own instance"
        )
    is_bundled = _is_bundled(build)
    if "dress" in kwargs and is_bundled:
        raise ValueError(
            f"env {env_id!r}: the argument 'dress' is now called 'syntax': syntax={kwargs['dress']!r}"
        )
    with naming(build, f"env {env_id!r}:"):
        try:
            env: Any = build(**{**entry.args, **kwargs})
        except TypeError:
            place = f"{at}; " if (at := place_of(build)) else ""
            hint = f" ({place}give task.args in a recipe, keywords to graft.make)"
            what = f"env {env_id!r}{'' if is_bundled else hint}"
            check_options(build, {**entry.args, **kwargs}, what, meant=("wrappers",))
            raise
    if isinstance(env, MultiAgentEnv) and "rng" in vars(env):
        env.env_id, env = env_id, SeatEnv(env)
    check_env(env, f"env {env_id!r}")
    if isinstance(env, BaseEnv) and "rng" not in vars(env):
        raise UserCodeError(
            f"env {env_id!r}: {named(env, 'class')} has an __init__ that does not call super().__init__()"
        )
    _check_new(env, env_id)
    innermost = getattr(env, "unwrapped", env)  # task ids carry the innermost env's id
    innermost.env_id = env_id
    where = getattr(build, "func", build)  # a functools.partial has no name of its own
    where = type(innermost) if inspect.ismethod(build) else where  # the fork() of an instance
    innermost.entry_point = f"{where.__module__}:{where.__qualname__}"
    env = with_own_tools(env)
    if wrappers:
        env = wrap(env, wrappers, tokenizer)
    if isinstance(env, EnvSource):
        env.made_by = partial(build_env, given, wrappers=wrappers, tokenizer=tokenizer, **kwargs)
    return env


def _entry_of(given: Any) -> tuple[str, EnvEntry]:
    """The id and the entry of an id, class, function or instance."""
    if isinstance(given, str):
        return given, find(given)
    if isinstance(given, type) or inspect.isroutine(given) or isinstance(given, partial):
        name = getattr(given, "env_id", "") or getattr(source_of(given), "__name__", "env")
        return name, EnvEntry(given, turns=None)
    if hasattr(given, "step") and hasattr(given, "fork"):
        inner = getattr(given, "unwrapped", given)
        name = getattr(inner, "env_id", "") or type(inner).__name__
        return name, EnvEntry(given.fork, turns=None)
    raise UserCodeError(
        f"an environment is an id, a class, a function that builds one or an instance of it, not "
        f"{describe_value(given)}; derive yours from graft.BaseEnv, and give the class or 'module:Class'"
    )


_made: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _check_new(env: Any, env_id: str) -> None:
    """Refuse an environment that `make` returned before: attempts at two tasks would share it."""
    try:
        ids = _made.setdefault(env, set())
    except TypeError:  # not hashable, or no weak references
        return
    if env_id in ids:
        raise UserCodeError(
            f"env {env_id!r} returned the same {named(env, 'environment')} twice; every task needs its "
            "own instance, so build it inside the function"
        )
    ids.add(env_id)


def find(env_id: str) -> EnvEntry:
    """The entry of an id, or one for the user's own "module:attr"."""
    if not isinstance(env_id, str):
        raise UserCodeError(
            f"an env id is a text, not {describe_value(env_id)}; write 'module:Class', or build "
            "the object yourself: "
            "MyEnv()"
        )
    if env_id in ENVS:
        if ENVS.is_foreign(env_id):
            check_name(env_id, "env")
        return ENVS[env_id]
    family = family_of(env_id).lower()
    if family not in _families(len(ENVS)):  # "your.module:Class"
        return EnvEntry(load_named(env_id, "env"), turns=None)
    known = [name for name in ENVS if family_of(name) == family]
    hint = closest_id(env_id)
    meant = f" did you mean {hint!r}?" if hint else ""
    listed = ", ".join(sorted(known)[:8]) + (", ..." if len(known) > 8 else "")
    raise UnknownName(
        f"unknown env {env_id!r};{meant} known: {listed} (all: graft envs). "
        'Your own: "your.module:name"'
    )


@lru_cache(maxsize=1)
def _families(num_ids: int) -> frozenset[str]:
    """The families of all ids in `ENVS`, which only grows; `find` asks for each task of the user's env."""
    return frozenset(map(family_of, ENVS))


def closest_id(env_id: str) -> str | None:
    """The id that `env_id` was probably meant to be: its case or family may be wrong.

    >>> closest_id("wordle"), closest_id("Game:Sudoku-v0-hrad")
    ('game:Wordle-v0', 'game:Sudoku-v0-hard')
    """
    lower = {name.lower(): name for name in ENVS}
    typed = env_id.lower()
    if typed in lower:
        return lower[typed]
    short = {name.partition(":")[2].removesuffix("-v0"): name for name in lower if ":" in name}
    if typed in short:
        return lower[short[typed]]
    close = nearest(typed, list(lower))
    if close is None and (near := nearest(typed, list(short))):
        close = short[near]
    return lower[close] if close else None


@explain_arguments
def register(env_id: str, entry: str | Callable[..., Env], **defaults: Any) -> None:
    """Add an env to `ENVS`: a class, a function that returns an env, or "package.module:name"."""
    known = ENVS[env_id].build if env_id in ENVS else None
    if known is not None and not _is_redefined(known, entry):
        raise ValueError(f"env {env_id!r} is already registered as {known!r}; pick another id")
    ENVS[env_id] = EnvEntry(entry, defaults, turns=None)


def _is_redefined(known: Any, entry: Any) -> bool:
    """Whether `entry` is the same class or function, defined again: a notebook's cell was run twice."""
    names = [
        (getattr(one, "__module__", 0), getattr(one, "__qualname__", 1)) for one in (known, entry)
    ]
    return names[0] == names[1] and known is not entry


def print_envs() -> None:
    """Print every registered id, one per line (`graft envs` prints more)."""
    print("\n".join(sorted(ENVS)))
