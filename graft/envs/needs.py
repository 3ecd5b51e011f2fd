"""Can an environment run on this machine? `EnvEntry.needs` against what is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from graft.envs.entry import EnvEntry


def missing(entry: EnvEntry) -> str:
    """What an entry lacks on this machine, and how to get it; "" if it can run.

    EnvEntry(..., needs=("package:reasoning-gym",)) -> 'pip install "graft-rl[envs]"'
    """
    return "; ".join(filter(None, map(_lack, entry.needs)))


@cache  # three hundred ids share a few needs
def _lack(need: str) -> str:
    kind, _, name = need.partition(":")
    return CHECKS[kind](name)


def _package(name: str) -> str:
    is_here = find_spec(name.replace("-", "_")) is not None
    return "" if is_here else 'pip install "graft-rl[envs]"'


def _data(hub_id: str) -> str:
    from graft.envs.dataset import locate

    if locate(hub_id) is not None:
        return ""
    if "/" not in hub_id:  # not on the hub: a file of the user's
        return "a local file, data=PATH"
    return f"the dataset {hub_id}, or data=PATH"


def _sandbox(_: str) -> str:
    from graft.tools.sandbox import methods

    if any(works for name, works, _ in methods() if name != "none"):
        return ""
    return "a sandbox for untrusted code, see graft doctor"


CHECKS = {"package": _package, "data": _data, "sandbox": _sandbox}
