"""The only import of Ray, and its errors in one line each.

Ray reports the death of a process with a page of text, of which one line is useful:

    The actor died because of an error raised in its creation task, ... ModuleNotFoundError: No module
    named 'graft'                            ->  ModuleNotFoundError: No module named 'graft'
    The actor is dead because its worker process has died. ...  ->  its process was killed ...
    The actor died because its node has died. ...               ->  its machine is gone
"""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

SILENT = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray's own report of each death, which would repeat ours
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # warnings about results that are no longer needed
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a warning about a later version
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
}
"""Ray reads these when it is imported."""

ENDED = "its process was killed (SIGKILL or out of memory)"


def ray_module(address: str = "") -> Any:
    """The library. A cluster of this run's own ("local") answers only those who have its token."""
    if address == "local" and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray's ports are open to the network
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ImportError(
            'cluster.address needs Ray: pip install "graft-rl[ray]" on every machine of the cluster'
        ) from error
    return ray


def store_host(ray: Any) -> str:
    """The address at which the processes of a run find each other: loopback, if they are on one machine."""
    machines = [node for node in ray.nodes() if node["Alive"]]
    return "127.0.0.1" if len(machines) == 1 else ray.util.get_node_ip_address()


def cause_of(error: BaseException) -> str:
    """One line about a process that no longer answers."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if type(error).__name__ == "GetTimeoutError":
        return "it did not answer in time"
    if "running low on memory" in text:
        return "Ray ended it because its machine had no memory left"
    if "in its creation task" in text:
        return lines[-1][:300]
    if "node has died" in text or "node was terminated" in text:
        return "its machine is gone"
    if "worker process has died" in text:
        return ENDED
    return lines[0][:300] if lines else type(error).__name__
