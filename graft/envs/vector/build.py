"""`make_vec(["game:Wordle-v0"] * 64)`: many envs at once, in one of two ways.

serial     one after the other; the cheapest where envs only compute
threads    one thread per env; for envs that wait on tools, processes, servers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from graft.envs.random_state import checked_seed
from graft.envs.table import build_env
from graft.envs.vector.slot import Autoreset, EnvSlot, EnvSpec
from graft.envs.wrappers import Wrappers
from graft.signatures import explain_arguments

if TYPE_CHECKING:
    from graft.envs.vector.base import VectorEnv

Mode = Literal["auto", "serial", "threads"]


@explain_arguments
def make_vec(
    env_ids: str | Sequence[str],
    wrappers: Wrappers | None = None,
    vec_kwargs: Sequence[Mapping[str, Any]] | None = None,
    async_mode: bool = False,
    seed: int = 0,
    *,
    n: int | None = None,
    mode: Mode = "auto",
    autoreset: Autoreset = "same_step",
    timeout: float | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """A vector of envs: one per id, which may differ; `n` copies of a single one.

    Env i is built with `vec_kwargs[i]` and `kwargs`, of which `kwargs` win, inside of `wrappers`
    (as `make` takes them; `tokenizer=` for those that render chats). Its first episode has the seed
    `seed + i`, or the "seed" in `vec_kwargs[i]`.

    `mode`: "auto" takes threads if an env is `blocking` or a `timeout` is set, else serial;
    `async_mode=True` is GEM's spelling of threads.

    `autoreset`: what follows an end. "same_step": the observation is already the next episode's, and
    info has "final_observation" and "final_info". "next_step": the next step ignores its action and
    gives the next episode's first observation, reward 0. "off": a step after the end is an error.

    `timeout`: seconds one reset or step of one env may take (None: ten minutes). Serial steps
    cannot be interrupted, so they take no timeout.
    """
    ids = [env_ids] * (1 if n is None else n) if isinstance(env_ids, str) else list(env_ids)
    if n is not None and not isinstance(env_ids, str):
        raise ValueError(f"n={n} with a list of ids: write the list out, or give one id")
    if not ids:
        raise ValueError("a vector needs at least one env")
    for name, given, known in (("mode", mode, Mode), ("autoreset", autoreset, Autoreset)):
        if given not in get_args(known):
            raise ValueError(f"{name}={given!r}: must be one of {', '.join(get_args(known))}")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout={timeout}: must be more than 0 seconds, or None")
    if async_mode:
        if mode == "serial":
            raise ValueError("async_mode=True means threads, but mode='serial'; give one of them")
        mode = "threads"
    if mode == "serial" and timeout is not None:
        raise ValueError(
            "a serial vector cannot interrupt a step: leave timeout out, or use mode='threads'"
        )
    specs = env_specs(ids, wrappers, vec_kwargs, seed, kwargs)
    slots = [EnvSlot(spec, autoreset) for spec in specs]
    try:
        for slot in slots:
            slot.open()
    except BaseException:  # envs that were built already may hold processes
        for slot in slots:
            slot.close()
        raise
    waits = timeout is not None or any(slot.env.blocking for slot in slots)
    # imported here: they need numpy, and not every `import graft.envs` does
    if mode == "threads" or (mode == "auto" and waits):
        from graft.envs.vector.threads import ThreadVector as Vector
    else:
        from graft.envs.vector.serial import SerialVector as Vector

    return Vector(slots, timeout)


def env_specs(
    ids: Sequence[str],
    wrappers: Wrappers | None,
    vec_kwargs: Sequence[Mapping[str, Any]] | None,
    seed: int,
    kwargs: Mapping[str, Any],
) -> list[EnvSpec]:
    """One spec per env. The caller's dicts are read, never written: `[{}] * 8` is fine."""
    if vec_kwargs is not None and len(vec_kwargs) != len(ids):
        raise ValueError(f"{len(vec_kwargs)} vec_kwargs for {len(ids)} envs; give one per env")
    specs: list[EnvSpec] = []
    for index, env_id in enumerate(ids):
        args = {"wrappers": wrappers or (), **(vec_kwargs[index] if vec_kwargs else {})}
        first = checked_seed(args.pop("seed", seed + index))
        specs.append(EnvSpec(env_id, partial(build_env, env_id, **{**args, **kwargs}), first))
    return specs
