"""Many envs at once: `make_vec(["game:Wordle-v0"] * 64)`.

serial     one after the other; the cheapest where envs only compute
threads    one thread per env; for envs that wait on tools, processes, servers
processes  a few workers with many envs each; for envs that compute for long
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from graft.envs.vector.slot import AUTORESETS, Around, Autoreset, EnvSlot, EnvSpec, checked_seed

if TYPE_CHECKING:
    from graft.envs.vector.base import VectorEnv

Mode = Literal["auto", "serial", "threads", "processes"]
MODES = ("auto", "serial", "threads", "processes")


def make_vec(
    env_ids: str | Sequence[str],
    wrappers: str | Sequence[Around] | None = None,
    vec_kwargs: Sequence[Mapping[str, Any]] | None = None,
    async_mode: bool = False,
    seed: int = 0,
    *,
    n: int | None = None,
    mode: Mode = "auto",
    autoreset: Autoreset = "same_step",
    timeout: float | None = None,
    workers: int | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """A vector of envs: one per id, which may differ; `n` copies of a single one.

    Env i is built with `vec_kwargs[i]` and `kwargs`, of which `kwargs` count where both speak,
    inside of `wrappers` (as `make` takes them, or functions from env to env; innermost first;
    `tokenizer=` for those that render chats). Its first episode has the seed `seed + i`, or the
    "seed" in `vec_kwargs[i]`.

    `mode`: "auto" takes threads if some env is `blocking` or a `timeout` is set, else serial;
    `async_mode=True` is another way to say threads. `workers` is how many processes to use.

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
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: must be one of {', '.join(MODES)}")
    if autoreset not in AUTORESETS:
        raise ValueError(f"autoreset={autoreset!r}: must be one of {', '.join(AUTORESETS)}")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout={timeout}: must be more than 0 seconds, or None")
    if async_mode:
        if mode not in ("auto", "threads"):
            raise ValueError(f"async_mode=True means threads, but mode={mode!r}; give one of them")
        mode = "threads"
    if mode == "serial" and timeout is not None:
        raise ValueError(
            "a serial vector cannot break off a step: leave timeout out, or use threads or processes"
        )
    if workers is not None and (mode != "processes" or workers < 1):
        raise ValueError(f"workers={workers}: 1 or more, and only with mode='processes'")
    recipes = write_recipes(ids, wrappers, vec_kwargs, seed, kwargs)
    if mode == "processes":
        from graft.envs.vector.processes import ProcessVector

        return ProcessVector(recipes, autoreset, timeout, workers)
    seats = [EnvSlot(recipe, autoreset) for recipe in recipes]
    try:
        for seat in seats:
            seat.open()
    except BaseException:  # those before it may hold processes
        for seat in seats:
            seat.close()
        raise
    waits = timeout is not None or any(seat.env.blocking for seat in seats)
    if mode == "threads" or (mode == "auto" and waits):
        from graft.envs.vector.threads import ThreadVector

        return ThreadVector(seats, timeout)
    from graft.envs.vector.serial import SerialVector

    return SerialVector(seats)


def write_recipes(
    ids: Sequence[str],
    wrappers: str | Sequence[Around] | None,
    vec_kwargs: Sequence[Mapping[str, Any]] | None,
    seed: int,
    kwargs: Mapping[str, Any],
) -> list[EnvSpec]:
    """One recipe per env. The caller's dicts are read, never written: `[{}] * 8` is fine."""
    if vec_kwargs is not None and len(vec_kwargs) != len(ids):
        raise ValueError(f"{len(vec_kwargs)} vec_kwargs for {len(ids)} envs; give one per env")
    around = (wrappers,) if isinstance(wrappers, str) else tuple(wrappers or ())
    recipes: list[EnvSpec] = []
    for index, env_id in enumerate(ids):
        args = dict(vec_kwargs[index]) if vec_kwargs is not None else {}
        first = checked_seed(args.pop("seed", seed + index))
        recipes.append(EnvSpec(env_id, {**args, **kwargs}, around, first))
    return recipes
