"""In which settings runs differ: the first thing to know about two of them.

runs/calm/config.yaml   run: {name: calm}   train: {steps: 40, lr: 0.0002}
runs/hot/config.yaml    run: {name: hot}    train: {steps: 40, lr: 0.002}

{"train.lr": ["0.0002", "0.002"]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

OWN = {"run.name", "run.dir"}
"""Every run has its own; that says nothing."""
MOST_SETTINGS = 200
LONGEST = 200


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Setting -> its value in each run; None where a run does not know it."""
    flat = [dict(_flat(config)) for config in configs]
    names = dict.fromkeys(name for config in flat for name in config if name not in OWN)
    found = {name: [config.get(name) for config in flat] for name in names}
    return dict([(n, told) for n, told in found.items() if len(set(told)) > 1][:MOST_SETTINGS])


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Dotted names, down to what is no table."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{before}{name}.")
        else:
            told = value if isinstance(value, str) else json.dumps(value, default=str)
            found.append((f"{before}{name}", told[:LONGEST]))
    return found
