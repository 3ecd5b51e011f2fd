"""The one place that imports Ray."""

from __future__ import annotations

from typing import Any


def ray_module() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ImportError(
            'cluster.address needs Ray: pip install "graft-rl[ray]" on every machine of the cluster'
        ) from error
    return ray
